"""Session checkpointing: saves a session's parts with options, on all ranks together, and loads them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer import events
from gossamer.base import flight_recorder
from gossamer.errors import CheckpointError
from gossamer.train.checkpoint import coordinated
from gossamer.train.checkpoint.background import BackgroundSave
from gossamer.train.checkpoint.coordinated import LoadedCheckpoint
from gossamer.train.checkpoint.replicas import ReplicaExchange, fetch
from gossamer.train.checkpoint.runs import agree_on_name
from gossamer.train.checkpoint.snapshot import SnapshotBuffers
from gossamer.train.checkpoint.state import Stateful, parameter_names
from gossamer.train.session import session_checkpoint
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.session_status import SessionStatus
from gossamer.train.session.tracked_parts import TrackedParts

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How a checkpoint is saved. Raises CheckpointError for what is none, such as a value of the user's own."""

    keep: int = 2  # checkpoints that stay, the new one among them
    replicas: int = 0  # other machines that keep each part, too, where each has a directory of its own
    asynchronous: bool = False  # whether to write beside the next steps

    def __post_init__(self) -> None:
        if not isinstance(self.replicas, int) or isinstance(self.replicas, bool) or self.replicas < 0:
            raise CheckpointError(
                "replicas says on how many other machines each part is kept, too, 0 or more, and is "
                f"{self.replicas!r}. A value of your own needs another name than {', '.join(RESERVED)}, which are "
                "options of session.save."
            )
        if not isinstance(self.asynchronous, bool):
            raise CheckpointError(
                f"asynchronous is True or False, and is {self.asynchronous!r}. A value of your own needs another name "
                f"than {', '.join(RESERVED)}, which are options of session.save."
            )
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1:
            raise CheckpointError(
                f"keep says how many checkpoints stay, 1 or more, and is {self.keep!r}. Write session.save(directory, "
                f"keep=2); a value of your own needs another name than {', '.join(RESERVED)}, which are options."
            )


RESERVED = ("directory", "keep", "replicas", "asynchronous")


class SessionCheckpoints:
    """Writes and reads what a session saves. Every rank makes the same calls at the same place.

    parts: what is saved besides the session's own state, by name.
    """

    def __init__(
        self,
        group: GroupCalls,
        status: SessionStatus,
        model: nn.Module,
        optimizer: Optimizer,
        tracked: TrackedParts,
        parts: Callable[[], Mapping[str, Stateful]],
    ) -> None:
        self._group, self._status, self._tracked, self._parts = group, status, tracked, parts
        self._model, self._optimizer = model, optimizer
        self._run: str | None = None  # the name of the run, from the first save or load on
        self._buffers = SnapshotBuffers()
        self._exchange = ReplicaExchange(group.transport, group.run, group.all_gather_text, self._device)
        self._pending: BackgroundSave | None = None  # at most one

    def save(
        self,
        directory: StrPath,
        session: Mapping[str, Any],
        mine: Mapping[str, Any],
        **options: Any,
    ) -> None:
        """Write a checkpoint: `session` is the session's state, `mine` the user's own values."""
        with flight_recorder.current.save():
            self._save(directory, session, mine, options)

    def _save(
        self, directory: StrPath, session: Mapping[str, Any], mine: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        wanted = self._agree_on(options)
        self._conclude(since="the next was to be saved")
        self._tracked.tell_missing(mine)
        beside = {
            "tracked": self._tracked.state_dict(),
            "optimizer_class": type(self._optimizer).__name__,
            "optimizer_names": parameter_names(self._model, self._optimizer),
        }
        tree = {**coordinated.states(self._parts()), **beside, "session": session, "mine": mine}
        tell = self._group.all_gather_text
        self._run = agree_on_name(tell, self._run)
        about = session_checkpoint.about(session, self._run)
        place = session["step"], self._group.transport.rank
        copies = None
        if wanted.replicas:
            copies = partial(self._exchange.exchange, plan=self._exchange.plan(directory, wanted.replicas))
        if wanted.asynchronous:
            begin = coordinated.begin_in_background
            self._pending = begin(directory, *place, tree, about, tell, wanted.keep, copies, self._buffers)
            self._pending.begin()
        else:
            coordinated.save(directory, *place, tree, about, tell, wanted.keep, copies)
            self._saved(directory, session["step"])
        self._status.saved()

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _saved(self, directory: StrPath, step: int) -> None:
        self._status.checkpoint = os.fspath(directory)
        events.emit(events.Saved(step=step, directory=os.fspath(directory)))

    def _conclude(self, since: str = "") -> None:
        """Find on all ranks whether what is written beside training is complete. Raises CheckpointError where not."""
        pending, self._pending = self._pending, None
        if since and pending is not None and pending.running:
            self._wait(pending, since)
        if coordinated.conclude(pending, self._group.all_gather_text) and pending is not None:
            self._saved(pending.directory, pending.step)

    def _wait(self, pending: BackgroundSave, since: str) -> None:
        began = time.perf_counter()
        pending.wait()
        waited = time.perf_counter() - began
        if waited > self._status.step_seconds and self._group.transport.rank == 0:
            events.notice(
                f"training waited {waited:.1f} s, longer than a step takes, since the checkpoint of step "
                f"{pending.step} was still being written when {since}. Save less often, or to a faster disk"
            )

    @contextmanager
    def ended(self, how: events.Ended) -> Iterator[None]:
        """Before the block, in which the session ends, what is being written is written, and all ranks hear of it.

        What they hear is raised after the block.
        """
        try:
            if self._pending is not None and how == "finished":
                self._conclude()
        finally:
            if self._pending is not None:  # others may not come here
                self._pending.wait()
                self._tell_lost(self._pending)
            yield

    def _tell_lost(self, pending: BackgroundSave) -> None:
        if pending.error is not None:
            events.notice(f"the checkpoint of step {pending.step} was not written: {pending.error}")

    def _agree_on(self, options: Mapping[str, Any]) -> SaveOptions:
        """The options, which are the same on all ranks. Raises CheckpointError on all of them."""
        wanted = SaveOptions()
        failure: CheckpointError | None = None
        try:
            wanted = SaveOptions(**options)
        except CheckpointError as error:
            failure = error
        texts = self._group.all_gather_text(str(failure or wanted))
        if failure is not None:
            raise failure
        if len(set(texts)) > 1:
            told = "; ".join(f"rank {who}: {text}" for who, text in enumerate(texts))
            raise CheckpointError(
                f"ranks save with different options: {told}. Call session.save with the same on every rank; nothing "
                "was written."
            )
        return wanted

    def load(self, directory: StrPath) -> LoadedCheckpoint | None:
        """The newest checkpoint that all ranks can go on from, if any; nothing is put back yet."""
        self._conclude()
        transport = self._group.transport
        if transport.world > 1:
            fetch(self._exchange, directory)
        return coordinated.load(directory, transport.rank, transport.world, self._group.all_gather_text)

    @contextmanager
    def taking_up(self, directory: StrPath, found: LoadedCheckpoint) -> Iterator[Callable[[], None]]:
        """Within the block the session takes up its state, and calls what is yielded, which puts the parts back."""

        def put_back() -> None:
            coordinated.put_back(self._parts(), found.tree)
            self._tracked.load_state_dict(found.tree.get("tracked", {}), resharded=found.news is not None)

        with session_checkpoint.taking_up(directory, found.tree, self._optimizer):
            yield put_back
        self._run, self._status.checkpoint = found.run, os.fspath(directory)
