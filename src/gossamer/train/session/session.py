"""Session: attaches a model, an optimizer and a recipe to a group, and serves the training loop from then on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gossamer import events
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.aggregation import NO_MOMENTS, AggregationContext
from gossamer.base.transport import Transport
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.engine.loop import JudgedAt, LoopState, StepContext
from gossamer.train.engine.model_buffers import ModelBuffers
from gossamer.train.engine.parameter_check import ParameterCheck, ParameterForm, Verify, check_verify
from gossamer.train.engine.parameter_views import sparse_names
from gossamer.train.engine.report import NonFiniteOrigin, Presence, settings, with_weights
from gossamer.train.engine.tensor_sampler import TensorSampler
from gossamer.train.engine.weight_copies import WeightCopies
from gossamer.train.session import lifecycle_events, recipe_switch, session_checkpoint, uneven_inputs
from gossamer.train.session.ddp_guard import guard_against_ddp
from gossamer.train.session.first_batch import NO_BATCH, FirstBatch
from gossamer.train.session.gradient_guards import StepGuards
from gossamer.train.session.group_changes import ShardedWorld
from gossamer.train.session.layout_change import LayoutChanges
from gossamer.train.session.loop_scaler import Scaler
from gossamer.train.session.model_parts import ModelParts
from gossamer.train.session.recipe_choice import Written
from gossamer.train.session.scalars import DeferredMetrics, named_metrics
from gossamer.train.session.session_checkpoint import SessionCheckpoints, StrPath
from gossamer.train.session.session_status import SessionStats
from gossamer.train.session.startup_checks import check_ranks_alike, fingerprint
from gossamer.train.session.step_hooks import StepHooks
from gossamer.train.session.tracked_parts import TrackedParts
from gossamer.train.sharding.local_shards import WholeParameters


def _old_name(old: str, new: str) -> property:
    """An attribute of Session by its former name, which warns."""

    def get(self: Session) -> Any:
        message = f"session.{old} has a new name and will be removed. Write session.{new}."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(get, doc=f"The former name of `{new}`.")


class Session(LayoutChanges):
    """Trains `model` with `optimizer` together with the other workers of `transport`, as `recipe` says.

    Made by gossamer.attach. Raises MismatchError where ranks are not alike.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        transport: Transport,
        *,
        world: ShardedWorld,
        scaler: Scaler | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        verify: Verify = "warn",
        verify_every: int | None = None,
        parts: ModelParts | None = None,
        scheduler: Stateful | None = None,
    ) -> None:
        check_verify(verify, verify_every)
        super().__init__(recipe, transport, seed)
        self.model, self.optimizer, self.clip_norm = model, optimizer, clip_norm
        self._attached, self._verified = recipe, f"{verify}, {verify_every}"  # `recipe` is the one in force
        self._world = world
        self._tracked = TrackedParts(model, optimizer, scheduler, says=transport.rank == 0)
        self._parts = parts or ModelParts(model)
        guards = StepGuards(scaler, clip_norm, self._parts.total_norm)
        self._step_hooks = StepHooks(self, model, optimizer, recipe, self._tracked, guards, self._extensions)
        self._loop_scaler, self._form = self._step_hooks.loop_scaler, ParameterForm({})
        self._check = ParameterCheck(model, {}, verify, transport.rank, every=verify_every)
        self._adopt(self._parts.views)
        comm_thread = self._join(self._parts.transports)
        self._metrics = DeferredMetrics(comm_thread)
        self._buffers, self._first_batch = ModelBuffers(model), FirstBatch()
        job = self._parts.job(self._group, comm_thread)
        self._checkpoints = SessionCheckpoints(job, self.status, model, optimizer, self._tracked, self._saved)
        self._passes_before = 0  # this epoch
        self._mixed = False  # whether ranks of other frameworks take part
        fragments = self._lay_out(optimizer)
        events.emit(lifecycle_events.begun(model, optimizer, recipe, fragments, transport))
        try:
            if not self._group.alone:
                self._step_hooks.manual_updates.install(self._parameters)
            self._begin(fragments)
        except BaseException:
            comm_thread.close()
            self._step_hooks.manual_updates.remove()
            self._parts.remove()
            raise
        self._synchronizer.controls.muted = self._parts.staged
        self._hooks = [
            self._first_batch.watch(model),
            *guard_against_ddp(model, recipe, transport.world),
            *self._step_hooks.install(self._group, self._check),
            *self.status.watch(model, optimizer),
        ]
        self._opened()

    # -- beginning -------------------------------------------------------------------------------------------------

    def _compare_ranks(self) -> bool:
        self._mixed = check_ranks_alike(self.model, self.optimizer, self._group, **self._about())
        self._buffers.see_constants()
        return self._mixed

    def _at(self) -> AggregationContext:
        return AggregationContext(seed=self._seed, rank=self._transport.rank, world=self._transport.world)

    def _loop_state(self) -> LoopState:
        def now() -> StepContext:
            scaler, momentum = self._loop_scaler, self._step_hooks.momentum
            scale = None if scaler.scaler is None else scaler.scale()
            return StepContext(
                scale=scale,
                settings=self._settings(scale),
                moments=NO_MOMENTS if momentum is None else momentum.now(),
                first_batch=self._first_batch.hash,
                lap=self._world.lap,
            )

        return LoopState(
            begins=self._extensions.begin_pass,
            now=now,
            scale=self._loop_scaler.scale,
            buffers=self._buffers,
            averaged=self._buffers.averaged,
            frozen=self._buffers.frozen,
            copies=WeightCopies(self.optimizer),
            warn=FirstBatch.compare if self._transport.rank == 0 else lambda batches: None,
            ended=self.status.step_ended,
            judged=self._judge,
            check=self._check,
            agree=self._parts.agree,
            agree_in_round=self._parts.agree_in_round,
            sparse=partial(sparse_names, self.model),
            tensors=TensorSampler(lambda: self.steps),
            clips=self.clip_norm is not None,
        )

    def _settings(self, scale: float | None) -> str:
        """Settings that must be alike in lock step. Under local training, one rank's scheduler may be a step behind."""
        alike = (
            ""
            if self._mixed or self._stages.now.local_parameters
            else f"{settings(self.optimizer)}; loss scale={scale}"
        )
        return with_weights(alike, said=self._weighs)

    def _about(self) -> dict[str, str]:
        scaled, clipped = self._loop_scaler.scale() is not None, self.clip_norm
        options = f"clip_norm={clipped}, scaler={scaled}, seed={self._seed}, verify={self._verified}"
        return {"recipe": repr(self.recipe), "layout": self._layout, "options": options}

    def _adopt(self, views: WholeParameters) -> None:
        parameters = views.parameters
        self._extensions.discard(self._form)
        self._parameters, self._form = parameters, ParameterForm(parameters)
        self._extensions.add(self._form)
        self._check.hold(parameters)
        self._step_hooks.adopt(views, self._transport)

    # -- in the loop -----------------------------------------------------------------------------------------------

    @property
    def scaler(self) -> Scaler | None:
        """The loop's GradScaler, if any."""
        return self._loop_scaler.scaler

    @property
    def stats(self) -> SessionStats:
        """Bytes, seconds and compression ratio of the last step and of all steps since attach, on this worker.

        Example:
            print(session.stats)  # or session.stats.run.bytes_sent, session.stats.last_step.wait_seconds
        """
        return self.status.stats(self._parameters.values())

    def set_batch_weight(self, weight: float) -> None:
        """Set how much this rank's batch counts in the mean gradient, sum(w g) / sum(w): usually len(batch).

        Call it before backward(), on every rank or on none (MismatchError at the next exchange). It persists until the
        next call.
        """
        self._weigh(weight)

    def log(self, metrics: Mapping[str, float | Tensor] | None = None, /, **more: float | Tensor) -> None:
        """Write numbers into the run's record: session.log(loss=loss), or session.log({"loss": loss}). Tensors of one
        entry as well, on a GPU, too: then nothing waits for them here."""
        self._metrics.log(self.steps, named_metrics(metrics, more))

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Let ranks run out of data at different times within the block, on every rank once per epoch.

        A rank that is done keeps the others company with weight 0 until all are; then it takes over the parameters,
        buffers, optimizer and tracked schedulers from one that made every step. Draws outside of the block that nothing
        was trained on do not count. Where training is stopped, the block ends early, and no other epoch begins.
        """
        self._extensions.begin_pass()
        self._step_hooks.refuse_gained()
        self._world.enter_epoch()
        self._passes_before = self._synchronizer.passes
        with self._stop.epoch():
            yield
        self._step_hooks.manual_updates.settle()
        self._end_epoch()
        uneven_inputs.leave_epoch(self._world, self._group, together=self._synchronizer.in_step)

    def _catch_up(self, missed: int) -> None:
        beside = (*self._loop_scaler.parts.values(), *self._tracked.schedulers())
        parts = [self._parts.optimizer_state(self.optimizer), *beside]
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self._group.together(partial(uneven_inputs.catch_up, tensors, parts, missed, self._group))

    @contextmanager
    def averaged_parameters(self, model: nn.Module) -> Iterator[nn.Module]:
        """Swap the averaged parameters into `model`, or one with the same names, within the block: to evaluate or save
        it. Buffers and frozen parameters that the script changes are averaged, too. close() leaves each rank its own.

        That is the model as it is in lock step; the mean over workers, for which every rank must come, with Gossip in
        lock step, or DelayedAveraging and a compressor; else the servers', or the last mean.
        """
        with self._parts.swapped_in(self._synchronizer.merge() or {}, model, self.steps):
            yield model

    # -- elastic runs ----------------------------------------------------------------------------------------------

    def _newcomers_fingerprint(self) -> Mapping[str, str]:
        sizes = ", ".join(str(len(group["params"])) for group in self.optimizer.param_groups)
        kind = f"{type(self.optimizer).__name__} with groups of {sizes} parameters"  # its state is handed over
        return {
            **fingerprint(optimizer=None, **self._about()),
            "optimizer": kind,
            **self._tracked.functions(),
        }

    def _handed_parts(self) -> dict[str, Stateful]:
        """Model, optimizer and scaler: all but the world."""
        return {name: part for name, part in self._saved().items() if name != "world"}

    def _moving(self) -> dict[str, Any]:
        """Buffers that are saved. Within a step each worker has its own, until it ends with those of one."""
        names = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in names}

    def _shared_state(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._handed_parts().items()}
        moving = self._moving()
        return {**parts, "model": {name: each for name, each in parts["model"].items() if name not in moving}}

    def _own_state(self) -> dict[str, Any]:
        tracked = self._tracked
        return {"buffers": self._moving(), "tracked": tracked.state_dict(), "functions": tracked.functions()}

    def _take_up(self, alike: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        parts = {**alike, "model": alike["model"] | own["buffers"]}
        for name, part in self._handed_parts().items():
            part.load_state_dict(parts[name])
        self._tracked.take_up(own["tracked"], own["functions"])

    def _first_step_made(self) -> None:
        self._tracked.compare_rates()

    # -- between steps ---------------------------------------------------------------------------------------------

    def _judge(self, what: JudgedAt, blame: NonFiniteOrigin | None) -> None:
        if blame is None and self._nonfinite.is_clear:
            return
        mine = blame is not None and blame[0] == self._transport.rank
        known = mine and (what == "pass" or self._synchronizer.judges_latest_pass)
        batch = self._synchronizer.passes - self._passes_before - 1 if known else None
        self._nonfinite.judge(what, blame, self.steps, scaled=self.scaler is not None, batch=batch)

    @torch.inference_mode(False)  # what is made here is trained with
    def switch(self, recipe: Written, *, reason: str = "") -> None:
        """Go on with another recipe; every rank calls it after the same step, with the same recipe.

        Nothing that was owed is lost: what compressors have not sent goes on in the residuals of `recipe`, or in the
        gradients of the next step where it keeps none; workers that trained apart go on from the mean of their
        parameters, with all that they owed in it, and of their optimizers' moments. Schedules and warm-ups count from
        here, and gradients are gone, as after zero_grad(). Checkpoints remember the recipe in force. `reason` goes into
        the record. With the recipe that is in force, nothing happens.

        Raises RecipeError or AttachError for one that cannot be attached or switched to, LoopError within a step or
        where some ranks train on, and MismatchError where ranks ask for different ones: all go on as before then.
        """
        self._parts.refuse("session.switch()")
        recipe_switch.switch(self, recipe, reason)

    # -- saving and ending -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what the recipe remembers, by parameter name. Never communicates."""
        return session_checkpoint.session_state(
            self.recipe,
            self._layout,
            self._transport,
            self._synchronizer,
            owed=self._step_hooks.owed.state(),
            attached=repr(self._attached),
            since=self._stages.since,
            shards=self._parts.shards,
        )

    @torch.inference_mode(False)
    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Take up what state_dict() of the same rank, recipe and layout gave; or, where another number of workers had
        them, all of their states in order of rank: each worker then begins with the mean of what they had to send.
        """
        passes = session_checkpoint.own_state(states, self._transport)["passes"]
        recipe_switch.follow(self, states)
        self._enter_stage(passes)
        session_checkpoint.restore(states, self.state_dict(), self._transport, self._synchronizer)

    def track(self, loader: DataLoader[Any] | None = None, /, **part: Any) -> Any:
        """Let checkpoints hold one more part, before `load`, which restores it; returns what the loop should use:
        session.track(scheduler=scheduler), or anything else with state_dict() and load_state_dict(); loader =
        session.track(DataLoader(..., num_workers=4)), which counts batches that are used, not those fetched ahead.
        """
        return self._tracked.track(loader, part)

    def save(
        self, directory: StrPath, *, keep: int = 2, replicas: int = 0, asynchronous: bool = False, **mine: Any
    ) -> None:
        """Write everything that a bit-exact resume needs into `directory`, one file a rank; every rank must call it.

        Model, optimizer, scaler, what is tracked, what the recipe remembers, positions of the world's shards, random
        states, and `mine`: numbers, text, tensors, containers of them, and whatever has a state_dict(). The newest
        `keep` stay. Where the directory holds steps of a run that this one did not load, they are set aside.
        asynchronous: return once all is copied in memory, and write it beside the next steps; the next save, load or
        close waits for the rest, and raises what went wrong. replicas: other machines that keep each part, too, where
        `directory` is one of each machine's own; `load` fetches what a machine lacks. With parameter servers of their
        own nothing is saved once a worker is lost: a notice says so, and training goes on.
        """
        if self._group.lacks_ranks("session.save"):
            return
        self._step_hooks.manual_updates.settle()
        self._synchronizer.meet_to_save()
        if self._synchronizer.in_step and not self._stages.now.local_parameters:
            session_checkpoint.compare_parameters(self._check, self._group, self.steps)
        save = partial(self._checkpoints.save, directory, keep=keep, replicas=replicas, asynchronous=asynchronous)
        self._group.whole(lambda: save(self.state_dict(), mine))
        self._changes.mine = mine

    @torch.inference_mode(False)
    def load(self, directory: StrPath) -> dict[str, Any]:
        """Resume from the newest checkpoint in `directory` that is complete on every rank; returns what was saved as
        `mine`, or {} where there is none. Every rank must call it.

        Another number of workers may have written it, where all their files are there: one line then says what became
        of what they remembered. A damaged one is passed over for the one before it, and a line says so. A newcomer to
        an elastic run has everything already: here it is told what the others saved, or loaded, as `mine`.
        """
        if self._changes.handed_over:
            return dict(self._changes.mine)
        if self._synchronizer.in_step:
            self._synchronizer.meet_to_save(Presence.LOADING)  # LoopError on all ranks where some do not load
        self._step_hooks.manual_updates.forget()
        if (found := self._checkpoints.load(directory)) is None:
            return {}
        if self._group.is_detached:  # the servers have what was learned since, and are not put back
            return dict(found.tree["mine"])
        self._parts.refuse_other_shards(found)
        with self._checkpoints.taking_up(directory, found) as put_back_parts:
            self.load_state_dict(*found.sessions)
            put_back_parts()
            here = self._parameters, self._stages.loop, self._synchronizer
            session_checkpoint.restart_resharded(found, *here, self._transport.rank)
        self._first_batch.hash = NO_BATCH  # they were compared in the run that this one continues
        return dict(found.tree["mine"])

    def _saved(self) -> dict[str, Stateful]:
        """The parts of a checkpoint besides the session's own, by their names in it; all but the world are alike."""
        parts = self._parts.saved(self.model, self.optimizer)
        return {**parts, **self._loop_scaler.parts, "world": self._world}

    merged = _old_name("merged", "averaged_parameters")
    weight = _old_name("weight", "set_batch_weight")
    ask_to_stop = _old_name("ask_to_stop", "request_stop")
    stopping = _old_name("stopping", "should_stop")
    reset = _old_name("reset", "reset_compressor_state")

    def _close(self, how: events.Ended) -> None:
        with self._checkpoints.ended(how):
            for hook in (*self._hooks, self._parts):
                hook.remove()
            if self._step_hooks.momentum is not None:
                self._step_hooks.momentum.after()
            self._metrics.finish()
            super()._close(how)

    def _held(self) -> Mapping[str, Tensor]:
        return lifecycle_events.held(self.model)

    def _compared(self, closed: events.Closed) -> events.Closed:
        return self._parts.whole(closed, self._transport)
