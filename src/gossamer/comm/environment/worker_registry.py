"""Worker registry: addresses and exits of a run's workers, in the launcher's store."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gossamer.base.host_port import Address
from gossamer.base.units import first_line
from gossamer.comm.environment.run_settings import restarts_alone
from gossamer.comm.environment.tcp_store import remote_store
from gossamer.errors import ConnectError

STORE_SECONDS = 10.0
PLACES, ENDED, ENDS_WITH, TRAINS, EXITED = "gossamer/places", "ended", "ends-with-", "trains-", "exited-"


def publish(rank: int, place: Address) -> None:
    """Publish this worker's address, if the launcher keeps a registry."""
    store = registry_store()
    if store is not None:
        store.set(str(rank), json.dumps(place))


def published(world: int) -> dict[int, Address]:
    """Return the latest published address of each worker, by rank. Raises ConnectError without a registry."""
    store = registry_store()
    if store is None:
        raise ConnectError(
            "the addresses of the other workers are unknown, so this restarted worker cannot rejoin. Start the run "
            "with `gossamer run --recipe ...`, which keeps a registry of workers."
        )
    entries = {rank: store.get(str(rank)) for rank in range(world) if store.check([str(rank)])}
    return {
        rank: (host, int(port)) for rank, (host, port) in ((rank, json.loads(text)) for rank, text in entries.items())
    }


def claim_end(number: int, text: str) -> str | None:
    """Publish the end of the run's `number`-th training, unless a worker already has; return the published text.

    None if the launcher keeps no registry. Raises ConnectError if its store does not answer.
    """
    store = registry_store()
    if store is None:
        return None
    try:
        return store.compare_set(f"{ENDS_WITH}{number}", "", text).decode()
    except RuntimeError as error:
        raise ConnectError(
            f"the launcher's store does not answer ({first_line(error)}), so it is unknown whether the other "
            "workers ended with the same parameters. Check that the launcher still runs."
        ) from error


def mark_end() -> None:
    """Record that this worker, and so the run, has finished."""
    with suppress(ConnectError, RuntimeError):  # the launcher has ended, and restarts no worker
        store = registry_store()
        if store is not None:
            store.set(ENDED, "1")


def has_ended() -> bool:
    """Whether a worker has finished, so that training is over."""
    store = registry_store()
    return store is not None and store.check([ENDED])


def mark_training(rank: int, attempt: int) -> None:
    """Record that this worker has its parameters and is connected to the others."""
    store = registry_store()
    if store is not None:
        store.set(f"{TRAINS}{rank}", str(attempt))


def trains(store: Store, rank: int, attempt: int) -> bool:
    """Whether this attempt of a worker has recorded that it trains. store: the launcher's own."""
    store, key = PrefixStore(PLACES, store), f"{TRAINS}{rank}"
    return store.check([key]) and int(store.get(key)) == attempt


def mark_exited(store: Store, rank: int) -> None:
    """Record that this worker's process has exited and will not be restarted. store: the launcher's own."""
    PrefixStore(PLACES, store).set(f"{EXITED}{rank}", "1")


def has_exited(store: Store, rank: int) -> bool:
    """Whether `mark_exited` was called for this worker. store: the one from `registry_store`."""
    return store.check([f"{EXITED}{rank}"])


def registry_store() -> Store | None:
    """Return the launcher's store if it restarts lost workers individually, else None. Raises ConnectError."""
    if not restarts_alone() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = remote_store(address, port, timeout=timedelta(seconds=STORE_SECONDS))
    except RuntimeError as error:
        raise ConnectError(
            f"the launcher's store at {address}:{port} does not answer ({first_line(error)}), so lost workers "
            "cannot rejoin. Check that the launcher still runs."
        ) from error
    return PrefixStore(PLACES, store)
