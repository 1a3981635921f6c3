"""Delayed averaging: averages that land later, in the place of a worker's own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from support.training_loops import (
    LR,
    START,
    Trace,
    agree,
    close,
    gradient,
    mean_of,
    owed_and_in_flight,
    run,
    sgd,
    spread,
    told,
)
from torch import Tensor

from gossamer.algorithms.compressors import TopK
from gossamer.algorithms.strategies import DelayedAveraging, LocalSGD, Memory

Rates = Callable[[int], float]
Lists = Sequence[Sequence[Tensor]]  # by worker and step


def constant(step: int) -> float:
    return LR


def falling(step: int) -> float:
    return LR * 0.7**step


def test_without_delay_it_is_synchronous() -> None:
    theirs = run("EveryStep()", 8)[0]
    for trace in run(DelayedAveraging(delay=0), 8):
        for one, merged, other in zip(trace.path, trace.merged, theirs.path, strict=True):
            close(one, other)
            close(merged, other)
    with pytest.raises(AssertionError):
        close(run(DelayedAveraging(delay=1), 8)[0].path[-1], theirs.path[-1])


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_without_delay_and_with_a_period_it_is_local_sgd(options: dict[str, float]) -> None:
    local = run(LocalSGD(3), 8, rule=sgd(**options))
    for trace, other in zip(run(DelayedAveraging(delay=0, period=3), 8, rule=sgd(**options)), local, strict=True):
        for a, b in zip(trace.path, other.path, strict=True):
            close(a, b)


# -- the closed form --------------------------------------------------------------------------------------------------


def check_closed_form(paths: Lists, gradients: Lists, rates: Rates, delay: int, period: int = 1) -> None:
    """w_i = w_0 - (landed mean gradients + own gradients in flight), each times the rate of the step that used it."""
    for made in range(1, len(paths[0]) + 1):
        landed = max(0, (made - delay) // period * period)
        together = START.clone()
        for step in range(landed):
            together -= rates(step) * mean_of([own[step] for own in gradients])
        for path, own in zip(paths, gradients, strict=True):
            close(path[made - 1], together - sum(rates(step) * own[step] for step in range(landed, made)))


def traced(strategy: DelayedAveraging, rates: Rates, steps: int = 11) -> tuple[Lists, Lists]:
    traces = run(strategy, steps, rates=rates)
    return [trace.path for trace in traces], [trace.gradients for trace in traces]


@pytest.mark.parametrize("rates", [constant, falling])
@pytest.mark.parametrize(("delay", "period"), [(0, 1), (1, 1), (4, 1), (3, 2), (1, 4)])
def test_landed_means_and_own_gradients_in_flight(delay: int, period: int, rates: Rates) -> None:
    check_closed_form(*traced(DelayedAveraging(delay=delay, period=period), rates), rates, delay, period)


def corrected_by_gradients(
    rates: Rates, delay: int, rate_of: Callable[[int, int], int], steps: int = 11
) -> tuple[Lists, Lists]:
    """Takes gradients back times the learning rate of rate_of(step that used them, step that lands them)."""
    xs = [START.clone() for _ in range(3)]
    paths: list[list[Tensor]] = [[], [], []]
    gradients: list[list[Tensor]] = [[], [], []]
    for step in range(steps):
        for rank in range(3):
            gradients[rank].append(gradient(xs[rank], step, rank))
            xs[rank] = xs[rank] - rates(step) * gradients[rank][step]
        if step >= delay:
            sent = step - delay
            mean = mean_of([own[sent] for own in gradients])
            xs = [x - rates(rate_of(sent, step)) * (mean - own[sent]) for x, own in zip(xs, gradients, strict=True)]
        for rank in range(3):
            paths[rank].append(xs[rank])
    return paths, gradients


def test_the_closed_form_catches_the_learning_rate_of_the_landing() -> None:
    check_closed_form(*corrected_by_gradients(falling, 3, lambda sent, landing: sent), falling, 3)
    check_closed_form(*corrected_by_gradients(constant, 3, lambda sent, landing: landing), constant, 3)
    with pytest.raises(AssertionError, match="not close"):
        check_closed_form(*corrected_by_gradients(falling, 3, lambda sent, landing: landing), falling, 3)


def test_the_mean_over_workers_makes_synchronous_steps() -> None:
    paths, gradients = traced(DelayedAveraging(delay=3, period=2), falling)
    before = START
    for step, xs in enumerate(zip(*paths, strict=True)):
        close(before - mean_of(xs), falling(step) * mean_of([own[step] for own in gradients]))
        before = mean_of(xs)
        assert spread(xs) > 0


# -- conservation -----------------------------------------------------------------------------------------------------


def told_and_kept(trace: Trace) -> tuple[Tensor, Tensor]:
    return told(trace).clone(), owed_and_in_flight(trace)


def check_conserved(recipe: object, **options: object) -> None:
    traces = run(recipe, 9, note=told_and_kept, **options)
    for step in range(9):
        agreed = agree([trace.notes[step][0] for trace in traces])
        for trace in traces:
            close(trace.path[step], agreed - trace.notes[step][1])
    assert any(bool(trace.notes[-1][1].any()) for trace in traces)


ADAM = {"rule": lambda model: torch.optim.Adam(model.parameters(), 0.01)}


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("DelayedAveraging(0) + TopK(0.2)", {}),
        ("DelayedAveraging(2) + TopK(0.1)", {}),
        ("DelayedAveraging(2) + Int8()", {}),
        ("DelayedAveraging(3)", ADAM),
        ("DelayedAveraging(1) + TopK(0.2)", ADAM),
        ("DelayedAveraging(2) + PowerSGD(2)", ADAM),
    ],
    ids=lambda value: value if isinstance(value, str) else "Adam" if value else "SGD",
)
def test_what_was_not_agreed_upon_is_in_flight_or_owed(recipe: str, options: dict[str, object]) -> None:
    check_conserved(recipe, **options)


@dataclass(frozen=True, repr=False)
class Meant(DelayedAveraging):
    """Takes back what it meant to send, though only a part of it was sent."""

    def offer(self, parameters: Tensor, memory: Memory) -> None:
        super().offer(parameters, memory)
        memory["meant"] = parameters.clone()

    def land(self, parameters: Tensor, memory: Memory, mean: Tensor, own: Tensor | None) -> None:
        super().land(parameters, memory, mean, memory["meant"].clone())


def test_the_check_catches_taking_back_what_was_only_meant() -> None:
    check_conserved(DelayedAveraging(0) + TopK(density=0.2))
    with pytest.raises(AssertionError, match="not close"):
        check_conserved(Meant(0) + TopK(density=0.2))


def test_with_adam_it_is_what_adam_did_that_is_averaged() -> None:
    """And not its gradients, by which Adam's steps could not be taken back."""
    zero, local = run(DelayedAveraging(0), 8, **ADAM), run(LocalSGD(1), 8, **ADAM)
    for trace, other in zip(zero, local, strict=True):
        close(trace.path[-1], other.path[-1])
    paths, gradients = ([getattr(t, part) for t in zero] for part in ("path", "gradients"))
    with pytest.raises(AssertionError, match="not close"):
        check_closed_form(paths, gradients, lambda step: 0.01, 0)
