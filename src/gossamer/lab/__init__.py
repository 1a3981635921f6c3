"""A slow network on one machine: every worker on a host of its own, with lines and paths as a Network says."""

from gossamer.lab.ability import Plan, plan
from gossamer.lab.errors import LabError
from gossamer.lab.faults import Fault, Schedule, read_fault
from gossamer.lab.hosts import LabHost
from gossamer.lab.lab import Lab

__all__ = ["Fault", "Lab", "LabError", "LabHost", "Plan", "Schedule", "plan", "read_fault"]
