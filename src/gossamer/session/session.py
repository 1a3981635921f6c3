"""Session: attaches a model, an optimizer and a recipe to a group, and synchronizes around every optimizer step."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any, Self

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from gossamer import events
from gossamer.checkpoint import coordinated
from gossamer.checkpoint.state import Stateful
from gossamer.compressors.sharded import settle
from gossamer.core.aggregation import AggregationContext
from gossamer.errors import Stopped, require
from gossamer.recipes.recipe import Recipe
from gossamer.reducer.bucket import layout_text
from gossamer.reducer.model_buffers import ModelBuffers
from gossamer.reducer.optimizer_settings import settings, with_weights
from gossamer.reducer.parameter_check import ParameterCheck, Verify, check_verify
from gossamer.reducer.parameter_views import swapped_in, trainable
from gossamer.reducer.reduction import StepContext
from gossamer.runtime.comm_thread import CommThread
from gossamer.runtime.open_sessions import register, unregister
from gossamer.runtime.transport import Transport
from gossamer.session import lifecycle_events, session_checkpoint, uneven_inputs
from gossamer.session.ddp_guard import DdpGuard, guard_against_ddp
from gossamer.session.first_batch import NO_BATCH, FirstBatch
from gossamer.session.foreign_optimizers import ForeignOptimizerGuard, OptimizerStepHook
from gossamer.session.gradient_guards import GradientClip, NonFiniteMonitor, Scaler, has_closure
from gossamer.session.group_calls import GroupCalls, leave
from gossamer.session.lifecycle_events import numbers
from gossamer.session.momentum_transfer import take_over
from gossamer.session.scaler_hook import SkippedStepHook
from gossamer.session.startup_checks import check_ranks_alike
from gossamer.session.tracked_parts import TrackedParts
from gossamer.synchronizers.base import LoopState, NonFiniteOrigin, StepCosts, Synchronizer
from gossamer.synchronizers.solo import SoloSynchronizer
from gossamer.synchronizers.stages import StageSequence

NO_BLOCK = (
    "session.ask_to_stop() without a block to leave ends the script on every rank, with exit code 0, and the lines "
    "below the loop do not run. Write `with gossamer.attach(...) as session:` around the loop to go on there."
)


class Session:
    """Trains `model` with `optimizer` together with the other workers of `transport`, as `recipe` says.

    Made by gossamer.attach. Raises MismatchError where ranks are not alike.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        transport: Transport,
        *,
        world: Stateful,
        scaler: Scaler | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        verify: Verify = "warn",
    ) -> None:
        check_verify(verify)
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.scaler, self.clip_norm, self._clip = scaler, clip_norm, GradientClip(clip_norm)
        self._transport, self._world, self._seed, self._verify = transport, world, seed, verify
        self._tracked = TrackedParts(model, optimizer, says=transport.rank == 0)
        self._run: str | None = None  # the name of the run in checkpoints, from the first save or load on
        self._adopt(trainable(model))
        comm_thread = CommThread(next(iter(self._parameters.values())).device, transport.make_progress)
        self._group = GroupCalls(transport, comm_thread)
        self._leave = weakref.finalize(self, leave, comm_thread, transport, self._group.pid)  # at exit, too
        self._buffers, self._first_batch, self._nonfinite = ModelBuffers(model), FirstBatch(), NonFiniteMonitor()
        self._last_step_at, self._muted_at = time.perf_counter(), -1
        self._weighs = self._in_block = False  # has said how much its batches count; is used as `with ... as session`
        self._synchronizer: Synchronizer = SoloSynchronizer(self._step_ended)  # until the ranks are found alike
        self._stages = StageSequence(recipe, optimizer, transport, comm_thread, self._loop(), seed)
        fragments = self._stages.fragments(self._parameters)
        self._layout = layout_text(bucket for buckets in fragments for bucket in buckets)
        events.emit(lifecycle_events.begun(model, optimizer, recipe, fragments, transport))
        try:
            self._check_ranks_alike()
            self._synchronizer = self._stages.begin(self._parameters, fragments)
        except BaseException:
            comm_thread.close()
            raise
        self._hooks: list[RemovableHandle | OptimizerStepHook | DdpGuard | SkippedStepHook] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            first := model.register_forward_pre_hook(self._first_batch.see, with_kwargs=True),
            OptimizerStepHook(self._before_any_step),
            *guard_against_ddp(model, recipe, transport.world),
            *([SkippedStepHook(scaler, optimizer, self._step_skipped)] if scaler is not None else []),
        ]
        self._first_batch.hook = first
        register(self)
        self._group.publish()

    # -- beginning -------------------------------------------------------------------------------------------------

    def _loop(self) -> LoopState:
        return LoopState(
            step_context=self._step_context,
            scale=self._current_scale,
            settings=self._settings,
            buffers=self._buffers,
            averaged=self._buffers.averaged,
            batch=lambda: self._first_batch.hash,
            warn=FirstBatch.compare if self._transport.rank == 0 else lambda batches: None,
            ended=self._step_ended,
            judged=partial(self._judge, "exchange"),
            check=lambda: self._check,
            guarded=partial(self._judge, "pass"),
            clips=self.clip_norm is not None,
        )

    def _at(self) -> AggregationContext:
        return AggregationContext(seed=self._seed, rank=self._transport.rank, world=self._transport.world)

    def _settings(self) -> str:
        """Settings that must be alike in lock step. Under local training, one rank's scheduler may be a step behind."""
        local = self._stages.now.local_parameters
        alike = "" if local else f"{settings(self.optimizer)}; loss scale={self._current_scale()}"
        return with_weights(alike, said=self._weighs)

    def _check_ranks_alike(self) -> None:
        if self._transport.world == 1:
            return
        scaled = self._current_scale() is not None
        options = f"clip_norm={self.clip_norm}, scaler={scaled}, seed={self._seed}, verify={self._verify}"
        about = {"recipe": repr(self.recipe), "layout": self._layout, "options": options}
        check_ranks_alike(self.model, self.optimizer, self._group, **about)
        self._buffers.see_constants()

    def _adopt(self, parameters: dict[str, Parameter]) -> None:
        self._parameters = parameters
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._check = ParameterCheck(self.model, parameters, self._verify, self._transport.rank)
        self._foreign_guard = ForeignOptimizerGuard(self.model, self.optimizer, self.recipe, parameters)
        self._momentum = take_over(self.optimizer, self.recipe.compressor, parameters, self._at(), self.clip_norm)

    # -- in the loop -----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps so far: exchanges that were committed, or steps of the optimizer while workers train apart."""
        return self._synchronizer.step

    def weight(self, weight: float) -> None:
        """Say how much this rank's batch counts, usually len(batch), before backward; stays until said again.

        The mean gradient is then sum(w g) / sum(w). Every rank says it, or none: MismatchError at the next exchange.
        """
        require(isfinite(weight) and weight >= 0, f"a weight is a finite number of samples, not {weight}")
        self._synchronizer.weight, self._weighs = float(weight), True

    def log(self, **metrics: float | Tensor) -> None:
        """Write numbers, such as loss=loss, into the run's record; tensors of one entry as well."""
        events.emit(events.Logged(step=self.steps, values=numbers(metrics)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank; the next backward outside sends the sum."""
        before, self._synchronizer.muted, self._muted_at = self._synchronizer.muted, True, self._synchronizer.passes
        try:
            yield
        finally:
            self._synchronizer.muted = before

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Let ranks run out of data at different times within the block, on every rank once per epoch.

        A rank that is done keeps the others company with weight 0 until all are; then it takes over the parameters,
        buffers and optimizer state from one that made every step.
        """
        yield
        missed = self._synchronizer.end_epoch()
        while not self._synchronizer.stopping and self._stages.over(self._synchronizer.passes):
            self._enter_next_stage(missed)
            missed = self._synchronizer.end_epoch()
        self._raise_if_stopping()
        if self._synchronizer.in_step:
            self._catch_up(missed)

    def _enter_next_stage(self, missed: int = 0) -> None:
        """Enter the stage that begins, on every rank with the same parameters."""
        self._catch_up(missed)
        self._synchronizer = self._stages.enter(self._synchronizer.passes, self._parameters, self._synchronizer)

    def _catch_up(self, missed: int) -> None:
        parts = [self.optimizer, *([self.scaler] if self.scaler is not None else [])]
        uneven_inputs.catch_up(self.model, parts, missed, self._group)

    @contextmanager
    def merged(self, model: nn.Module) -> Iterator[nn.Module]:
        """Evaluate what the workers agree on: within the block, `model` has the parameters that are merged.

        With lock-step recipes that is the model as it is; with Gossip in lock step the mean over workers, for which
        every rank must come here; else the servers', or the mean over workers, as they are while others train on.
        `model`: the one that is attached, or another with the same parameters, by name.
        """
        with swapped_in(self._synchronizer.merge() or {}, trainable(model)):
            yield model

    # -- around the optimizer --------------------------------------------------------------------------------------

    def _before_any_step(self, optimizer: Optimizer, closure: bool) -> None:
        self._tracked.see(optimizer)
        if optimizer is self.optimizer or self._group.forked:
            return
        if self._transport.world > 1:
            self._foreign_guard.check(optimizer, local=self._muted_at == self._synchronizer.passes)
        if self._foreign_guard.shares(optimizer):
            self._synchronizer.use()
            self._clip_for(optimizer, closure)

    def _clip_for(self, optimizer: Optimizer, closure: bool) -> None:
        self._clip.before(optimizer, self._parameters.values(), closure=closure, scale=self._current_scale())

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._group.forked:
            return
        self._foreign_guard.refuse_unaveraged(optimizer)
        closure = has_closure(args, kwargs)
        if self._transport.world > 1:
            self._check.look(self.steps)
        self._synchronizer.before_step(closure=closure)
        touched = self.scaler is None and self._synchronizer.touched
        self._momentum.before(self.steps, closure=closure, touched=touched)
        self._clip_for(optimizer, closure)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._group.forked:
            return
        self._momentum.after()
        self._synchronizer.after_step()
        self._step_over()

    def _step_skipped(self) -> None:
        """The scaler has left out the optimizer's step, of which no hook of the optimizer's tells."""
        if not self._group.forked:
            self._synchronizer.step_skipped()
            self._step_over()

    def _step_over(self) -> None:
        self._raise_if_stopping()
        if self._stages.over(self._synchronizer.passes):
            self._enter_next_stage()

    def _current_scale(self) -> float | None:
        return None if self.scaler is None or not self.scaler.is_enabled() else self.scaler.get_scale()

    def _step_context(self) -> StepContext:
        return StepContext(self._current_scale(), self._settings(), self._momentum.now(), self._first_batch.hash)

    def _judge(self, what: str, blame: NonFiniteOrigin | None) -> None:
        self._nonfinite.judge(what, blame, self.steps, scaled=self.scaler is not None)

    def _step_ended(self, skipped: bool, costs: StepCosts) -> None:
        now = time.perf_counter()
        seconds, self._last_step_at = now - self._last_step_at, now
        events.emit(events.StepEnded(step=self.steps, seconds=seconds, skipped=skipped, **costs))

    # -- saving and ending -----------------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """End training cleanly: every rank raises Stopped after the same step, once the next exchange has landed. That
        leaves the block `with gossamer.attach(...)`; without that block the script ends, with exit code 0."""
        self._synchronizer.asked_to_stop = True
        if not self._in_block:
            events.notice(NO_BLOCK)

    def _raise_if_stopping(self) -> None:
        if self._synchronizer.stopping:
            if not self._in_block:
                atexit.register(self.close)  # as the block would
            raise Stopped

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what the recipe remembers, by parameter name. Never communicates."""
        return session_checkpoint.session_state(self.recipe, self._layout, self._transport, self._synchronizer)

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Take up what state_dict() of the same rank, recipe and layout gave; or, where another number of workers had
        them, all of their states in order of rank: each worker then begins with the mean of what they had to send."""
        passes = session_checkpoint.own_state(states, self._transport)["passes"]
        self._synchronizer = self._stages.enter(passes, self._parameters, self._synchronizer)
        session_checkpoint.restore(states, self.state_dict(), self._transport, self._synchronizer)

    def track(self, loader: DataLoader[Any] | None = None, /, **part: Any) -> Any:
        """Let checkpoints hold one more part, before `load`, which then restores it; returns what the loop should use:
        session.track(scheduler=scheduler), or anything else with state_dict() and load_state_dict(); loader =
        session.track(DataLoader(dataset, sampler=world.shard(dataset), num_workers=4)), which then counts the batches
        it hands out, so that a resumed run skips none that its workers had fetched."""
        return self._tracked.track(loader, part)

    def save(self, directory: str | os.PathLike[str], **mine: Any) -> None:
        """Write everything that a bit-exact resume needs into `directory`, one file a rank; every rank must call it.

        Model, optimizer, scaler, what is tracked, what the recipe remembers, positions of the world's shards, random
        states, and `mine`: numbers, text, tensors, containers of them, and whatever has a state_dict(). The last two
        checkpoints are kept. Where the directory holds steps of a run that this one did not load, they are set aside.
        """
        self._synchronizer.meet_to_save()
        if not self._stages.now.local_parameters:
            session_checkpoint.compare_parameters(self._check, self._group, self.steps)
        self._tracked.tell_missing(mine)
        tracked = {"tracked": self._tracked.state_dict()}
        tree = {**coordinated.states(self._saved), **tracked, "session": self.state_dict(), "mine": mine}
        self._run = session_checkpoint.save(directory, tree, self._group.all_gather_text, self._run)

    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Resume from the newest checkpoint in `directory` that is complete on every rank; returns what was saved as
        `mine`, or {} where there is none. Every rank must call it.

        Another number of workers may have written it, where all their files are there: one line then says what became
        of what they remembered. A damaged one is passed over for the one before it, and another line says so.
        """
        rank = self._transport.rank
        if self._synchronizer.in_step:
            self._synchronizer.meet_to_save()  # LoopError on all ranks where some do not load
        found = coordinated.load(directory, rank, self._transport.world, self._group.all_gather_text)
        if found is None:
            return {}
        with session_checkpoint.taking_up(directory):
            self.load_state_dict(*found.sessions)
            coordinated.put_back(self._saved, found.tree)
            self._tracked.load_state_dict(found.tree.get("tracked", {}), resharded=found.news is not None)
            session_checkpoint.restart_resharded(found, self._parameters, self._synchronizer, rank)
        self._run = found.run
        self._first_batch.hash = NO_BATCH  # they were compared in the run that this one continues
        return dict(found.tree["mine"])

    @property
    def _saved(self) -> dict[str, Stateful]:
        """The parts of a checkpoint besides the session's own, by their names in it."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler}
        return {"model": self.model, "optimizer": self.optimizer, **scaler, "world": self._world}

    def reset(self, *names: str) -> None:
        """Forget what is remembered about these parameters: after resizing them, all at once, on every rank."""
        now = trainable(self.model)
        session_checkpoint.refuse_unnamed(names, now, self._shapes)
        if self._transport.world == 1:
            self._adopt(now)
            self._layout = layout_text(bucket for buckets in self._stages.fragments(now) for bucket in buckets)
            return
        before = self._synchronizer
        before.flush()
        self._group.broadcast_([now[name].detach() for name in names], 0)  # where they were trained apart, or made anew
        for bucket in before.buckets:
            settle(bucket.state, self._at())  # parts will lie elsewhere
        old = before.remembered()
        self._adopt(now)
        before.close()
        self._synchronizer = self._stages.begin(now, self._stages.fragments(now))
        self._layout = layout_text(self._synchronizer.buckets)
        session_checkpoint.copy_kept(old, self._synchronizer.remembered(), without=names)
        self._synchronizer.take_over_from(before)

    def close(self) -> None:
        """Leave the loop as it was found; the model and the optimizer stay as they are."""
        self._end(well=True)

    def _end(self, *, well: bool) -> None:
        if self._group.forked or not unregister(self):
            return
        for hook in self._hooks:
            hook.remove()
        self._momentum.after()
        if well:
            self._synchronizer.end_run()
        self._synchronizer.close()
        events.emit(lifecycle_events.ended(self.model, self.steps, self._synchronizer))
        self._leave()

    def __enter__(self) -> Self:
        self._in_block = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Where this session was asked to stop, the script goes on after the block, on every rank."""
        stopped = kind is not None and issubclass(kind, Stopped)
        self._end(well=kind is None or stopped)
        return stopped and self._synchronizer.stopping
