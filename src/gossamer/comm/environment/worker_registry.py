"""Worker registry: addresses and ends of a run's workers in the launcher's store."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gossamer.comm.environment.run_settings import Address, restarts_alone
from gossamer.errors import ConnectError

STORE_SECONDS = 10.0
PLACES, ENDED, ENDS_WITH, TRAINS, EXITED = "gossamer/places", "ended", "ends-with-", "trains-", "exited-"


def publish(rank: int, place: Address) -> None:
    """Enter this worker's address; does nothing where the launcher keeps no registry."""
    store = registry_store()
    if store is not None:
        store.set(str(rank), json.dumps(place))


def published(world: int) -> dict[int, Address]:
    """Each worker's latest address, by rank, of those that have one. Raises ConnectError."""
    store = registry_store()
    if store is None:
        raise ConnectError(
            "Nobody knows where the other workers listen, so this one cannot come back. Start the run by `gossamer run "
            "--recipe ...`, which keeps a list of them."
        )
    said = {rank: store.get(str(rank)) for rank in range(world) if store.check([str(rank)])}
    return {rank: (host, int(port)) for rank, (host, port) in ((rank, json.loads(text)) for rank, text in said.items())}


def claim_end(number: int, text: str) -> str | None:
    """Enter what the run's `number`-th training ends with, unless a worker has; returns what is entered.

    None where the launcher keeps no registry. Raises ConnectError where it does and cannot be asked.
    """
    store = registry_store()
    if store is None:
        return None
    try:
        return store.compare_set(f"{ENDS_WITH}{number}", "", text).decode()
    except RuntimeError as error:
        raise ConnectError(
            f"The launcher's store does not answer ({str(error).splitlines()[0]}), so nobody knows whether the others "
            "ended with the same parameters. Is the launcher still there?"
        ) from error


def mark_end() -> None:
    """Mark that this worker has finished, and with it the run."""
    with suppress(ConnectError, RuntimeError):  # the launcher is gone, and no worker will come back
        store = registry_store()
        if store is not None:
            store.set(ENDED, "1")


def has_ended() -> bool:
    """Whether a worker has finished, so that none trains any more."""
    store = registry_store()
    return store is not None and store.check([ENDED])


def mark_training(rank: int, attempt: int) -> None:
    """Mark that this worker has parameters to go on from and is connected to the others."""
    store = registry_store()
    if store is not None:
        store.set(f"{TRAINS}{rank}", str(attempt))


def trains(store: Store, rank: int, attempt: int) -> bool:
    """Whether this attempt of a worker has marked that it trains. store: the launcher's own."""
    store, key = PrefixStore(PLACES, store), f"{TRAINS}{rank}"
    return store.check([key]) and int(store.get(key)) == attempt


def mark_exited(store: Store, rank: int) -> None:
    """Mark that this worker's process has ended and is not started again. store: the launcher's own."""
    PrefixStore(PLACES, store).set(f"{EXITED}{rank}", "1")


def has_exited(store: Store, rank: int) -> bool:
    """Whether `mark_exited` was called for this worker. store: as `registry_store` gives it."""
    return store.check([f"{EXITED}{rank}"])


def registry_store() -> Store | None:
    """The launcher's store, where it restarts lost workers one by one; else None. Raises ConnectError."""
    if not restarts_alone() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=STORE_SECONDS))
    except RuntimeError as error:
        raise ConnectError(
            f"The launcher's store at {address}:{port} does not answer ({str(error).splitlines()[0]}), so workers that "
            "are lost cannot come back. Is the launcher still there?"
        ) from error
    return PrefixStore(PLACES, store)
