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
from gossamer.algorithms.compressors.sharded import is_group_residual
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base import flight_recorder
from gossamer.base.transport import Transport
from gossamer.errors import CheckpointError, GossamerError
from gossamer.train.checkpoint import coordinated, reshard
from gossamer.train.checkpoint.agreement import SharedStep
from gossamer.train.checkpoint.background import BackgroundSave
from gossamer.train.checkpoint.coordinated import LoadedCheckpoint
from gossamer.train.checkpoint.files import MALFORMED
from gossamer.train.checkpoint.replicas import ReplicaExchange, fetch
from gossamer.train.checkpoint.runs import agree_on_name
from gossamer.train.checkpoint.snapshot import SnapshotBuffers
from gossamer.train.checkpoint.state import Stateful, parameter_names, refuse_other_state
from gossamer.train.engine.bucket import BUCKET_BYTES, copy_state
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.parameter_views import copy_parameters
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.session_status import SessionStatus
from gossamer.train.session.tracked_parts import TrackedParts
from gossamer.train.synchronizers.base import NamedState, Synchronizer
from gossamer.version import __version__

SessionState = Mapping[str, Any]
REMEDY = "Use the value with which it was written"
REMEDIES = {
    "layout": "The layout is a hash of the parameters' names, shapes and dtypes. Before gossamer.attach, build the "
    "model with which it was written, including parameters of session.add_parameters()"
}


def session_state(
    recipe: Recipe, layout: str, transport: Transport, synchronizer: Synchronizer, *, earlier: NamedState, **about: Any
) -> dict[str, Any]:
    """State of a session. earlier: pending gradients of an earlier recipe. about: further values to save."""
    state = synchronizer.remembered()
    for name, tensors in earlier.items():
        state.setdefault(name, {}).update(tensors)
    return {
        **about,
        "rank": transport.rank,
        "world": transport.world,
        "recipe": repr(recipe),
        "layout": layout,
        "links": transport.links,
        "step": synchronizer.steps,
        "passes": synchronizer.passes,
        "state": state,
        "progress": synchronizer.progress(),
    }


def restore(
    states: Sequence[SessionState], current: SessionState, transport: Transport, synchronizer: Synchronizer
) -> None:
    """Restore `states`: this rank's own, or those of all ranks of another world size.

    current: this session's own state.
    """
    own = own_state(states, transport)
    state = reshard.taken_up(own, current) if own["world"] == current["world"] else reshard.fold(states, current)
    refuse_misfit(state, current)
    transport.links = state.get("links", "")
    if state["progress"]:
        synchronizer.resume(state["progress"], state["state"])
    else:
        synchronizer.begin_at(state["step"])  # saved by a single worker


def own_state(states: Sequence[SessionState], transport: Transport) -> SessionState:
    """This rank's state; the first one if another number of workers wrote them. Raises CheckpointError without one."""
    for state in states or ({},):
        refuse_other_state(state)
    return states[transport.rank if len(states) == transport.world else 0]


def first_bytes(state: SessionState) -> int:
    """The size at which the first bucket of a saved state was full; earlier versions had no smaller first bucket."""
    size: int = state.get("first_bytes", BUCKET_BYTES)
    return size


def refuse_misfit(state: SessionState, current: SessionState) -> None:
    """Raise CheckpointError for a saved state of a session that belongs to another run.

    Recipes may differ in wrappers that the number of workers chooses; see reshard.taken_up.
    """
    alike = reshard.alike(state["recipe"], current["recipe"])
    for key in ("recipe", "layout", "world", "rank"):
        if state[key] != current[key] and not (key == "recipe" and alike):
            raise CheckpointError(
                f"this checkpoint's {key} is {state[key]!r}, this session's is {current[key]!r}, so its state does not "
                f"fit. {REMEDIES.get(key, REMEDY)}, or begin in an empty directory."
            )


def compare_parameters(check: ParameterCheck, group: GroupCalls, step: int) -> None:
    """Before saving: raise MismatchError, or print a notice, if parameters of ranks in lock step differ."""
    if group.transport.world > 1 and check.looks:
        texts = group.all_gather_text(check.text())
        check.compare(dict(enumerate(texts)), f"in the checkpoint of step {step}", kind="saved")


def about(session: SessionState, run: str) -> dict[str, str]:
    """Description of the run for a manifest. session: a session_state."""
    return {"gossamer": __version__, "recipe": session["recipe"], "layout": session["layout"], "run": run}


def refuse_other_optimizer(tree: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise CheckpointError, before anything is loaded, for the state of another kind of optimizer."""
    written, current = tree.get("optimizer_class"), type(optimizer).__name__
    if written is not None and written != current:
        raise CheckpointError(
            f"this checkpoint was written with {written}, but this session has {current}, which keeps other state. "
            f"Build {written}(model.parameters(), ...) before gossamer.attach; or, to start with {current}, load the "
            "model alone and save into an empty directory."
        )


@contextmanager
def taking_up(directory: str | os.PathLike[str], tree: Mapping[str, Any], optimizer: Optimizer) -> Iterator[None]:
    """Context manager that raises CheckpointError if the contents of a checkpoint do not fit this run's parts."""
    refuse_other_optimizer(tree, optimizer)
    try:
        yield
    except GossamerError:
        raise
    except MALFORMED as error:
        raise CheckpointError(
            f"the contents of {os.fspath(directory)!r} do not fit this run ({type(error).__name__}: {error}), and some "
            "parts may have been loaded already. Build the model, the optimizer and all tracked objects as in the run "
            "that wrote it, or begin in an empty directory."
        ) from error


def restart_resharded(
    found: LoadedCheckpoint,
    parameters: Mapping[str, Parameter],
    loop: LoopState,
    synchronizer: Synchronizer,
    rank: int,
) -> None:
    """After loading a checkpoint of another world size: start from the agreed parameters, and print a notice."""
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
    """Copy the state of parameters from `old` to `new`, except those in `without` and undelivered values of shards."""
    kept = {name: state for name, state in new.items() if name not in without}
    copy_state(
        old, {name: {key: state[key] for key in state if not is_group_residual(key)} for name, state in kept.items()}
    )


# -- saves and loads of all ranks together -----------------------------------------------------------------------------

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of a save. Raises CheckpointError for invalid ones, such as a script's value with a reserved name."""

    keep: int = 2  # number of checkpoints to keep, including the new one
    replicas: int = 0  # number of other machines that also keep each part, if each has its own directory
    asynchronous: bool = False  # whether to write during the next steps

    def __post_init__(self) -> None:
        machines = "replicas is the number of other machines that also keep each part and must be at least 0"
        _require_option(_is_count(self.replicas, 0), machines, self.replicas)
        _require_option(isinstance(self.asynchronous, bool), "asynchronous must be True or False", self.asynchronous)
        kept = "keep is the number of checkpoints to keep and must be at least 1"
        _require_option(_is_count(self.keep, 1), kept, self.keep)


RESERVED = ("directory", "keep", "replicas", "asynchronous")


def _is_count(given: object, least: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= least


def _require_option(valid: bool, rule: str, given: object) -> None:
    if not valid:
        raise CheckpointError(
            f"{rule}, got {given!r}. Write session.save(directory, keep=2, replicas=0, asynchronous=False); a value to "
            f"save needs another name than {', '.join(RESERVED)}, which are options."
        )


class SessionCheckpoints:
    """Writes and reads the checkpoints of a session. Every rank makes the same calls at the same place.

    parts: other saved parts than the session's own state, by name.
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
        self._run: str | None = None  # name of the run, set by the first save or load
        self._buffers = SnapshotBuffers()
        self._exchange = ReplicaExchange(group.transport, group.run, group.all_gather_text, self._device)
        self._pending: BackgroundSave | None = None  # at most one

    def save(
        self,
        directory: StrPath,
        session: Mapping[str, Any],
        values: Mapping[str, Any],
        **options: Any,
    ) -> None:
        """Write a checkpoint: `session` is the session's state, `values` are the script's values."""
        with flight_recorder.current.save():
            self._save(directory, session, values, options)

    def _save(
        self, directory: StrPath, session: Mapping[str, Any], values: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        wanted = self._agree_on(options)
        self._conclude(since="the next was to be saved")
        self._tracked.notice_missing(values)
        extra = {
            "tracked": self._tracked.state_dict(),
            "optimizer_class": type(self._optimizer).__name__,
            "optimizer_names": parameter_names(self._model, self._optimizer),
        }
        tree = {**coordinated.states(self._parts()), **extra, "session": session, "mine": values}
        all_gather_text = self._group.all_gather_text
        self._run = agree_on_name(all_gather_text, self._run)
        described = about(session, self._run)
        at = SharedStep(os.fspath(directory), session["step"], self._group.transport.rank, all_gather_text)
        copies = None
        if wanted.replicas:
            copies = partial(self._exchange.exchange, plan=self._exchange.plan(directory, wanted.replicas))
        if wanted.asynchronous:
            self._pending = coordinated.begin_in_background(at, tree, described, wanted.keep, copies, self._buffers)
            self._pending.begin()
        else:
            coordinated.save(at, tree, described, wanted.keep, copies)
            self._saved(directory, session["step"])
        self._status.saved()

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _saved(self, directory: StrPath, step: int) -> None:
        self._status.checkpoint = os.fspath(directory)
        events.emit(events.Saved(step=step, directory=os.fspath(directory)))

    def _conclude(self, since: str = "") -> None:
        """Complete a background save on all ranks. Raises CheckpointError if it failed."""
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
        """Context manager around the end of the session: complete a background save before the block, and raise its
        error on all ranks after the block.
        """
        try:
            if self._pending is not None and how == "finished":
                self._conclude()
        finally:
            if self._pending is not None:  # other ranks may not reach this point
                self._pending.wait()
                self._notice_lost(self._pending)
            yield

    def _notice_lost(self, pending: BackgroundSave) -> None:
        if pending.error is not None:
            events.notice(f"the checkpoint of step {pending.step} was not written: {pending.error}")

    def _agree_on(self, options: Mapping[str, Any]) -> SaveOptions:
        """The options, if they are equal on all ranks. Raises CheckpointError on all ranks otherwise."""
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
            found = "; ".join(f"rank {who}: {text}" for who, text in enumerate(texts))
            raise CheckpointError(
                f"ranks save with different options: {found}. Call session.save with the same options on every rank; "
                "nothing was written."
            )
        return wanted

    def load(self, directory: StrPath) -> LoadedCheckpoint | None:
        """The newest checkpoint that all ranks can load, if any; nothing is restored yet."""
        self._conclude()
        transport = self._group.transport
        if transport.world > 1:
            fetch(self._exchange, directory)
        return coordinated.load(directory, transport.rank, transport.world, self._group.all_gather_text)

    @contextmanager
    def taking_up(self, directory: StrPath, found: LoadedCheckpoint) -> Iterator[Callable[[], None]]:
        """Context manager in which the session restores its state. Call the yielded function to restore the parts."""

        def put_back() -> None:
            coordinated.put_back(self._parts(), found.tree)
            self._tracked.load_state_dict(found.tree.get("tracked", {}), resharded=found.news is not None)

        with taking_up(directory, found.tree, self._optimizer):
            yield put_back
        self._run, self._status.checkpoint = found.run, os.fspath(directory)
