"""Closing exchange: each rank sends a last text to all ranks through the job's store, without a collective operation.

A rank that ends early or never joins delays the other ranks by a few seconds, and disturbs none of their operations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

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
