"""A slow network on one machine: every worker on a host of its own, with lines and paths as a Network says."""

from gossamer.emulation.capabilities import Plan, plan
from gossamer.emulation.fault_injection import Fault, Schedule, read_fault
from gossamer.emulation.namespaces import LabHost
from gossamer.emulation.shell import LabError
from gossamer.emulation.testbed import Lab

__all__ = ["Fault", "Lab", "LabError", "LabHost", "Plan", "Schedule", "plan", "read_fault"]
