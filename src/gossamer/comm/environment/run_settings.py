"""Run settings: servers, addresses and the run's name from GOSSAMER_* variables."""

from __future__ import annotations

import os

from gossamer.base.host_port import LOOPBACK, Address, read_host_port
from gossamer.comm.environment.network_interfaces import global_ipv6_addresses, interfaces
from gossamer.errors import ConnectError

COORDINATOR = "GOSSAMER_COORDINATOR"
HEADER_BYTES = "GOSSAMER_LAB_HEADER_BYTES"  # of workers on emulated hosts
LARGEST_FRAME_BYTES = 2**31  # for servers, which begin to listen before they know the model


def dedicated_servers() -> tuple[Address, ...]:
    """Return the addresses of this run's dedicated servers; empty if each worker hosts a part of the parameters.

    Raises ConnectError if GOSSAMER_SERVERS is not a list of HOST:PORT.
    """
    text = os.environ.get("GOSSAMER_SERVERS", "")
    try:
        return tuple(read_host_port(each) for each in text.split(",") if each)
    except ValueError:
        raise ConnectError(
            f"GOSSAMER_SERVERS={text!r} is not a list of addresses. Write GOSSAMER_SERVERS=HOST:PORT,HOST:PORT, or "
            "start the run with `gossamer run --servers 2`."
        ) from None


def adopt_servers(addresses: str, order: int) -> None:
    """Set variables of this process that depend on its run: the addresses of the servers, as a launcher sets them in a
    fixed run, and the number of the order in which it draws data, see rendezvous.data_order."""
    os.environ["GOSSAMER_SERVERS"], os.environ["GOSSAMER_DATA_ORDER"] = addresses, str(order)


def is_elastic() -> bool:
    """Whether this process was started as a worker of an elastic run."""
    return bool(os.environ.get(COORDINATOR))


def run_name() -> str:
    """The run's name. Processes of different runs refuse each other."""
    return os.environ.get("GOSSAMER_RUN", "")


def restarts_alone() -> bool:
    """Whether this run's launcher restarts lost workers individually, and keeps a registry of their addresses."""
    return os.environ.get("GOSSAMER_REGISTRY") == "1"


def returns() -> bool:
    """Whether this process replaces a lost worker while the others continue."""
    return os.environ.get("GOSSAMER_REJOIN") == "1"


def own_address() -> str:
    """Return the address of the interface for this job's traffic: IPv4, or IPv6 if it has no other; loopback if no
    interface was chosen."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return interfaces().get(chosen) or next(iter(global_ipv6_addresses(chosen)), LOOPBACK)


def local_relay() -> int | None:
    """Return the number of the relay that this machine's launcher runs; None without one."""
    number = os.environ.get("GOSSAMER_RELAY")
    return int(number) if number else None


def own_ipv6_addresses() -> tuple[str, ...]:
    """Return the global IPv6 addresses, public or private, of the interface for this job's traffic; empty without any,
    or outside Linux."""
    return global_ipv6_addresses(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0])
