"""torch's TCPStore, a key-value store over TCP, with any build of torch.

By default torch's server runs on libuv. A build without libuv, such as Debian's, rejects the default even for clients,
and has another server. Both servers speak the same protocol in set, get, add, check, wait, compare_set and multi_get,
so machines with different builds can share one store.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

WITHOUT_LIBUV = "built without libuv"  # part of torch's error


def hosted_store(
    address: str, listener: socket.socket, *, world: int | None = None, timeout: timedelta | None = None
) -> Store:
    """Serve a store in this process, as long as the returned store is referenced.

    Args:
        address: address at which this process reaches its own listener.
        listener: a listening socket, which the store owns from here on.
        world: wait until this many processes have connected, this one included. None: return at once.
        timeout: how long reads wait for a key, and this call for `world`; torch's default (5 minutes) if None.

    Raises:
        RuntimeError: the store cannot start, or processes are missing after the timeout.
    """
    port = int(listener.getsockname()[1])
    return _tcp_store(address, port, world, timeout, is_master=True, master_listen_fd=listener.detach())


def remote_store(address: str, port: int, *, world: int | None = None, timeout: timedelta | None = None) -> Store:
    """Connect to a store that another process serves. Arguments as for `hosted_store`.

    Raises:
        RuntimeError: the store does not answer within the timeout.
    """
    return _tcp_store(address, port, world, timeout)


def _tcp_store(address: str, port: int, world: int | None, timeout: timedelta | None, **options: Any) -> Store:
    options |= {} if timeout is None else {"timeout": timeout}
    options |= {"world_size": world, "wait_for_workers": world is not None}
    try:
        return TCPStore(address, port, **options)
    except RuntimeError as problem:
        if WITHOUT_LIBUV not in str(problem):
            raise
    return TCPStore(address, port, **options, use_libuv=False)  # torch has not touched the listener
