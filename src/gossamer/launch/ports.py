"""Ports: finds free ones on this machine, for servers to listen on."""

from __future__ import annotations

import errno
import random
import socket
from itertools import islice

from gossamer.errors import ConnectError

# Below the ephemeral ports: a client that dials an ephemeral port while its server is away may be given the very same
# port to dial from, connects to itself, and keeps the port
PORTS = range(20000, 32000)


def free_endpoints(host: str, count: int) -> tuple[str, ...]:
    """Different endpoints at `host` with free ports, as HOST:PORT."""
    candidates = random.SystemRandom().sample(PORTS, len(PORTS))
    return tuple(islice((f"{host}:{port}" for port in candidates if _is_free(host, port)), count))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as problem:
            if problem.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise ConnectError(
                f"Servers cannot listen at {host} ({problem}). Name another interface: --interface NAME"
            ) from None
    return True
