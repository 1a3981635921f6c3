"""Network emulation on one machine: each worker in a network namespace, with rates, delays and loss as a Network says.

capabilities        whether this machine can: as root, in a user namespace, or not at all
testbed             EmulatedNetwork: builds hosts and a fabric, counts bytes, cuts and slows; removes everything
namespaces          hosts as network namespaces; removes those that killed processes left
fabric              the protocol of what joins hosts; there are two
bridge              rates only: virtual Ethernet, a bridge, token buckets, all in the kernel
tun_switch          delay, jitter, loss and shared lines too: the program gossamer-switch between TUN devices
traffic_shaping     token buckets, queues and packet sizes
fault_injection     `cut(2, at=10, for_seconds=5)`: faults and their schedule
interface_counters  bytes that the kernel counted on a host's interface
shell               `ip` and `tc`
"""

from gossamer.plan.emulation.capabilities import EmulationPlan, plan
from gossamer.plan.emulation.fault_injection import Fault, Schedule, read_fault
from gossamer.plan.emulation.namespaces import EmulatedHost
from gossamer.plan.emulation.shell import EmulationError
from gossamer.plan.emulation.testbed import EmulatedNetwork

__all__ = [
    "EmulatedHost",
    "EmulatedNetwork",
    "EmulationError",
    "EmulationPlan",
    "Fault",
    "Schedule",
    "plan",
    "read_fault",
]
