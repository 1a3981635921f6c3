"""Session: connects a model, an optimizer and a recipe to a group of workers, and hooks the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gossamer import events
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.aggregation import NO_MOMENTS, AggregationContext
from gossamer.base.former_names import former_attribute
from gossamer.base.transport import Transport
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.engine.loop import JudgedAt, LoopState, StepContext
from gossamer.train.engine.model_buffers import ModelBuffers
from gossamer.train.engine.parameter_check import ParameterCheck, ParameterForm, Verify, check_verify
from gossamer.train.engine.parameter_views import sparse_names
from gossamer.train.engine.step_decision import NonFiniteOrigin, Presence, settings
from gossamer.train.engine.tensor_sampler import TensorSampler
from gossamer.train.engine.weight_copies import WeightCopies
from gossamer.train.session import lifecycle_events, recipe_switch, session_checkpoint, uneven_inputs
from gossamer.train.session.clipping_and_nonfinite import StepGuards
from gossamer.train.session.ddp_guard import DdpGuard
from gossamer.train.session.first_batch import NO_BATCH, FirstBatch
from gossamer.train.session.group_changes import ShardedWorld
from gossamer.train.session.layout_change import LayoutChanges, by_new_name, renamed_in
from gossamer.train.session.loaded_weights import LoadedWeights
from gossamer.train.session.loop_scaler import Scaler
from gossamer.train.session.model_parts import ModelParts
from gossamer.train.session.recipe_choice import Written, placed_in
from gossamer.train.session.scalars import DeferredMetrics, named_metrics
from gossamer.train.session.session_checkpoint import SessionCheckpoints, StrPath
from gossamer.train.session.session_status import SessionStats
from gossamer.train.session.startup_checks import check_ranks_alike, fingerprint
from gossamer.train.session.step_hooks import StepHooks
from gossamer.train.session.tracked_parts import TrackedParts
from gossamer.train.sharding.local_shards import WholeParameters


class Session(LayoutChanges):
    """Trains `model` with `optimizer` together with the other workers of `transport`. Made by gossamer.attach.

    Usable as a context manager, which closes it. See gossamer.attach for the meaning of the options.

    Raises:
        MismatchError: models, recipes or options differ between ranks.

    Example:
        >>> with gossamer.attach(model, optimizer, "TopK(0.5)", replace=True) as session:
        ...     model(batch).square().mean().backward()
        ...     optimizer.step()
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
        steps: int | None = None,
    ) -> None:
        check_verify(verify, verify_every)
        recipe = placed_in(recipe, transport)
        super().__init__(recipe, transport, seed)
        self.model, self.optimizer, self.clip_norm = model, optimizer, clip_norm
        self._attached, self._verified = recipe, f"{verify}, {verify_every}"  # `recipe` is the one in force
        self._world = world
        world.begin_training()
        self._tracked = TrackedParts(model, optimizer, scheduler, gives_notice=transport.rank == 0)
        self._parts = parts or ModelParts(model)
        guards = StepGuards(scaler, clip_norm, self._parts.total_norm)
        self._step_hooks = StepHooks(self, model, optimizer, recipe, self._tracked, guards, self._extensions)
        self._loop_scaler, self._form = self._step_hooks.loop_scaler, ParameterForm({})
        self._check = ParameterCheck(model, {}, verify, transport.rank, every=verify_every)
        self._adopt(self._parts.views)
        comm_thread = self._join(self._parts.transports)
        self._metrics = DeferredMetrics(comm_thread)
        self._buffers, self._first_batch = (
            ModelBuffers(model),
            FirstBatch(self._step_hooks.manual_updates.training_begins),
        )
        job = self._parts.job(self._group, comm_thread)
        self._checkpoints = SessionCheckpoints(job, self.status, model, optimizer, self._tracked, self._saved)
        self._passes_before = 0  # this epoch
        self._mixed = False  # whether ranks use different frameworks
        fragments = self._build_layout(optimizer)
        events.emit(replace(lifecycle_events.begun(model, optimizer, recipe, fragments, transport), steps=steps))
        try:
            if not self._group.alone:
                self._step_hooks.manual_updates.install(self._parameters, gives_notice=transport.rank == 0)
            self._begin(fragments)
        except BaseException:
            comm_thread.close()
            self._step_hooks.manual_updates.remove()
            self._parts.remove()
            raise
        self._synchronizer.controls.muted = self._parts.staged
        self._loaded_weights = LoadedWeights(model, self)
        self._hooks = [
            self._first_batch.watch(model),
            *([DdpGuard(model, recipe)] if transport.world > 1 else ()),  # alone, DDP is harmless
            *self._step_hooks.install(self._group, self._check),
            *self.status.watch(model, optimizer),
            self._loaded_weights,
        ]
        self._opened()

    # -- beginning -------------------------------------------------------------------------------------------------

    def _compare_ranks(self) -> bool:
        self._mixed = check_ranks_alike(self.model, self.optimizer, self._group, self._world.data(), **self._about())
        self._buffers.see_constants()
        return self._mixed

    def _at(self) -> AggregationContext:
        return AggregationContext(seed=self._seed, rank=self._transport.rank, world=self._transport.world)

    def _loop_state(self) -> LoopState:
        def now() -> StepContext:
            scaler, momentum = self._loop_scaler, self._step_hooks.momentum
            scale = None if scaler.scaler is None else scaler.scale()
            # With local training, a rank's scheduler may be a step behind
            differing = self._mixed or self._stages.now.local_parameters
            return StepContext(
                scale=scale,
                settings=settings(None if differing else self.optimizer, scale, weighted=self._weighs),
                moments=NO_MOMENTS if momentum is None else momentum.now(),
                first_batch=self._first_batch.hash,
                lap=self._world.lap,
            )

        return LoopState(
            extensions=self._extensions,
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
            missed=self._step_hooks.join_loss,
            divide_data=partial(uneven_inputs.divide_data, self._world, self._group),
            agree=self._parts.agree,
            agree_in_round=self._parts.agree_in_round,
            sparse=partial(sparse_names, self.model),
            tensors=TensorSampler(lambda: self.steps),
            clips=self.clip_norm is not None,
        )

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
    def steps(self) -> int:
        """Number of steps, as far as an optimizer or the loop itself has used the averaged gradients; with local
        training, steps of this worker. With balance=True in LocalSGD or DiLoCo, its position in the common schedule, in
        which a step of a slow worker counts as several.

        Example:
            >>> session.steps
            0
        """
        if self._synchronizer.steps != self._synchronizer.step:
            self._step_hooks.manual_updates.look()
        return super().steps

    @property
    def scaler(self) -> Scaler | None:
        """The GradScaler of the loop, if any."""
        return self._loop_scaler.scaler

    @property
    def stats(self) -> SessionStats:
        """Bytes sent, seconds and compression ratio of this worker: of the last step, and of all steps since attach.

        Example:
            print(session.stats)  # or session.stats.run.bytes_sent, session.stats.last_step.wait_seconds
        """
        return self.status.stats(self._parameters.values())

    def set_batch_weight(self, weight: float) -> None:
        """Set the weight w of this rank's batch in the mean gradient, sum(w g) / sum(w).

        Call it before backward(), on every rank or on no rank. The weight persists until the next call.

        Args:
            weight: usually len(batch); finite, at least 0.

        Raises:
            MismatchError: at the next exchange, if only some ranks called it.

        Example:
            >>> session.set_batch_weight(len(batch))
        """
        self._weigh(weight)

    @property
    def batch_size(self) -> int:
        """Number of samples that this worker should compute in its next backward pass.

        With EveryStep(global_batch=..., balance=True) and no `batch`, read it before drawing each batch: it follows the
        workers' speeds, and is also this batch's weight in the mean. With `batch` it is that number.

        Raises:
            LoopError: the recipe has no global batch.

        Example:
            while session.steps < 1000:
                x, y = draw(session.batch_size)
        """
        return self._synchronizer.batch_size

    def log(self, metrics: Mapping[str, float | Tensor] | None = None, /, **more: float | Tensor) -> None:
        """Write metrics into the record of the run and to its exporters.

        Args:
            metrics: values by name; tensors must have one entry. Reading a tensor on a GPU does not block this call.
            more: the same as keyword arguments.

        Example:
            session.log(loss=loss)  # or session.log({"loss": loss})
        """
        self._metrics.log(self.steps, named_metrics(metrics, more))

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Context manager around one epoch, for ranks with different numbers of batches. All ranks enter it.

        A rank without data joins the operations of the other ranks with weight 0 until all ranks are done. It then
        copies parameters, buffers, optimizer state and tracked schedulers from a rank that made every step. Samples
        drawn outside of the block that were not trained on are not counted. After a stop request the block ends early,
        and no further epoch begins.

        Example:
            >>> with session.epoch():
            ...     for batch in loader:
            ...         model(batch).square().mean().backward()
            ...         optimizer.step()
        """
        for begin in self._extensions.pass_began:
            begin()
        self._step_hooks.refuse_gained()
        self._world.enter_epoch()
        self._passes_before = self._synchronizer.passes
        with self._stop.epoch():
            yield
        self._step_hooks.manual_updates.settle()
        self._end_epoch()
        uneven_inputs.leave_epoch(self._world, self._group, together=self._synchronizer.in_step)

    def _not_optimized(self) -> list[Parameter]:
        return self._step_hooks.not_optimized()

    def _catch_up(self, missed: int) -> None:
        others = (self._loop_scaler, *self._tracked.schedulers())
        parts = [self._parts.optimizer_state(self.optimizer), *others]
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self._group.together(partial(uneven_inputs.catch_up, tensors, parts, missed, self._group))

    @contextmanager
    def averaged_parameters(self, model: nn.Module) -> Iterator[nn.Module]:
        """Context manager that swaps the averaged parameters into `model`, for evaluation or saving.

        In lock step these are the parameters of the model. Gossip in lock step, and DelayedAveraging with a
        compressor, compute the mean over all workers, so every rank must enter the block. All other recipes use the
        parameters of the servers or the last mean. Buffers and frozen parameters that the script changes are averaged
        as well. On exit each rank gets its own values back; session.close() does not change them.

        Args:
            model: the attached model, or one with the same parameter names.

        Returns:
            `model`.

        Example:
            >>> with session.averaged_parameters(model):
            ...     loss = model(batch).square().mean()
        """
        merged = by_new_name(self._synchronizer.merge() or {}, renamed_in(model, self._parameters))
        with self._synchronizer.swapping(), self._parts.swapped_in(merged, model, self.steps):
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
        local = blame is not None and blame[0] == self._transport.rank
        known = local and (what == "pass" or self._synchronizer.judges_latest_pass)
        batch = self._synchronizer.passes - self._passes_before - 1 if known else None
        self._nonfinite.judge(what, blame, self.steps, scaled=self.scaler is not None, batch=batch)

    @torch.inference_mode(False)  # what is made here is trained with
    def switch(self, recipe: Written, *, reason: str = "") -> None:
        """Continue with another recipe. Every rank calls it after the same step, with the same recipe.

        Unsent residuals move to the residuals of the new recipe, or into the gradients of the next step if it keeps
        no residuals. Workers that trained separately continue from the mean of their parameters (with all residuals
        added) and of their optimizer moments. Schedules and warm-ups restart; gradients are cleared as by
        zero_grad(). Checkpoints contain the current recipe. Switching to the current recipe does nothing.

        Args:
            recipe: as for gossamer.attach, except "auto".
            reason: text for the record of the run.

        Raises:
            RecipeError, AttachError: this recipe cannot be attached, or not be switched to.
            LoopError: called within a step, or only on some ranks.
            MismatchError: ranks request different recipes. After any of these errors the old recipe stays in force.

        Example:
            >>> session.switch("Int8()", reason="less compression for the last epochs")
        """
        self._parts.refuse("session.switch()")
        recipe_switch.switch(self, recipe, reason)

    # -- saving and ending -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the recipe state (residuals, momentum) by parameter name. Never communicates.

        Example:
            >>> state = session.state_dict()
            >>> session.load_state_dict(state)
        """
        return session_checkpoint.session_state(
            self.recipe,
            self._layout,
            self._transport,
            self._synchronizer,
            earlier=self._step_hooks.pending_gradients.state(),
            attached=repr(self._attached),
            since=self._stages.since,
            first_bytes=self._stages.first_bytes,
            shards=self._parts.shards,
            changed_frozen=self._buffers.frozen.changed,
            averaged_frozen=self._buffers.frozen.names,
        )

    @torch.inference_mode(False)
    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Restore the result of state_dict(), for the same recipe and layout.

        Args:
            states: the state of this rank; or, if another number of workers saved them, the states of all those ranks
                in order. Each worker then starts with the mean of their unsent residuals.

        Raises:
            CheckpointError: a state is damaged, or belongs to another recipe or layout.

        Example:
            >>> session.load_state_dict(session.state_dict())
        """
        own = session_checkpoint.own_state(states, self._transport)
        changed = [name for each in states for name in each.get("changed_frozen", ())]
        self._buffers.frozen.loading(changed, own.get("averaged_frozen", ()))
        recipe_switch.follow(self, states)
        self._enter_restored_stage(own["passes"], session_checkpoint.first_bytes(own))
        session_checkpoint.restore(states, self.state_dict(), self._transport, self._synchronizer)

    def track(self, loader: DataLoader[Any] | None = None, /, **part: Any) -> Any:
        """Include another object in checkpoints. Call it before `load`, which restores the object.

        Args:
            loader: a DataLoader. The returned wrapper counts batches that were used, not those that were prefetched.
            part: one object with state_dict() and load_state_dict(), by name.

        Returns:
            The object that the loop must use.

        Example:
            session.track(scheduler=scheduler)
            loader = session.track(DataLoader(dataset, sampler=shard, num_workers=4))
        """
        return self._tracked.track(loader, part)

    def save(
        self, directory: StrPath, *, keep: int = 2, replicas: int = 0, asynchronous: bool = False, **values: Any
    ) -> None:
        """Write a checkpoint for a bit-exact resume into `directory`, one file per rank. Every rank must call it.

        It contains the model, optimizer, scaler, tracked objects, recipe state, positions of the world's shards, random
        states, and `values`. Checkpoints of another run that this run did not load are moved aside. With dedicated
        parameter servers nothing is saved after a worker is lost: a notice reports it, and training continues.

        Args:
            directory: shared by all ranks, or one per machine (see `replicas`).
            keep: number of newest checkpoints to keep.
            replicas: number of other machines that also store each file, if each machine has its own `directory`.
                `load` fetches files that a machine lacks.
            asynchronous: return after copying everything in memory, and write during the next steps. The next save,
                load or close waits for the write and raises its errors.
            values: values of the script to save: numbers, text, tensors, containers of these, and objects with
                state_dict().

        Raises:
            LoopError: not all ranks call it after the same step.
            CheckpointError: writing failed.

        Example:
            >>> session.save(directory, epoch=3)
        """
        if self._group.lacks_ranks("session.save"):
            return
        self._step_hooks.manual_updates.settle()
        if self._accumulates_locally:
            self._tracked.report_accumulated()
        self._synchronizer.meet_to_save()
        if self._synchronizer.in_step and not self._stages.now.local_parameters:
            session_checkpoint.compare_parameters(self._check, self._group, self.steps)
        save = partial(self._checkpoints.save, directory, keep=keep, replicas=replicas, asynchronous=asynchronous)
        self._group.whole(lambda: save(self.state_dict(), values))
        self._changes.saved_values = values

    @torch.inference_mode(False)
    def load(self, directory: StrPath) -> dict[str, Any]:
        """Resume from the newest checkpoint in `directory` that is complete on every rank. Every rank must call it.

        The checkpoint may come from another number of workers if all their files are readable; a notice then reports
        how their recipe state was combined. A damaged checkpoint is skipped for the previous one, with a notice. A
        worker that joins an elastic run has the current state already; it receives only the `values` of the others.

        Args:
            directory: as for `save`.

        Returns:
            The saved `values`; {} if there is no checkpoint.

        Raises:
            LoopError: not all ranks call it.
            CheckpointError: the checkpoint does not fit this model or recipe.

        Example:
            >>> first_epoch = session.load(directory).get("epoch", 0)
        """
        if self._changes.handed_over:
            return dict(self._changes.saved_values)
        if self._synchronizer.in_step:
            self._synchronizer.meet_to_save(Presence.LOADING)  # LoopError on all ranks where some do not load
        self._step_hooks.manual_updates.forget()
        if (found := self._checkpoints.load(directory)) is None:
            return {}
        self._changes.refuse_loaded()
        if self._group.is_detached:  # the servers hold newer parameters and are not rolled back
            return dict(found.tree["mine"])
        self._parts.refuse_other_shards(found)
        with self._checkpoints.taking_up(directory, found) as put_back_parts:
            self.load_state_dict(*found.sessions)
            put_back_parts()
            here = self._parameters, self._stages.loop, self._synchronizer
            session_checkpoint.restart_resharded(found, *here, self._transport.rank)
        self._loaded_weights.forget()
        self._buffers.frozen.note()
        self._first_batch.hash = NO_BATCH  # the interrupted run compared first batches already
        return dict(found.tree["mine"])

    def _saved(self) -> dict[str, Stateful]:
        """Parts of a checkpoint other than the session's own, by name; all except the world are equal on all ranks."""
        parts = self._parts.saved(self.model, self.optimizer)
        return {**parts, "scaler": self._loop_scaler, "world": self._world}

    merged = former_attribute("session", "merged", "averaged_parameters")
    weight = former_attribute("session", "weight", "set_batch_weight")
    reset = former_attribute("session", "reset", "reset_compressor_state")

    def _close(self, how: events.Ended) -> None:
        with self._checkpoints.ended(how):
            if how == "finished":
                self._step_hooks.manual_updates.report_unsent()
            for hook in (*self._hooks, self._parts):
                hook.remove()
            self._metrics.finish()
            super()._close(how)

    def _held(self) -> Mapping[str, Tensor]:
        return lifecycle_events.held(self.model, self._parameters)

    def _compared(self, closed: events.Closed) -> events.Closed:
        if closed.tensors and (frozen := self._buffers.frozen.changed):
            closed = replace(closed, changed_frozen=frozen)
        return self._parts.whole(closed, self._transport, alone=self._trained_alone)
