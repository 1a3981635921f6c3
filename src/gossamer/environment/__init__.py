"""Which job am I in, and how do its workers find each other."""

from gossamer.environment.interfaces import choose_interface, interface_towards, interfaces
from gossamer.environment.joining import NO_GROUP, comebacks, device_for, join, leave
from gossamer.environment.launchers import Job, detect, here

__all__ = [
    "NO_GROUP",
    "Job",
    "choose_interface",
    "comebacks",
    "detect",
    "device_for",
    "here",
    "interface_towards",
    "interfaces",
    "join",
    "leave",
]
