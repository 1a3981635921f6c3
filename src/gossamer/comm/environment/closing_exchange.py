"""Closing exchange: each rank's last text for all others, through the job's store and without a collective operation.

So a rank that ends early, or never comes, delays the others by a few seconds and disturbs none of their operations.
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
    """Give `text` to all ranks.

    Args:
        store: of the job, with keys that no other start of it reads.
        name: of the exchange, the same on every rank and used once.
        seconds: to wait for the other ranks.

    Returns:
        All ranks' texts by rank; None where one did not come in time, or the store has ended or does not answer.
    """
    found: list[list[str] | None] = []
    # torch waits without end for a store whose machine is cut off
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
    """Whether all keys are there in time. Looks again and again: torch's own wait would keep the store from others."""
    while not store.check(list(keys)):
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_SECONDS)
    return True
