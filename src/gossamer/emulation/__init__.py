"""A slow network on one machine: every worker on a host of its own, with lines and paths as a Network says."""

from gossamer.emulation.capabilities import EmulationPlan, plan
from gossamer.emulation.fault_injection import Fault, Schedule, read_fault
from gossamer.emulation.namespaces import EmulatedHost
from gossamer.emulation.shell import EmulationError
from gossamer.emulation.testbed import EmulatedNetwork

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
