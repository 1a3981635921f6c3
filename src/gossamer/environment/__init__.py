"""Which job am I in, and how do its workers find each other."""

from gossamer.environment.launcher_env import JobEnvironment, detect, here
from gossamer.environment.network_interfaces import choose_interface, interface_towards, interfaces
from gossamer.environment.rendezvous import NO_GROUP, comebacks, device_for, join, leave

__all__ = [
    "NO_GROUP",
    "JobEnvironment",
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
