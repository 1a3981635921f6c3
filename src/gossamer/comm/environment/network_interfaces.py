"""Network interfaces: lists interfaces and their addresses, and chooses the one towards the other workers."""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

from gossamer.base.host_port import LOOPBACK, family_of, is_loopback
from gossamer.comm.environment.launcher_env import JobEnvironment
from gossamer.errors import ConnectError


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of every network interface that is up, by name; empty on systems other than Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    get_flags, get_address, up_and_running = 0x8913, 0x8915, 0x41  # SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP | IFF_RUNNING
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, get_flags, request), 16)
                address = socket.inet_ntoa(fcntl.ioctl(probe, get_address, request)[20:24])
            except OSError:
                continue  # no IPv4 address, or removed since it was listed
            if flags & up_and_running == up_and_running:
                found[name] = address
    return found


def global_ipv6_addresses(name: str) -> tuple[str, ...]:
    """Return the global IPv6 addresses of an interface that are usable; empty on systems other than Linux."""
    unusable = 0x20 | 0x40 | 0x08  # IFA_F_DEPRECATED, IFA_F_TENTATIVE, IFA_F_DADFAILED
    return tuple(
        address
        for address, scope, flags, interface in _ipv6_rows()
        if interface == name and scope == "00" and not int(flags, 16) & unusable
    )


def _ipv6_rows() -> list[tuple[str, str, str, str]]:
    """Address, scope, flags and interface of each IPv6 address; empty on systems other than Linux."""
    try:
        lines = Path("/proc/thread-self/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    rows = (line.split() for line in lines)
    return [(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])), *row[3:6]) for row in rows]  # type: ignore[misc]


def interface_towards(address: str) -> str | None:
    """Return the interface through which this machine reaches `address`, or None if unknown."""
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: for a datagram socket the kernel only selects the route
            own_address = probe.getsockname()[0]
    except OSError:
        return None
    owned = [*interfaces().items(), *((name, owned) for owned, *_, name in _ipv6_rows())]
    return next((name for name, owned_address in owned if owned_address == own_address), None)


def choose_interface(job: JobEnvironment) -> str | None:
    """Return the interface for this job's traffic: the one towards rank 0, but never loopback between machines.

    Raises ConnectError if several interfaces are possible.
    """
    towards = interface_towards(job.master_address or LOOPBACK)
    owned = interfaces()
    if towards is None or not is_loopback(owned.get(towards, "")) or job.local_world == job.world:
        return towards
    candidates = {name: address for name, address in owned.items() if not is_loopback(address)}
    if len(candidates) == 1:
        return next(iter(candidates))
    listed = ", ".join(f"{name} ({address})" for name, address in candidates.items()) or "none"
    raise ConnectError(
        f"{job.master_address} is this machine itself, the job spans several machines, and the network to the other "
        f"machines is ambiguous: the interfaces that are up are {listed}. Name one: `gossamer "
        "run --interface NAME ...`, or set GLOO_SOCKET_IFNAME=NAME."
    )
