"""Where the machines of a job meet."""

from __future__ import annotations

import errno
import socket

from gossamer.errors import ConnectError


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
    """Fail at once where the first machine could not listen, instead of after the engine's own patience."""
    _, port = split_endpoint(endpoint)
    # The engine listens on every address of the machine, whatever the host is called
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
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
