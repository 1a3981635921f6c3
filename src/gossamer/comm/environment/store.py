"""Rendezvous store: texts that all ranks share by keys before they can reach each other, and at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gossamer.base.units import first_line
from gossamer.comm.environment.listening import listen_as
from gossamer.comm.environment.tcp_store import hosted_store, remote_store
from gossamer.errors import ConnectError


class RendezvousStore:
    """The job's key-value store, with keys prefixed by `name`. serves: this process hosts it."""

    def __init__(self, name: str, address: str, port: int, *, serves: bool, seconds: float) -> None:
        self._where = f"{address}:{port}"
        try:
            timeout = timedelta(seconds=seconds)
            if serves:  # at this address only; torch itself would listen at all addresses of the machine
                listener = listen_as(address, port, several_machines=False, interface_address=None)
                store = hosted_store(address, listener, timeout=timeout)
            else:
                store = remote_store(address, port, timeout=timeout)
        except (OSError, RuntimeError) as error:
            raise ConnectError(
                f"cannot connect to the rendezvous at {self._where} ({first_line(error)}). Rank 0 was not "
                "started, the address is wrong, or a firewall drops the packets. Start all workers within a few "
                "seconds of each other, and open that port."
            ) from error
        self._store = PrefixStore(name, store)

    def pin(self, topic: str, text: str) -> None:
        self._store.set(topic, text)

    def read(self, topic: str, seconds: float) -> str:
        """Wait for the text under this topic and return it. Raises TimeoutError after `seconds`."""
        try:
            self._store.wait([topic], timedelta(seconds=seconds))
            return str(self._store.get(topic).decode())
        except RuntimeError as error:
            raise TimeoutError(f"no value for {topic} arrived at {self._where} within {seconds:g} s") from error

    def everyone(self, topic: str, rank: int, world: int, text: str, seconds: float) -> list[str]:
        """All-gather a text. Raises ConnectError with the missing ranks."""
        keys = [f"{topic}/{each}" for each in range(world)]
        self.pin(keys[rank], text)
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
            return [self._store.get(key).decode() for key in keys]
        except RuntimeError as error:
            missing = [each for each, key in enumerate(keys) if not self._there(key)]
            raise ConnectError(
                f"{len(missing)} of {world} workers did not reach the rendezvous at {self._where} within "
                f"{seconds:g} s: ranks {missing}. Check their machines, and start all workers together."
            ) from error

    def _there(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError:
            return False  # the store itself has ended


# -- closing exchange: each rank sends a last text to all ranks, without a collective operation ------------------------

# A rank that ends early or never joins delays the other ranks by a few seconds, and disturbs none of their operations.

WAIT_SECONDS = 5.0
LOOK_SECONDS = 0.02
GRACE_SECONDS = 1.0  # for a store that answers late


def exchange_at_end(
    store: Store, name: str, rank: int, world: int, text: str, seconds: float = WAIT_SECONDS
) -> list[str] | None:
    """All-gather `text` through the store.

    Args:
        store: The job's store, with keys that only this start of the job reads.
        name: Name of the exchange, equal on all ranks and used once.
        rank: Rank of this process.
        world: Number of ranks.
        text: This rank's text.
        seconds: How long to wait for the other ranks.

    Returns:
        The texts by rank, or None if a rank was late or the store did not answer.
    """
    found: list[list[str] | None] = []
    # torch waits forever for a store on an unreachable machine
    asks = threading.Thread(
        target=lambda: found.append(_exchange(store, name, rank, world, text, time.monotonic() + seconds)), daemon=True
    )
    asks.start()
    asks.join(seconds + GRACE_SECONDS)
    return found[0] if found else None


def _exchange(store: Store, name: str, rank: int, world: int, text: str, until: float) -> list[str] | None:
    texts, read = ([f"closing/{name}/{kind}/{each}" for each in range(world)] for kind in ("text", "read"))
    try:
        store.set(texts[rank], text)
        if not _wait(store, texts, until):
            return None
        found: list[str] = [store.get(key).decode() for key in texts]
        store.set(read[rank], "1")
        if rank == 0:  # the store may end with this process
            _wait(store, read, until)
    except RuntimeError:
        return None
    return found


def _wait(store: Store, keys: Sequence[str], until: float) -> bool:
    """Poll until all keys exist; False after the deadline. torch's own wait would block the store for other ranks."""
    while not store.check(list(keys)):
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_SECONDS)
    return True
