"""Where a run's workers listen, for whoever comes back: nobody meets twice, but the launcher's store stays."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gossamer.environment.run_settings import Address, run_name
from gossamer.errors import ConnectError

STORE_SECONDS = 10.0
PLACES, ENDED, TRAINS = "gossamer/places", "ended", "trains-"


def publish(rank: int, place: Address) -> None:
    """Say where this worker listens; to nobody where the launcher keeps no such list."""
    store = _store()
    if store is not None:
        store.set(str(rank), json.dumps(place))


def published(world: int) -> dict[int, Address]:
    """Where each worker said last that it listens; those that never did are left out. Raises ConnectError."""
    store = _store()
    if store is None:
        raise ConnectError(
            "Nobody knows where the other workers listen, so this one cannot come back. Start the run by `gossamer run "
            "--recipe ...`, which keeps a list of them."
        )
    said = {rank: store.get(str(rank)) for rank in range(world) if store.check([str(rank)])}
    return {rank: (host, int(port)) for rank, (host, port) in ((rank, json.loads(text)) for rank, text in said.items())}


def mark_end() -> None:
    """Say that this worker has come to the end, and with it the run."""
    with suppress(ConnectError, RuntimeError):  # the launcher is gone, and nobody will come back
        store = _store()
        if store is not None:
            store.set(ENDED, "1")


def has_ended() -> bool:
    """Whether somebody has come to the end, so that nobody trains any more."""
    store = _store()
    return store is not None and store.check([ENDED])


def mark_training(rank: int, attempt: int) -> None:
    """Say that this worker has parameters to go on from, and that the others know where it is."""
    store = _store()
    if store is not None:
        store.set(f"{TRAINS}{rank}", str(attempt))


def trains(store: Store, rank: int, attempt: int) -> bool:
    """Whether this start of a worker has said so. store: the launcher's own."""
    store, key = PrefixStore(PLACES, store), f"{TRAINS}{rank}"
    return store.check([key]) and int(store.get(key)) == attempt


def _store() -> Store | None:
    """The launcher's, where it starts lost workers again, each alone."""
    if not run_name() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
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
