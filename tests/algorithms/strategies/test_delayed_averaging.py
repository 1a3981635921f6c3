"""Delayed averaging: averages that land later, in the place of a worker's own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.training_loops import (
    LR,
    START,
    Trace,
    agree,
    close,
    gradient,
    heard,
    mean_of,
    owed_and_in_flight,
    run,
    sgd,
    spread,
    told,
)
from support.virtual_workers import Worker, cluster, network, parameters, train_step
from torch import Tensor, nn

from gossamer import events
from gossamer.algorithms.compressors import Compressor, TopK
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import DelayedAveraging, LocalSGD, Memory
from gossamer.errors import LoopError

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


# -- What delayed averaging merges where a compressor leaves something out, and how far behind it what was told lags

LOSSY = [
    "DelayedAveraging(0) + TopK(0.1)",
    "DelayedAveraging(3, period=2) + TopK(0.1)",
    "DelayedAveraging(2) + TopK(0.1, feedback=False)",
    "DelayedAveraging(2) + TernGrad()",
    "DelayedAveraging(1) + PowerSGD(1)",
]


def check_synchronous(traces: list[Trace]) -> None:
    """What is merged makes the step that the mean of all gradients makes, as if nothing had been left out."""
    before = START
    for step in range(len(traces[0].path)):
        merged = agree([trace.merged[step] for trace in traces])
        close(before - merged, LR * mean_of([trace.gradients[step] for trace in traces]))
        close(merged, mean_of([trace.path[step] for trace in traces]))
        before = merged


@pytest.mark.parametrize("recipe", LOSSY)
def test_what_is_merged_makes_the_steps_of_mean_gradients(recipe: str) -> None:
    check_synchronous(run(recipe, 9))


@dataclass(frozen=True, repr=False)
class Told(DelayedAveraging):
    """Merges what all were told."""

    def merges_own(self, compressor: Compressor) -> bool:
        return False


def test_the_check_catches_merging_only_what_all_were_told() -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_synchronous(run(Told(0) + TopK(density=0.1), 9))


def test_without_loss_nobody_must_come_to_merge() -> None:
    """What landed is merged, and nothing is sent for it."""

    def work(worker: Worker) -> Trace:
        trace = Trace(*worker.start(network(worker.rank), sgd(), "DelayedAveraging(2)"))
        for step in range(5):
            train_step(trace.model, trace.optimizer, step, worker.rank)
        if worker.rank == 1:
            trace.look()
        return trace

    _, trace, _ = cluster(work, 3)
    close(trace.merged[0], told(trace))


def test_merging_sends_one_uncompressed_mean_in_a_step() -> None:
    """However often it is asked for; and no later step is any different."""

    def work(worker: Worker, merges: int) -> Tensor:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), "DelayedAveraging(1) + TopK(0.1)")
        for step in range(4):
            train_step(model, optimizer, step, worker.rank)
            for _ in range(merges if step == 2 else 0):
                with session.averaged_parameters(model):
                    pass
        return parameters(model)

    sent, ends = [], []
    for merges in (0, 1, 2):
        with heard(events.StepEnded) as ended:
            ends.append(cluster(lambda worker, merges=merges: work(worker, merges), 3))
        sent.append([sum(event.bytes_sent for event in ended if event.step == step) / 3 for step in range(1, 5)])
    without, once, twice = sent
    assert once == twice
    assert [b - a for a, b in zip(without, once, strict=True)] == [0, 0, 0, 2 * 2 / 3 * 8 * len(START)]
    for ended_with, ended_without in zip(ends[2], ends[0], strict=True):
        assert torch.equal(ended_with, ended_without)


def test_the_end_merges_once_more() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), "DelayedAveraging(2) + TopK(0.1)")
        for step in range(5):
            train_step(model, optimizer, step, worker.rank)
        session.close()
        with session.averaged_parameters(model):
            merged = parameters(model)
        return parameters(model), merged

    with heard(events.Closed) as closed:
        results = cluster(work, 3)
    assert len({event.digest for event in closed}) == 1
    assert not any(event.holds_merged for event in closed)
    close(agree([merged for _, merged in results]), mean_of([own for own, _ in results]))


def test_merging_on_one_rank_while_others_train_is_an_error_on_all() -> None:
    def work(worker: Worker) -> str:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), "DelayedAveraging(1) + TopK(0.1)")
        try:
            for step in range(12):
                train_step(model, optimizer, step, worker.rank)
                if (step, worker.rank) == (5, 1):
                    with session.averaged_parameters(model):
                        pass
        except LoopError as error:
            return str(error)
        return "no error"

    for said in cluster(work, 3):
        assert "call session.averaged_parameters() on every rank" in said


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1)])
def test_other_workers_continue_from_the_mean_with_nothing_owed(old: int, new: int, tmp_path: Path) -> None:
    recipe = "DelayedAveraging(2) + TopK(0.1)"

    def write(worker: Worker) -> tuple[Tensor, Tensor]:
        trace = Trace(*worker.start(network(worker.rank), sgd(), recipe))
        for step in range(6):
            train_step(trace.model, trace.optimizer, step, worker.rank)
        trace.look()
        trace.session.save(tmp_path)
        return trace.merged[0], told(trace)

    def go_on(worker: Worker) -> tuple[Tensor, list[Tensor], Tensor]:
        model, optimizer, session = worker.start(network(worker.rank), sgd(), recipe)
        session.load(tmp_path)
        kept = session.state_dict()["state"].values()
        owed = [tensor for each in kept for key, tensor in each.items() if key.endswith("residual")]
        begun, owed = parameters(model), [tensor.clone() for tensor in owed]
        train_step(model, optimizer, 6, worker.rank)
        with session.averaged_parameters(model):
            return begun, owed, parameters(model)

    (merged, lagging), *_ = cluster(write, old)
    with heard(events.Noticed) as news:
        results = cluster(go_on, new)
    assert "parameters are the mean of those after the last round" in news[0].message
    for begun, owed, _ in results:
        close(begun, merged)
        assert len(owed) > 0 or new == 1
        assert not any(bool(each.any()) for each in owed)
    assert float((merged - lagging).norm()) > 1e-3, "what was told does not lag, so nothing was seen"
    agree([after for *_, after in results])


# -- the lag that is recorded ------------------------------------------------------------------------------------------

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
STEEP = [prime**0.5 for prime in PRIMES]  # no multiple of one is a multiple of another: there are no ties


def lags(recipe: str, steps: int) -> list[tuple[int, float]]:
    """(step, lag) of one worker of two; every step moves the entries by STEEP."""

    def work(worker: Worker) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker.attach(model, optimizer, resolve(recipe))
        slope = torch.tensor(STEEP, dtype=torch.float64).view(4, 4)
        for _ in range(steps):
            optimizer.zero_grad()
            (model[0] * slope).sum().backward()
            optimizer.step()

    with heard(events.Logged) as logged:
        cluster(work, 2)
    both = sorted((event.step, event.values["lag"]) for event in logged)
    assert both[::2] == both[1::2], "the workers are alike"
    return both[::2]


def norm(numbers: list[float]) -> float:
    return sum(number**2 for number in numbers) ** 0.5


def by_hand(rounds: int, factor: int, times: Callable[[int], int]) -> list[float]:
    """TopK(0.25) of entries that grow by `factor` times STEEP in a round: four are sent, twelve are owed."""
    owed, found = [0.0] * 16, []
    for _ in range(rounds):
        wanted = [left + factor * slope for left, slope in zip(owed, STEEP, strict=True)]
        sent = sorted(range(16), key=lambda i: wanted[i])[-4:]
        owed = [0.0 if i in sent else each for i, each in enumerate(wanted)]
        found.append(norm(owed) / norm([factor * slope for slope in STEEP]))
    return [each for number, each in enumerate(found, 1) if number % times(factor) == 0]


@pytest.mark.parametrize(
    ("recipe", "steps", "expected"),
    [
        ("LocalSGD(16) + Route(Feedback(TopK(0.25)), smallest=1)", 48, by_hand(3, 16, lambda _: 1)),
        ("LocalSGD(1) + Route(Feedback(TopK(0.25)), smallest=1)", 40, by_hand(40, 1, lambda _: 16)),
        ("LocalSGD(5) + Route(Feedback(TopK(0.25)), smallest=1)", 40, by_hand(8, 5, lambda _: 3)),
    ],
)
def test_what_is_owed_is_recorded_in_periods_now_and_then(recipe: str, steps: int, expected: list[float]) -> None:
    found = lags(recipe, steps)
    assert [lag for _, lag in found] == pytest.approx(expected, rel=1e-12)
    assert all(later - earlier >= 15 for (earlier, _), (later, _) in pairwise(found))


@pytest.mark.parametrize(
    "recipe",
    [
        "LocalSGD(16)",
        "LocalSGD(16) + Route(TernGrad(), smallest=1)",
        "EveryStep() + Route(Feedback(TopK(0.25)), smallest=1)",
        "EveryStep(delay=1) + Route(Feedback(TopK(0.25)), smallest=1)",
    ],
)
def test_where_nothing_is_owed_or_all_are_in_step_none_is(recipe: str) -> None:
    assert lags(recipe, 32) == []
