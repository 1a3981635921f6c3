"""Elastic training by Horovod's names: state that is committed, restored and synchronized around a function.

The number of workers is fixed. Under `gossamer run --max-restarts 3` rank 0 also writes each commit to the run's
directory, so that training continues from the last commit when a lost worker makes the launcher start all again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from gossamer.base import bounded_file
from gossamer.base.run_files import RUN_DIRECTORY, current_attempt
from gossamer.errors import PeerLost
from gossamer.horovod import basics
from gossamer.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from gossamer.horovod.objects import broadcast_object, decode, encode

Result = TypeVar("Result")


class ElasticState:
    """State of a training loop. Subclasses define how to save, restore and synchronize it.

    Args:
        bcast_object: Broadcasts an object of rank 0.
        get_rank: Returns this worker's rank.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = basics.rank
    ) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call after a failure, before the state is synchronized."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after a failure, when the workers have found each other again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state; a failure from now on restores it."""
        self.save()
        if (file := _commit_file()) is not None and self._rank() == 0:
            bounded_file.write_whole(file, encode(self.committed()))
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does nothing: the number of workers is fixed."""

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called by on_reset."""

    def committed(self) -> Any:
        """The copy that `save` made, of types that travel (objects.py)."""
        return None

    def take_up(self, committed: Any) -> None:
        """Load the result of `committed` from before a restart."""


class ObjectState(ElasticState):
    """State of plain Python objects, which are attributes.

    Args:
        bcast_object, get_rank: As for State.
        kwargs: The objects by name: numbers, text, and containers of them, as broadcast_object takes them.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = basics.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        self._saved_state = deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def committed(self) -> Any:
        return self._saved_state

    def take_up(self, committed: Any) -> None:
        self._saved_state = committed
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in deepcopy(self._saved_state).items():
            setattr(self, name, value)


class StatePart(ABC):
    """A part of a state that is saved separately from plain objects, such as a model."""

    saved: Any  # the copy, of types that travel (objects.py)

    @abstractmethod
    def save(self) -> None:
        """Copy the values to `saved`."""

    @abstractmethod
    def restore(self) -> None:
        """Load the values of `saved`."""

    @abstractmethod
    def sync(self) -> None:
        """Give every rank the values of rank 0."""


class PartsState(ObjectState):
    """State of parts by name, and of plain Python objects, which are attributes.

    Args:
        parts: The parts; they are saved at once.
        objects: As for ObjectState.
    """

    _parts: dict[str, StatePart]

    def __init__(self, parts: Mapping[str, StatePart], objects: Mapping[str, Any]) -> None:
        self.__dict__["_parts"] = dict(parts)
        for part in parts.values():
            part.save()
        super().__init__(**objects)

    def save(self) -> None:
        for part in self._parts.values():
            part.save()
        super().save()

    def restore(self) -> None:
        for part in self._parts.values():
            part.restore()
        super().restore()

    def sync(self) -> None:
        for part in self._parts.values():
            part.sync()
            part.save()
        super().sync()

    def committed(self) -> Any:
        return {"objects": super().committed(), "parts": {name: part.saved for name, part in self._parts.items()}}

    def take_up(self, committed: Any) -> None:
        for name, part in self._parts.items():
            part.saved = committed["parts"][name]
            part.restore()
        super().take_up(committed["objects"])


State = ElasticState


def run_fn(func: Callable[..., Result], reset: Callable[[], None]) -> Callable[..., Result]:
    """`func(state, ...)`, with its state synchronized before, and repeated from the last commit after a failure.

    Args:
        func: Raises HorovodInternalError where a collective call failed.
        reset: Lets the workers find each other again.
    """

    @wraps(func)
    def wrapper(state: ElasticState, *args: Any, **kwargs: Any) -> Result:
        _take_up_commit(state)
        synchronized = False
        while True:
            try:
                if not synchronized:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as failure:
                if isinstance(failure.__cause__, PeerLost) or _lost(failure):
                    raise  # the group is gone: the launcher starts all again, from the last commit
                state.restore()
                synchronized = False
            except HostsUpdatedInterrupt as interrupt:
                synchronized = interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper


def _lost(failure: HorovodInternalError) -> bool:
    return str(failure).startswith(PeerLost.__name__)  # the text of a lane's error


def _commit_file() -> Path | None:
    """Where commits are kept; None where a launcher would not start this worker again."""
    directory = os.environ.get(RUN_DIRECTORY)
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return Path(directory) / "horovod.commit" if directory and restarts else None


def _take_up_commit(state: ElasticState) -> None:
    restarted = current_attempt() > 0
    file = _commit_file()
    if restarted and file is not None and file.exists() and state._rank() == 0:
        state.take_up(decode(file.read_bytes()))


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator for a training function. Its first argument is a State; see `run_fn`.

    Args:
        func: a function whose first argument is a State.
    """

    def reset() -> None:
        basics.shutdown()
        basics.init()

    return run_fn(func, reset)
