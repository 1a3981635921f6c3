"""Where the processes of one run meet: a store that the launcher itself serves, and ports for its servers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from gossamer.errors import ConnectError

# Below what systems hand out by themselves: who dials such a port while its server is away may be given the very same
# one to dial from, reaches itself, and keeps the port
PORTS = range(20000, 32000)
NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET
ERRORS_ONLY = 2

T = TypeVar("T")


def free_endpoints(host: str, count: int) -> tuple[str, ...]:
    """Places at `host` where nobody listens now, all different, as HOST:PORT."""
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


def serve_store(endpoint: str, network: Path | None = None) -> tuple[Store, str]:
    """A key-value store that listens at `endpoint` and nowhere else, as long as it is kept; and where that is.

    endpoint: HOST:PORT, with port 0 for any free one; network: the file of the network namespace to listen in, None for
    this process's own.
    """
    host, _, port = endpoint.rpartition(":")
    if network is None:
        return _serve(host, int(port))
    _hush()
    return _within(network, lambda: _serve(host, int(port)))


def _serve(host: str, port: int) -> tuple[Store, str]:
    try:
        listener = socket.create_server((host, port))
    except OSError as problem:
        raise ConnectError(
            f"The launcher cannot listen at {host} for its workers ({problem}), so they could not meet. Name "
            "another interface: --interface NAME"
        ) from None
    port = listener.getsockname()[1]
    # From here on the descriptor is the store's
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


def _hush() -> None:
    """Let the engine's store not warn of every peer whose address has no name, as in a lab none has.

    The engine reads TORCH_CPP_LOG_LEVEL while it is imported, which is over. Where it keeps the level elsewhere, it
    warns.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):
            engine = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            ctypes.c_int.in_dll(engine, "FLAGS_caffe2_log_level").value = ERRORS_ONLY


def _within(network: Path, action: Callable[[], T]) -> T:
    """Sockets belong to the namespace of the thread that made them: a thread goes there and ends."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_there, network, action).result()


def _there(network: Path, action: Callable[[], T]) -> T:
    with network.open("rb") as file:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(file.fileno(), NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(network))
    return action()
