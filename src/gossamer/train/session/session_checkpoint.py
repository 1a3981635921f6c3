"""Session checkpoint: writes and restores one rank's part of a checkpoint, and its state across a reset."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer import events
from gossamer.algorithms.compressors.sharded import is_owed
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base import flight_recorder
from gossamer.base.transport import Transport
from gossamer.errors import CheckpointError, GossamerError
from gossamer.train.checkpoint import coordinated, reshard
from gossamer.train.checkpoint.background import BackgroundSave
from gossamer.train.checkpoint.coordinated import LoadedCheckpoint
from gossamer.train.checkpoint.files import MALFORMED
from gossamer.train.checkpoint.replicas import ReplicaExchange, fetch
from gossamer.train.checkpoint.runs import agree_on_name
from gossamer.train.checkpoint.snapshot import SnapshotBuffers
from gossamer.train.checkpoint.state import Stateful, parameter_names, refuse_other_state
from gossamer.train.engine.bucket import copy_state
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.parameter_views import copy_parameters
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.session_status import SessionStatus
from gossamer.train.session.tracked_parts import TrackedParts
from gossamer.train.synchronizers.base import NamedState, Synchronizer
from gossamer.version import __version__

SessionState = Mapping[str, Any]
REMEDY = "Run with what it was written with"
REMEDIES = {
    "layout": "The layout is a hash of the parameters' names, shapes and dtypes. Build the model that it was written "
    "with, parameters of session.add_parameters() included, before gossamer.attach"
}


def session_state(
    recipe: Recipe, layout: str, transport: Transport, synchronizer: Synchronizer, *, owed: NamedState, **about: Any
) -> dict[str, Any]:
    """owed: gradients of a recipe before, beside what this one remembers; about: more that a resumed run reads."""
    state = synchronizer.remembered()
    for name, tensors in owed.items():
        state.setdefault(name, {}).update(tensors)
    return {
        **about,
        "rank": transport.rank,
        "world": transport.world,
        "recipe": repr(recipe),
        "layout": layout,
        "links": transport.links,
        "step": synchronizer.step,
        "passes": synchronizer.passes,
        "state": state,
        "progress": synchronizer.progress(),
    }


def restore(
    states: Sequence[SessionState], mine: SessionState, transport: Transport, synchronizer: Synchronizer
) -> None:
    """Go on from `states`: this rank's own, or those of all ranks of another world size. mine: the state as it is."""
    own = own_state(states, transport)
    state = reshard.taken_up(own, mine) if own["world"] == mine["world"] else reshard.fold(states, mine)
    refuse_misfit(state, mine)
    transport.links = state.get("links", "")
    if state["progress"]:
        synchronizer.resume(state["progress"], state["state"])
    else:
        synchronizer.begin_at(state["step"])  # saved by a world of one


def own_state(states: Sequence[SessionState], transport: Transport) -> SessionState:
    """This rank's state; the first where another number of workers wrote them. Raises CheckpointError for no state."""
    for state in states or ({},):
        refuse_other_state(state)
    return states[transport.rank if len(states) == transport.world else 0]


def refuse_misfit(state: SessionState, mine: SessionState) -> None:
    """Raise CheckpointError for a session's saved state that belongs to another run."""
    for key in ("recipe", "layout", "world", "rank"):
        if state[key] != mine[key]:
            raise CheckpointError(
                f"this checkpoint's {key} is {state[key]!r}, this session's is {mine[key]!r}: what was remembered "
                f"would not fit. {REMEDIES.get(key, REMEDY)}, or begin in an empty directory."
            )


def compare_parameters(check: ParameterCheck, group: GroupCalls, step: int) -> None:
    """Raise MismatchError, or notice, where ranks in lock step are about to save different parameters."""
    if group.transport.world > 1 and check.looks:
        texts = group.all_gather_text(check.text())
        check.compare(dict(enumerate(texts)), f"in the checkpoint of step {step}", kind="saved")


def about(session: SessionState, run: str) -> dict[str, str]:
    """What a manifest says of the run. session: a session_state."""
    return {"gossamer": __version__, "recipe": session["recipe"], "layout": session["layout"], "run": run}


def refuse_other_optimizer(tree: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise CheckpointError, before anything is loaded, for what another kind of optimizer remembered."""
    written, mine = tree.get("optimizer_class"), type(optimizer).__name__
    if written is not None and written != mine:
        raise CheckpointError(
            f"this checkpoint was written with {written}, and this session has {mine}, which remembers other things of "
            f"each parameter. Build {written}(model.parameters(), ...) before gossamer.attach; or, to begin anew with "
            f"{mine}, load the model alone and save into an empty directory."
        )


@contextmanager
def taking_up(directory: str | os.PathLike[str], tree: Mapping[str, Any], optimizer: Optimizer) -> Iterator[None]:
    """Raise CheckpointError where what a checkpoint holds cannot be put into this run's parts."""
    refuse_other_optimizer(tree, optimizer)
    try:
        yield
    except GossamerError:
        raise
    except MALFORMED as error:
        raise CheckpointError(
            f"what {os.fspath(directory)!r} holds does not fit this run ({type(error).__name__}: {error}), and some of "
            "its parts may have been loaded already. Build the model, the optimizer and all that is tracked as in the "
            "run that wrote it, or begin in an empty directory."
        ) from error


def restart_resharded(
    found: LoadedCheckpoint,
    parameters: Mapping[str, Parameter],
    loop: LoopState,
    synchronizer: Synchronizer,
    rank: int,
) -> None:
    """After another world size wrote `found`: begin with what its workers agreed on, and say so."""
    if not found.news:
        return
    agreed = reshard.agreed(found.sessions)
    state = {name: tensor for name, tensor in {**parameters, **loop.averaged()}.items() if name in agreed}
    with loop.copies.following(parameters.values()):
        copy_parameters(agreed, state)
    synchronizer.restart()
    if rank == 0:
        events.notice(found.news)


def copy_kept(old: Mapping[str, Mapping[str, Tensor]], new: NamedState, without: Collection[str]) -> None:
    """Copy what `old` holds about parameters into `new`, except those in `without` and all rounding debts."""
    kept = {name: state for name, state in new.items() if name not in without}
    copy_state(old, {name: {key: state[key] for key in state if not is_owed(key)} for name, state in kept.items()})


# -- saves and loads of all ranks together -----------------------------------------------------------------------------

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
        described = about(session, self._run)
        place = session["step"], self._group.transport.rank
        copies = None
        if wanted.replicas:
            copies = partial(self._exchange.exchange, plan=self._exchange.plan(directory, wanted.replicas))
        if wanted.asynchronous:
            begin = coordinated.begin_in_background
            self._pending = begin(directory, *place, tree, described, tell, wanted.keep, copies, self._buffers)
            self._pending.begin()
        else:
            coordinated.save(directory, *place, tree, described, tell, wanted.keep, copies)
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

        with taking_up(directory, found.tree, self._optimizer):
            yield put_back
        self._run, self._status.checkpoint = found.run, os.fspath(directory)
