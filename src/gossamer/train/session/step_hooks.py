"""Step hooks: torch's hooks around every optimizer step of the training loop, in front of one session."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.ops import AllGather, CollectiveOp
from gossamer.base.torch_hooks import OPTIMIZER_STEP, Subscription
from gossamer.base.transport import Transport
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.errors import LoopError
from gossamer.train.engine.autograd_hooks import refuse_capture
from gossamer.train.engine.extension import Extensions, GradientUse
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.moments.take_over import share_second_moment, take_over
from gossamer.train.moments.transfer import MomentumTransfer
from gossamer.train.session import step_spans
from gossamer.train.session.clipping_and_nonfinite import GradientClip, StepGuards
from gossamer.train.session.foreign_optimizers import (
    ForeignOptimizerGuard,
    ManualUpdates,
    WeakParameters,
)
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.loop_scaler import LoopScaler, refuse_late, scaler_of_parts, show_overflow
from gossamer.train.session.model_watch import ModelWatch
from gossamer.train.session.pending_gradients import PendingGradients
from gossamer.train.session.session_base import SessionBase
from gossamer.train.session.tracked_parts import TrackedParts
from gossamer.train.sharding.local_shards import LocalShards, WholeParameters
from gossamer.train.synchronizers.base import SoloSynchronizer

Closure = Callable[[], Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a call


class StepHooks:
    """One session's hooks of its optimizer, of all others, and of the loop's GradScaler."""

    def __init__(
        self,
        session: SessionBase,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        tracked: TrackedParts,
        guards: StepGuards,
        extensions: Extensions,
    ) -> None:
        self._session, self._model, self._optimizer, self._recipe = session, model, optimizer, recipe
        self._tracked, self._guards, self._extensions = tracked, guards, extensions
        self._clip = GradientClip(guards.clip_norm, lambda: self.loop_scaler.scale(), guards.total_norm)
        if guards.clip_norm is not None:
            extensions.add(self._clip)
        self.watch = ModelWatch(model)
        self._stepping = False  # whether the attached optimizer is within its step
        self.momentum: MomentumTransfer | None = None
        self._attached_before = WeakParameters()  # all that were attached at some time
        self.pending_gradients = PendingGradients(extensions)
        self.manual_updates = ManualUpdates(
            model, optimizer, lambda: self._recipe, lambda: session._synchronizer.use(), extensions
        )
        self.loop_scaler = LoopScaler(guards.scaler, optimizer, self._step_skipped, self._take_up_scaler)

    def adopt(self, views: WholeParameters, transport: Transport) -> None:
        """From now on these are the attached parameters. Raises AttachError where the compressor cannot have their
        momentum."""
        self._views, self._parameters = views, views.parameters
        if isinstance(views, LocalShards):
            self._extensions.add(views)
        self._attached_before.add(*views.own.values())
        self.manual_updates.forget()
        self.watch.remove()
        self.watch = ModelWatch(self._model)
        self._guard(transport)

    def _guard(self, transport: Transport) -> None:
        self._foreign_guard = ForeignOptimizerGuard(
            self._model, self._optimizer, self._recipe, self._views.own, self.watch, self._attached_before,
            gives_notice=transport.rank == 0,
        )  # fmt: skip
        compressor, norm = self._recipe.compressor, self._clip.norm
        self._restore_groups()
        shared = share_second_moment(self._optimizer, self._recipe.strategy, self._parameters, transport)
        self.momentum = shared or take_over(self._optimizer, compressor, self._parameters, transport, norm)

    def not_optimized(self) -> list[Parameter]:
        """The attached parameters that the attached optimizer does not have."""
        held = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        return [each for name, each in self._parameters.items() if id(self._views.own[name]) not in held]

    def switch(self, recipe: Recipe, transport: Transport) -> None:
        """The same parameters are attached under another recipe."""
        self._recipe = recipe
        self._guard(transport)

    def refuse_gained(self, *, searches: bool = True) -> None:
        """Raise LoopError where the model has trainable parameters that were not there at attach. searches: also where
        nothing has marked the model as changed. FSDP2 itself puts other parameters into a model and takes them out."""
        if (searches or self.watch.changed) and not self._views.sharded:
            self._foreign_guard.refuse_gained()

    def remove(self) -> None:
        """Stop watching the model."""
        self._restore_groups()
        self.watch.remove()
        self.manual_updates.remove()

    def install(
        self, group: GroupCalls, check: ParameterCheck
    ) -> Iterator[RemovableHandle | Subscription | LoopScaler | StepHooks]:
        """Install all hooks; yields handles for their removal. To be exhausted."""
        self._group, self._alone, self._pid = group, group.alone, group.pid  # a forked child has no part in the group
        if check.looks and not group.alone:
            self._extensions.add(check)
        yield from step_spans.hooks(self._model, self._optimizer, self._before_step, self._after_step)
        self._worker = current_worker()  # other workers of a simulation are threads of the same process
        yield OPTIMIZER_STEP.subscribe(self._before_foreign_step)
        yield self._optimizer.register_state_dict_pre_hook(self._restore_groups)
        yield self
        yield self.loop_scaler.install(gives_notice=group.transport.rank == 0)

    def _before_foreign_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Any optimizer is about to make its step."""
        if optimizer is self._optimizer or self._worker is not current_worker():
            return
        self._tracked.see(optimizer)
        if os.getpid() != self._pid:
            return
        synchronizer = self._session._synchronizer
        if not self._alone:
            if torch._C._current_graph_task_id() != -1 and self._foreign_guard.shares(optimizer):
                raise _within_backward(optimizer)
            if not self._stepping:
                self._foreign_guard.refuse_inner(optimizer)
            self._foreign_guard.check(optimizer, local=self._session._muted_at == synchronizer.passes)
        if self._foreign_guard.shares(optimizer):
            self.refuse_gained(searches=False)
            self.manual_updates.remove()
            synchronizer.use()
            for act in self._extensions.before_step:
                act(GradientUse(optimizer, self._parameters, _has_closure(args, kwargs), attached=False))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The attached optimizer is about to make its step. Returns other arguments, or None to keep them."""
        if os.getpid() != self._pid:
            return None
        self._stepping = True
        synchronizer, closure = self._session._synchronizer, _has_closure(args, kwargs)
        for begin in self._extensions.pass_began:
            begin()
        if not self._alone:
            refuse_capture("optimizer.step()")
            if torch._C._current_graph_task_id() != -1:
                raise _within_backward(optimizer)
        if self.watch.changed:
            self.refuse_gained(searches=False)
        self._foreign_guard.refuse_unaveraged(optimizer)
        for prepare in self._extensions.before_exchange:
            prepare(synchronizer.step)
        synchronizer.before_step(closure=closure)
        for act in self._extensions.before_step:
            act(GradientUse(optimizer, self._parameters, closure))
        if self.momentum is not None:  # may move parameters between groups
            touched = self.loop_scaler.scaler is None and synchronizer.touched
            self.momentum.before(synchronizer.step, closure=closure, touched=touched)
        return _with_closure(args, kwargs, self._averaging) if closure and self._averages_losses else None

    # -- the loss that a closure returns -----------------------------------------------------------------------------

    @property
    def _averages_losses(self) -> bool:
        """Whether the optimizer decides by the loss when its step ends. By local losses, ranks would decide differently
        and make different numbers of passes."""
        session = self._session
        averages = session._synchronizer.in_step and not session._stages.now.local_parameters
        return isinstance(self._optimizer, LBFGS) and averages and not self._alone

    def _averaging(self, closure: Closure) -> Closure:
        """The closure with the mean loss of all ranks, in the weights of their gradients."""

        def averaged() -> Any:
            loss = closure()
            if loss is None:
                return None
            own = loss.detach() if isinstance(loss, Tensor) else loss
            mean = self._mean_loss(float(own), self._session._synchronizer.controls.weight)
            return torch.full_like(own, mean) if isinstance(own, Tensor) else mean

        return averaged

    def join_loss(self) -> None:
        """Called on a rank that is out of data, after each pass of the others."""
        if self._averages_losses:
            self._mean_loss(0.0, 0.0)

    def _mean_loss(self, loss: float, weight: float) -> float:
        own = torch.tensor([weight * loss if weight else 0.0, weight], dtype=torch.float64, device="cpu")

        def script() -> Generator[CollectiveOp, Any, Tensor]:
            received = yield AllGather((own,))
            return torch.stack([each.cpu() for (each,) in received]).sum(0)

        total, weights = self._group.run(script).tolist()
        return float(total / weights) if weights else 0.0

    # -- after the step ----------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            return
        self._stepping = False
        if self.momentum is not None:
            self.momentum.after()
        self._session._synchronizer.after_step()
        self._session._step_over()

    def _restore_groups(self, *_: Any) -> None:
        """End the temporary groups of a step, also of one that failed."""
        if self.momentum is not None:
            self.momentum.after()

    def _step_skipped(self) -> None:
        """The scaler has left out the optimizer's step, for which the optimizer calls no hook."""
        if os.getpid() == self._pid:
            for begin in self._extensions.pass_began:
                begin()
            self.manual_updates.remove()
            self._session._synchronizer.step_skipped()
            self._session._step_over()

    def _take_up_scaler(self, optimizer: Optimizer) -> bool:
        if os.getpid() != self._pid or not (optimizer is self._optimizer or self._foreign_guard.shares(optimizer)):
            return False
        if isinstance(self._session._synchronizer, SoloSynchronizer):
            return True
        if self._guards.total_norm is not None:
            raise scaler_of_parts()
        refuse_late(self._recipe, self._session._stages.now, self._session._synchronizer.buckets)
        show_overflow(self._parameters.values())
        return True


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an optimizer's step was called with a closure. args: as passed to hooks, the optimizer first."""
    if len(args) == 1 and not kwargs:
        return False
    return any(value is not None for value in (*args[1:], *kwargs.values()))


def _with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Closure], Closure]) -> Call:
    """The arguments of an optimizer's step with a changed closure. args: as passed to hooks, the optimizer first."""
    if len(args) > 1:
        return (args[0], change(args[1]), *args[2:]), kwargs
    return args, {**kwargs, "closure": change(kwargs["closure"])}


def _within_backward(optimizer: Optimizer) -> LoopError:
    """A hook of the loop steps an optimizer before gradients are averaged."""
    return LoopError(
        f"{type(optimizer).__name__} makes a step within backward(), by a hook, before gradients are averaged, so the "
        "ranks would diverge. Remove the hook, attach one optimizer of all parameters, and call optimizer.step() after "
        "loss.backward() has returned."
    )
