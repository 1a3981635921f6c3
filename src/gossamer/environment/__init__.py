"""Which job am I in, and how do its workers find each other."""

from gossamer.environment.interfaces import choose_interface, interface_towards, interfaces
from gossamer.environment.joining import device_for, join, leave
from gossamer.environment.launchers import Job, detect, here

__all__ = [
    "Job",
    "choose_interface",
    "detect",
    "device_for",
    "here",
    "interface_towards",
    "interfaces",
    "join",
    "leave",
]
