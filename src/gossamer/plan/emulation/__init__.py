"""Network emulation on one machine: each worker in a network namespace, with the rates, delays and loss of a Network.

capabilities     whether this machine supports it: as root, in a user namespace, or not at all
testbed          EmulatedNetwork: builds hosts and a fabric, counts bytes, cuts and slows links; removes everything
namespaces       hosts as network namespaces, commands in them, byte counters of the kernel; removes stale ones
fabric           connects hosts: the protocol, and the kernel's bridge, for rates only
tun_switch       also delay, jitter, loss and shared links: the program gossamer-switch between TUN devices
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
