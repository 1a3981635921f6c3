"""Network emulation on one machine: each worker in a network namespace, with rates, delays and loss as a Network says.

capabilities     whether this machine can: as root, in a user namespace, or not at all
testbed          EmulatedNetwork: builds hosts and a fabric, counts bytes, cuts and slows; removes everything
namespaces       hosts as network namespaces, commands in them, bytes that the kernel counted; removes stale ones
fabric           what joins hosts: the protocol, and the kernel's bridge, for rates only
tun_switch       delay, jitter, loss and shared lines too: the program gossamer-switch between TUN devices
fault_injection  `cut(2, at=10, for_seconds=5)`: faults and their schedule
"""

from gossamer.plan.emulation.capabilities import EmulationPlan, plan
from gossamer.plan.emulation.fault_injection import Fault, Schedule, read_fault
from gossamer.plan.emulation.namespaces import EmulatedHost, EmulationError
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
