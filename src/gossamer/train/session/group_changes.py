"""Group changes: updates one session when workers of an elastic run are lost or new workers are admitted.

This happens on the communication thread, while the training thread waits for an exchange; callbacks of
`session.on_change` are called after its step. With parameters on servers, no worker waits.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress
from math import inf
from pathlib import Path
from statistics import mode
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.strategies import GradientStage
from gossamer.base.run_files import RUN_DIRECTORY, RunFiles
from gossamer.base.units import ranks_text
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import CheckpointError, GossamerError, LoopError, Stopped
from gossamer.train import checkpoint
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.engine.extension import Extension, Extensions
from gossamer.train.session.startup_checks import tensor_hashes
from gossamer.train.session.tracked_parts import explained
from gossamer.train.synchronizers.base import Synchronizer
from gossamer.train.synchronizers.in_flight import norm_of
from gossamer.train.synchronizers.stages import StageSequence

if TYPE_CHECKING:
    from gossamer.comm.elastic.change import Change
    from gossamer.comm.elastic.served_member import ServedMember
    from gossamer.comm.elastic.transport import ElasticTransport
    from gossamer.comm.membership.view import View

LARGE_BYTES = 1024  # of a tensor of a worker's own state, which newcomers may have from an earlier moment
PATIENCE_SECONDS = 1.0  # for the current step; afterwards the others repeat its exchange without this worker


class PreemptionHandler:
    """Handler of SIGTERM if there is no other handler. At the next step this worker leaves, and its script ends with
    exit code 0; if all workers of the run received the signal, they end training together instead.

    leave: leaves the run; stop: requests the end of training on all workers after the same step.
    """

    def __init__(self, leave: Callable[[], object], stop: Callable[[], object]) -> None:
        self._leave, self._stop, self._pending = leave, stop, False
        self.left = False

    def install(self) -> None:
        """Handle the signal from now on, in the main thread."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def look(self) -> None:
        """Between two steps: leave by raising Stopped, if requested."""
        if not self._pending:
            return
        self._pending = False
        if _all_must_stop():
            self._stop()
        else:
            self._go()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._pending = False
            self._go()
        self._pending = True
        timer = threading.Timer(PATIENCE_SECONDS, self._insist)
        timer.daemon = True
        timer.start()

    def _insist(self) -> None:
        if self._pending and not _all_must_stop():
            _thread.interrupt_main(signal.SIGTERM)

    def _go(self) -> None:
        self.left = True
        self._leave()
        events.emit(events.LeftRun())
        raise Stopped


def _all_must_stop() -> bool:
    directory = os.environ.get(RUN_DIRECTORY)
    return directory is not None and RunFiles(Path(directory)).stopping.exists()


REPORT_SECONDS = 5.0  # between two reports, at least
REPORT_SHARE = 0.001  # of the communication thread's time, at most: residuals are as large as the model


class ResidualReport:
    """Emits events.ResidualMeasured while an exporter subscribes. It measures on the communication thread, where no
    exchange modifies the residuals."""

    def __init__(self, comm_thread: CommThread, clock: Callable[[], float] = time.perf_counter) -> None:
        self._comm_thread, self._clock, self._due = comm_thread, clock, -inf

    def look(self, synchronizer: Synchronizer) -> None:
        """Called after a step."""
        if self._clock() >= self._due and events.observed():
            self._due = inf  # one at a time
            self._comm_thread.submit(partial(self._measure, synchronizer, synchronizer.step))

    def _measure(self, synchronizer: Synchronizer, step: int) -> None:
        began = self._clock()
        unsent = [tensor for bucket in synchronizer.buckets for tensor in bucket.unsent]
        norm, ended = norm_of(unsent), self._clock()
        self._due = ended + max(REPORT_SECONDS, (ended - began) / REPORT_SHARE)
        if unsent:
            events.emit(events.ResidualMeasured(step=step, norm=norm))


class ShardedWorld(Stateful, Protocol):
    """The world, with shards that follow the number of workers."""

    def move(
        self,
        rank: int,
        size: int,
        positions: Sequence[Sequence[Mapping[str, Any] | None]],
        *,
        stayed: Sequence[int] = (),
    ) -> None: ...

    def renumber(self, rank: int, size: int, /) -> None:
        """Become `rank` of `size` while shards keep their parts."""

    def parts_in_use(self, rank: int, size: int, /) -> list[Any]:
        """For each shard, its position as one of `size` workers, for `divide` on all ranks."""

    def divide(self, shares: Sequence[int], parts: Sequence[Sequence[Any]], rank: int, /) -> None:
        """Divide the rest of the data in proportion to `shares`, by rank. parts: parts_in_use() of all ranks."""

    def begin_training(self) -> None:
        """A session begins. Shards that are not drawn from again belong to an earlier training."""

    def data(self) -> list[str]:
        """For each map-style shard, a text that is equal on ranks with the same data."""

    def note_trained(self) -> None:
        """Record that all samples drawn so far were trained on."""

    def watch(self, progress: Callable[[], object], /) -> None:
        """progress: returns a value that changes with each step of the session."""

    def enter_epoch(self) -> None:
        """Called when session.epoch() begins."""

    def entered_epochs(self) -> list[int]:
        """The newest epoch with draws of this rank, for each shard."""

    def leave_epoch(self, entered: Sequence[Sequence[int]], /) -> None:
        """Called when session.epoch() ends. entered: entered_epochs() of all ranks at the end of the epoch."""

    @property
    def lap(self) -> int:
        """The position of this rank in its data, in half epochs."""


@dataclass(frozen=True, kw_only=True)
class WorldChange:
    """A change of the workers, as passed to callbacks of session.on_change(callback)."""

    size: int  # current number of workers
    size_before: int
    rank: int  # current rank of this worker
    lost: tuple[int, ...]  # former ranks of lost workers
    joined: int  # number of new workers
    step: int  # the last step that all workers have made


class ChangingSession(Protocol):
    """The part of a session that changes with the group: SessionBase."""

    _world: ShardedWorld
    _synchronizer: Synchronizer
    _stages: StageSequence

    def _shared_state(self) -> dict[str, Any]: ...
    def _own_state(self) -> dict[str, Any]: ...
    def _take_up(self, alike: Mapping[str, Any], own: Mapping[str, Any]) -> None: ...
    def _held(self) -> Mapping[str, Tensor]: ...
    def _first_step_made(self) -> None: ...
    def _enter_restored_stage(self, passes: int, first_bytes: int) -> None: ...
    def request_stop(self) -> None: ...


class GroupChanges(Extension):
    """Changes of one session's group: a Trainee of gossamer.comm.elastic.

    group: None for a fixed group, in which nothing changes. session: a weak proxy, so that it can be collected.
    """

    def __init__(
        self,
        group: ElasticTransport | None,
        session: ChangingSession,
        comm_thread: CommThread,
        extensions: Extensions,
    ) -> None:
        self._group, self._session, self._comm_thread = group, session, comm_thread
        self._unreported: list[WorldChange] = []
        self._replaceable = False  # whether the last change of view is the last of these
        self._listeners: list[Callable[[WorldChange], None]] = []
        self.saved_values: Mapping[str, Any] = {}  # values that the loop saved or loaded, for the loops of new workers
        self.handed_over = False  # whether this new worker has received the state, and made no step since
        self._residual = ResidualReport(comm_thread)
        self._preemption = PreemptionHandler(self._leave, lambda: session.request_stop())
        if group is not None:
            group.serve(self)
            group.on_over = self._look
            extensions.add(self)

    @property
    def joins(self) -> bool:
        """Whether the others train already, and must admit this worker."""
        return self._group is not None and self._group.is_newcomer

    def begin(self, fingerprint: Mapping[str, str]) -> None:
        """Called with the synchronizer ready: join the workers that train already, or publish the expected settings."""
        self._session._world.watch(_progress_of(self._session))
        if self._group is None:
            return
        self._session._world.note_trained()  # draws before this do not count as a lost worker's
        self.take_place(self._group.rank, self._group.world)  # the group may have changed since buckets were made
        text = json.dumps(fingerprint)
        if self.joins:
            with explained():
                self._group.join(text)
            self._session._synchronizer.joined()
            self._unreported.clear()  # the loop has not started
            self._replaceable = False
        else:
            self._group.attached(text)
        self._preemption.install()

    def refuse_loaded(self) -> None:
        """Raise CheckpointError where a checkpoint of all workers cannot be loaded."""

    def listen(self, listener: Callable[[WorldChange], None]) -> None:
        self._listeners.append(listener)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()

    def pass_began(self) -> None:
        """Between two steps: raise Stopped if this worker was asked to leave."""
        self._preemption.look()

    def ended(self, how: events.Ended) -> events.Ended:
        """How the run ended on this worker: "interrupted" if it has left the others."""
        released = self._group is not None and self._group.released
        return "interrupted" if self._preemption.left or released else how

    def farewell(self) -> None:
        """Leave once all workers are done."""
        if self._group is not None:
            with suppress(GossamerError):  # workers that continue detect that this one has left
                self._comm_thread.exchange(self._group.farewell).wait()

    def after_step(self) -> None:
        """Call the loop's callbacks for changes since the last call, on the training thread."""
        self._session._world.note_trained()
        self._residual.look(self._session._synchronizer)
        if self.handed_over:
            self._session._first_step_made()
        self.handed_over = False
        unreported, self._unreported, self._replaceable = self._unreported, [], False
        for change in unreported:
            for listener in self._listeners:
                listener(change)

    # -- Trainee -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._group is not None:
            with suppress(LoopError):  # the session is closed
                self._comm_thread.submit(self._group.look)

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else self._group.rank

    def park(self) -> None:
        self._comm_thread.waiters.await_one()

    def standing(self) -> Any:
        unsent = [tensor for bucket in self._session._synchronizer.buckets for tensor in bucket.unsent]
        return {"shards": self._session._world.state_dict().get("shards", []), "unsent": norm_of(unsent)}

    def moved(self, change: Change) -> None:
        standings = [change.standings.get(number) for number in change.before]
        held = [each["shards"] if each else [] for each in standings]
        usual = mode(
            len(each["shards"]) for each in standings if each
        )  # ranks with another number of shards fail alone
        shards = [[each[place] if place < len(each) else None for each in held] for place in range(usual)]
        stayed = [change.before.index(number) for number in change.now if number in change.before]
        rank = self._rank
        self._session._world.move(rank, len(change.now), shards, stayed=stayed)
        step = self._session._synchronizer.step
        if change.replaces and self._replaceable:
            self._unreported.pop()
        self._replaceable = change.before != change.now
        if self._replaceable:
            self._unreported.append(
                WorldChange(
                    size=len(change.now),
                    size_before=len(change.before),
                    rank=rank,
                    lost=change.lost,
                    joined=change.joined,
                    step=step,
                )
            )
        events.emit(
            events.GroupChanged(
                step=step,
                view=change.number,
                world=len(change.now),
                lost=change.lost,
                joined=change.joined,
                seconds=change.seconds,
                finished=change.finished,
            )
        )
        if rank == 0:
            events.notice(_change_text(change, step, in_common=self._session._synchronizer.in_common))
            stage = self._session._stages.now
            if isinstance(stage, GradientStage) and (notice := stage.crowded(len(change.now))):
                events.notice(notice)

    def take_place(self, rank: int, world: int) -> None:
        self._session._synchronizer.take_place(rank, world)

    def rescale(self, before: int, now: int) -> None:
        self._session._synchronizer.rescale(now / before)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._session._held().values())

    def version(self) -> str:
        synchronizer, stage = self._session._synchronizer, self._session._stages.now
        exact = not synchronizer.in_common or not stage.local_parameters
        return "" if exact else f"{stage!r} {synchronizer.landed}"

    def hand_over(self) -> tuple[Any, Any, Any]:
        own = {
            "session": self._session._own_state(),
            "mine": dict(self.saved_values),
            "synchronizer": self._session._synchronizer.handed_over(),
            "passes": self._session._synchronizer.passes,
            "first_bytes": self._session._stages.first_bytes,
        }
        if self._session._stages.now.local_parameters:
            text, names, tensors = _packed(self._session._shared_state())
            large = [bool(self.version()) and tensor.nbytes >= LARGE_BYTES for tensor in tensors]
            small = tuple(None if is_large else tensor for tensor, is_large in zip(tensors, large, strict=True))
            return None, [_packed(own), [text, names, small]], tuple(compress(tensors, large))
        return _packed(self._session._shared_state()), [_packed(own), None], ()

    def take_over(self, alike: Any, own: Any, local: Any) -> None:
        found, rest = _unpacked(own[0]), iter(local)
        if alike is None:
            text, names, small = own[1]
            alike = text, names, [next(rest) if tensor is None else tensor for tensor in small]
        self._session._enter_restored_stage(found["passes"], found["first_bytes"])
        self._session._take_up(_unpacked(alike), found["session"])
        with torch.no_grad():
            self._session._synchronizer.take_up(found["synchronizer"])
        self.saved_values, self.handed_over = dict(found["mine"]), True

    def state_hash(self) -> str:
        synchronizer, local = self._session._synchronizer, self._session._stages.now.local_parameters
        if not synchronizer.in_common and self._rank > 0:
            return ""  # a new worker, without a rank yet, has received rank 0's state
        common = local and synchronizer.in_common
        held = synchronizer.agreed if common else checkpoint.flatten(self._session._shared_state())[1]
        tensors = [each for _, each in sorted((held or self._session._held()).items())]
        return " ".join(tensor_hashes([each for each in tensors if isinstance(each, torch.Tensor)]))


def _progress_of(session: ChangingSession) -> Callable[[], object]:
    def progress() -> object:
        with suppress(ReferenceError):  # the session is collected
            return session._synchronizer.step, session._synchronizer.passes
        return None

    return progress


def _packed(tree: Any) -> list[Any]:
    text, tensors = checkpoint.flatten(tree)
    names = sorted(tensors)
    return [text, json.dumps(names), tuple(tensors[name].detach() for name in names)]


def _unpacked(packed: Any) -> Any:
    text, names, tensors = packed
    return checkpoint.unflatten(text, dict(zip(json.loads(names), tensors, strict=True)))


def _change_text(change: Change, step: int, *, in_common: bool) -> str:
    size = len(change.now)
    if change.joined:
        who = "a worker" if change.joined == 1 else f"{change.joined} workers"
        return f"{who} joined after step {step}, in {change.seconds:.2f} s: {size} train now"
    if not change.lost:
        return f"the workers' connections broke after step {step} and were made again in {change.seconds:.2f} s"
    who = f"{ranks_text(change.lost)} of {len(change.before)}"
    how = "the current exchange was completed" if change.finished else "the current exchange was repeated"
    return (
        f"{who} {'were' if len(change.lost) > 1 else 'was'} lost after step {step}; {how} by the remaining {size}, "
        f"{change.seconds:.2f} s later. "
        f"{'Unsent residuals' if in_common else 'Deviations from the mean'} of lost workers are lost"
    )


# -- changes while the parameters are on servers -----------------------------------------------------------------------


class ServedChanges(GroupChanges):
    """As GroupChanges, for workers without lock step: a newcomer receives the state from the servers, and no worker
    waits while another one comes or goes."""

    def __init__(
        self, member: ServedMember, session: ChangingSession, comm_thread: CommThread, extensions: Extensions
    ) -> None:
        super().__init__(None, session, comm_thread, extensions)
        self._member = member
        extensions.add(self)

    def admit(self, fingerprint: Mapping[str, str]) -> None:
        """Called before the session connects to the servers: wait for a place, if the others train already."""
        text = json.dumps(fingerprint)
        if self._member.is_newcomer:
            self._member.join(text)
        else:
            self._member.attached(text)
        self._session._world.renumber(self._member.rank, self._member.world)

    def begin(self, fingerprint: Mapping[str, str]) -> None:
        super().begin(fingerprint)
        self._preemption.install()

    def after_step(self) -> None:
        try:
            changed = self._member.look()
        except Stopped:
            self._session._synchronizer.leave()
            raise
        if changed is not None:
            self._note(*changed)
        super().after_step()

    def ended(self, how: events.Ended) -> events.Ended:
        return "interrupted" if self._member.released else super().ended(how)

    def refuse_loaded(self) -> None:
        raise CheckpointError(
            "an elastic run with servers begins from the parameters that its first worker attached, so it cannot load "
            "a checkpoint of all workers. Load the model before attach: model.load_state_dict(torch.load(FILE))."
        )

    def farewell(self) -> None:
        self._member.leave(finished=True)

    def _leave(self) -> None:
        self._session._synchronizer.leave()
        self._member.leave()

    def _note(self, before: View, now: View) -> None:
        rank, step = self._member.rank, self._session._synchronizer.step
        lost = tuple(place for place, number in enumerate(before.numbers) if number not in now.numbers)
        joined = sum(number not in before.numbers for number in now.numbers)
        self._session._world.renumber(rank, now.world)
        if not lost and not joined:
            return
        self._unreported.append(
            WorldChange(size=now.world, size_before=before.world, rank=rank, lost=lost, joined=joined, step=step)
        )
        events.emit(
            events.GroupChanged(
                step=step, view=now.number, world=now.world, lost=lost, joined=joined, seconds=0.0, finished=True
            )
        )
        if rank == 0:
            texts = [f"{_count(len(lost))} lost or left"] * bool(lost) + [f"{_count(joined)} joined"] * bool(joined)
            events.notice(f"after step {step}: {', '.join(texts)}; {now.world} train now")


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"
