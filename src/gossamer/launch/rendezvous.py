"""Where the machines of a job meet."""

from __future__ import annotations

import errno
import socket
import time

from gossamer.environment import interface_towards
from gossamer.errors import ConnectError

REACH_SECONDS = 10.0
SELF_REACH_SECONDS = 2.0
POLL_SECONDS = 0.1
LIKELY: dict[type[OSError], str] = {
    socket.gaierror: "The name means nothing to this machine: write the address instead.",
    ConnectionRefusedError: "That machine answers, but nothing listens there: it has not been started, or is over.",
}


def free_endpoint() -> str:
    """A port on this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConnectError(
            f"{endpoint!r} is not a place to meet: it needs a host and a port. Write --rendezvous HOST:PORT, "
            "such as --rendezvous 10.0.0.1:29500, with the address of the machine whose --node-rank is 0."
        )
    return host.strip("[]"), int(port)


def check_free(endpoint: str) -> None:
    """Fail at once where the first machine could not listen or would not find itself there.

    The engine's own patience with both is minutes.
    """
    host, port = split_endpoint(endpoint)
    # The engine listens on every address of the machine, whatever the host is called
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as problem:
            reason = "is in use" if problem.errno == errno.EADDRINUSE else f"cannot be listened on ({problem})"
            raise ConnectError(
                f"Port {port} {reason} on this machine, so the workers cannot meet at {endpoint}. "
                f"Take another one on all machines: --rendezvous {endpoint.rpartition(':')[0]}:{port + 1}; "
                f"`ss -ltnp sport = :{port}` shows who has it."
            ) from None
        if (failure := _call(host, port, SELF_REACH_SECONDS)) is not None:
            raise ConnectError(
                f"{endpoint} does not lead to this machine ({failure}), and machine 0 is where the others come to. "
                "Write this machine's own address in --rendezvous, or --node-rank 0 on the machine that has this one."
            )


def reach(endpoint: str, seconds: float = REACH_SECONDS) -> None:
    """Wait until the first machine listens; the error says where it was sought, by which interface, and why in vain."""
    host, port = split_endpoint(endpoint)
    deadline = time.monotonic() + seconds
    while (problem := _call(host, port, deadline - time.monotonic())) is not None:
        if isinstance(problem, socket.gaierror) or time.monotonic() + POLL_SECONDS >= deadline:
            interface = interface_towards(host) or "the system's choice"
            raise ConnectError(
                f"No connection to machine 0 at {endpoint}, interface {interface}: {problem}. {_likely(problem)} "
                "Machine 0 starts first, with --node-rank 0 and the same --rendezvous; it then waits for the others."
            )
        time.sleep(POLL_SECONDS)


def _call(host: str, port: int, seconds: float) -> OSError | None:
    """What went wrong, if anything did."""
    try:
        socket.create_connection((host, port), max(seconds, POLL_SECONDS)).close()
    except OSError as problem:
        return problem
    return None


def _likely(problem: OSError) -> str:
    return LIKELY.get(type(problem), "Nobody answers: the address is wrong, its machine is off, or a firewall is shut.")
