"""Script guards: what a script may do in a process of its own and not in one that it shares with other workers."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils.data import DataLoader

from gossamer.errors import GossamerError

Say = Callable[[str], None]
OF_LOADING_PROCESSES = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


class SimulationError(GossamerError):
    """A script, or a recipe, that cannot be simulated."""


@contextmanager
def guarded(say: Say) -> Iterator[None]:
    """Within the block scripts neither fork, nor handle signals, nor make process groups. say: tells the user."""
    with (
        _replaced(DataLoader, "__init__", _without_workers(say)),
        _replaced(signal, "signal", _unheard(say)),
        _replaced(torch.distributed, "init_process_group", _refused),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _without_workers(say: Say) -> Callable[..., None]:
    begin = DataLoader.__init__

    @wraps(begin)
    def plain(*args: Any, **options: Any) -> None:
        called = inspect.signature(begin).bind(*args, **options)
        if called.arguments.get("num_workers"):
            say(
                f"a DataLoader asks for {called.arguments['num_workers']} processes, which would be copies of a "
                "process with many threads, so it loads in its worker's own thread (num_workers=0); what its "
                "transforms draw by chance differs"
            )
            for name in OF_LOADING_PROCESSES:
                called.arguments.pop(name, None)
        begin(*called.args, **called.kwargs)

    return plain


def _unheard(say: Say) -> Callable[[int, Any], Any]:
    def unheard(number: int, handler: Any) -> Any:
        say(f"the script's handler of {signal.Signals(number).name} is left out: the process is not its own")
        return signal.getsignal(number)

    return unheard


def _refused(*args: Any, **options: Any) -> None:
    raise SimulationError(
        "the script uses torch.distributed directly, and virtual workers have no process group: what it sends would "
        "not be simulated. Leave communication to gossamer.attach, gossamer.mean and gossamer.gather, or train by "
        "gossamer run --network SPEC"
    )
