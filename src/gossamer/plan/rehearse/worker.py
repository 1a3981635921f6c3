"""Rehearsal worker, run as `gossamer run plan/rehearse/worker.py SHAPES.json --step-seconds S ...`.

Its model sleeps instead of computing, and returns prepared gradients at the scheduled times.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from gossamer import attach, events
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.plan.rehearse.model_shapes import Gradient, from_file
from gossamer.train.engine.parameter_views import trainable
from gossamer.train.moments.take_over import ownership
from gossamer.world import init

VARIANTS = 4  # period of a gradient in steps
SPREAD = 2**20  # entries; gradients begin at random offsets below it in the pool
ALIGNMENT = 16  # entries


class SimulatedModel(nn.Module):
    """Parameters of the given shapes; one step, forward and backward, takes `step_seconds` and almost no CPU time.

    It returns a loss of zero. Times count from the begin of the step, so that a sleep that was too long is compensated
    by the next one. Gradients are heavy-tailed and differ by tensor, step and seed: pieces of one pool, at no cost.
    """

    def __init__(
        self, gradients: Sequence[Gradient], *, step_seconds: float, forward_share: float, seed: int = 0
    ) -> None:
        super().__init__()
        self.step_seconds, self.forward_seconds = step_seconds, step_seconds * forward_share
        self.late_seconds = 0.0
        self._steps, self._spent_seconds = 0, 0.0
        generator = torch.Generator().manual_seed(seed)
        pool = heavy_tailed(max(gradient.numel for gradient in gradients) + SPREAD, generator)
        for gradient in gradients:
            self.register_parameter(key(gradient.name), nn.Parameter(torch.zeros(gradient.shape)))
        later_first = sorted(gradients, key=lambda gradient: -gradient.share)
        self._groups = [
            GradientGroup([self.get_parameter(key(gradient.name)) for gradient in together], share, pool, generator)
            for share, together in ((share, list(group)) for share, group in groupby(later_first, lambda g: g.share))
        ]

    def spend(self, seconds: float) -> None:
        """Sleep less in the next step, by the seconds that have already passed."""
        self._spent_seconds += seconds

    def forward(self) -> Tensor:
        began, self._spent_seconds = time.perf_counter() - self._spent_seconds, 0.0
        self._steps += 1
        backward_begins, backward_seconds = began + self.forward_seconds, self.step_seconds - self.forward_seconds
        loss = torch.zeros(())
        for group in self._groups:
            appear = partial(
                self._appear, backward_begins + group.share * backward_seconds, group, self._steps % VARIANTS
            )
            loss = _Appear.apply(loss, appear, *group.parameters)  # type: ignore[no-untyped-call]
        sleep_until(backward_begins)
        return loss

    def _appear(self, moment: float, group: GradientGroup, variant: int) -> Iterator[Tensor]:
        sleep_until(moment)
        self.late_seconds = time.perf_counter() - moment
        return group.gradients(variant)


class GradientGroup:
    """Gradients that are ready at the same time: after `share` of the backward pass."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], share: float, pool: Tensor, generator: torch.Generator
    ) -> None:
        self.parameters, self.share = parameters, share
        self._variants = [[_piece(pool, parameter, generator) for parameter in parameters] for _ in range(VARIANTS)]

    def gradients(self, variant: int) -> Iterator[Tensor]:
        """New tensors on the same memory: autograd keeps these, but would copy tensors with other references."""
        return (piece.detach() for piece in self._variants[variant])


class _Appear(torch.autograd.Function):
    """Identity in forward; backward sleeps until its group's time, then returns the group's gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, appear: Callable[[], Iterator[Tensor]], *parameters: Tensor) -> Tensor:
        ctx.appear = appear
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *gradients, None, *ctx.appear()


class Idle(Optimizer):
    """An optimizer that does nothing: the time of the real one is part of the step's seconds."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


class IdleSGD(SGD):
    """SGD that does nothing, with momentum for a compressor to take over."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


class StillAdam(Adam):
    """Adam with learning rate 0: it computes the variance for a compressor, and does not move parameters."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)


class Drifting(Optimizer):
    """Moves parameters by their gradients once in `every` steps, so that there are differences to average.

    The model sleeps less to compensate. averaged: keeps momenta as Adam does, which stay zero.
    """

    def __init__(self, model: SimulatedModel, every: int, *, averaged: bool) -> None:
        self._model, self._every, self._averaged, self._steps = model, every, averaged, 0
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        began = time.perf_counter()
        parameters = self.param_groups[0]["params"]
        for parameter in parameters if self._averaged else ():
            if not self.state[parameter]:
                self.state[parameter] = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        if self._steps % self._every == 0:
            torch._foreach_sub_(parameters, [parameter.grad for parameter in parameters])
        self._steps += 1
        self._model.spend(time.perf_counter() - began)


IDLE: dict[type[Optimizer], Callable[[Iterator[nn.Parameter]], Optimizer]] = {SGD: IdleSGD, Adam: StillAdam}


def idle(model: SimulatedModel, recipe: Recipe) -> Optimizer:
    """The cheapest optimizer that suits the recipe."""
    stage = recipe.strategy.steady_stage
    if recipe.strategy.ownership is not None:  # it moves parameters, so that there are differences to average
        return Adam(model.parameters())
    if stage.local_parameters:
        return Drifting(model, stage.schedule.period, averaged=stage.averages_optimizer_state)
    for owner in ownership(recipe.compressor, trainable(model)).values():
        return IDLE[owner.optimizers[0]](model.parameters())
    return Idle(model.parameters())


def key(name: str) -> str:
    """Parameter name for a module, which does not allow dots."""
    return name.replace(".", "/")


def heavy_tailed(count: int, generator: torch.Generator) -> Tensor:
    """Cubes of normal numbers: (count,). The largest 1 % have almost half of their energy."""
    return torch.randn(count, generator=generator).pow_(3)


def _piece(pool: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    begin = ALIGNMENT * int(torch.randint(SPREAD // ALIGNMENT, (), generator=generator))
    return pool[begin : begin + like.numel()].view(like.shape)


def sleep_until(moment: float) -> None:
    """Sleep until time.perf_counter() is `moment`; not at all if it has passed."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


# -- the script --------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> None:
    world = init()
    gradients = from_file(args.shapes).gradients
    model = SimulatedModel(gradients, step_seconds=args.step_seconds, forward_share=args.forward_share, seed=world.rank)
    recipe = resolve(os.environ.get("GOSSAMER_RECIPE"), world.size)
    optimizer = idle(model, recipe)
    late, sent = 0.0, SentBytes(recipe.strategy.steady_stage.schedule.delay)
    events.subscribe(sent)
    with attach(model, optimizer) as session:
        began = time.process_time()
        for _ in range(args.steps):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            late += model.late_seconds
        spent = time.process_time() - began
        session.log(
            processor_seconds_per_step=spent / args.steps,
            late_seconds_per_step=late / args.steps,
            bytes_sent_per_step=sent.bytes_per_step,
        )


class SentBytes:
    """Listener that averages the bytes of steps over the last whole periods, after rounds in flight have landed."""

    def __init__(self, delay: int) -> None:
        self._delay, self._period = delay, 1
        self._steps: list[float] = []

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Attached):
            self._period = event.period
        elif isinstance(event, events.StepEnded):
            self._steps.append(event.bytes_sent)

    @property
    def bytes_per_step(self) -> float:
        periods = max(1, (len(self._steps) - self._delay) // self._period)
        return fmean(self._steps[-periods * self._period :])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="One worker of a rehearsal.")
    options.add_argument("shapes", type=Path)
    options.add_argument("--step-seconds", type=float, required=True)
    options.add_argument("--forward-share", type=float, required=True)
    options.add_argument("--steps", type=int, required=True)
    main(options.parse_args())
