"""Moments with periods of their own: what is averaged when, what it costs, and which optimizers have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.resumed_training import adamw, check_resume
from support.training_loops import LR, START, Trace, close, gradient, heard, mean_of, run, sgd
from support.virtual_workers import Worker, cluster, loss_of, network, parameters
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import ALIGN, DiLoCo, LocalSGD, MomentRounds
from gossamer.errors import AttachError, GossamerError
from gossamer.train.traffic.traffic import estimate_traffic

RATE, BETAS, EPSILON = 0.01, (0.9, 0.99), 1e-8


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), RATE, BETAS, EPSILON)


def moments(trace: Trace) -> tuple[Tensor, Tensor]:
    """Adam's, of all parameters side by side."""
    states = [trace.optimizer.state[parameter] for parameter in trace.model.parameters()]
    first, second = (torch.cat([s[key].flatten() for s in states]).clone() for key in ("exp_avg", "exp_avg_sq"))
    return first, second


# -- what is averaged when ---------------------------------------------------------------------------------------------


def by_hand(steps: int, periods: tuple[int, int | None, int | None], world: int = 3) -> list[list[Tensor]]:
    """Algorithm 1 of Iacob et al. 2026 with Adam in a few lines: each worker's parameters after each step."""
    xs, us, vs = ([start.clone() for _ in range(world)] for start in (START, 0 * START, 0 * START))
    paths: list[list[Tensor]] = []
    for step in range(1, steps + 1):
        for rank in range(world):
            g = gradient(xs[rank], step - 1, rank)
            us[rank] = BETAS[0] * us[rank] + (1 - BETAS[0]) * g
            vs[rank] = BETAS[1] * vs[rank] + (1 - BETAS[1]) * g * g
            scale = (vs[rank] / (1 - BETAS[1] ** step)).sqrt() + EPSILON
            xs[rank] = xs[rank] - RATE * us[rank] / (1 - BETAS[0] ** step) / scale
        for held, period in zip((xs, us, vs), periods, strict=True):
            if period is not None and step % period == 0:
                held[:] = [mean_of(held)] * world
        paths.append(list(xs))
    return paths


def check_by_hand(strategy: LocalSGD, periods: tuple[int, int | None, int | None]) -> None:
    traces = run(strategy, 14, rule=adam)
    for step, xs in enumerate(by_hand(14, periods)):
        for trace, x in zip(traces, xs, strict=True):
            close(trace.path[step], x)


@pytest.mark.parametrize("periods", [(2, 4, 6), (2, 6, 2), (3, 3, 9), (2, None, 4), (2, 6, None), (1, 3, 6)])
def test_local_adam_with_periods_by_hand(periods: tuple[int, int | None, int | None]) -> None:
    check_by_hand(LocalSGD(periods[0], first_moment_period=periods[1], second_moment_period=periods[2]), periods)


@pytest.mark.parametrize("others", [(2, 4, None), (2, 4, 4), (2, 4, 8), (2, None, 6), (2, 2, 6), (2, 6, 6), (2, 6, 4)])
def test_the_check_catches_other_periods(others: tuple[int, int | None, int | None]) -> None:
    """A second moment that is never averaged among them."""
    with pytest.raises(AssertionError, match="not close"):
        check_by_hand(LocalSGD(2, first_moment_period=4, second_moment_period=6), others)


def test_moments_are_alike_after_their_rounds_and_only_then() -> None:
    traces = run(LocalSGD(2, first_moment_period=4, second_moment_period=6), 12, rule=adam, note=moments)
    for place, period in enumerate((4, 6)):
        alike = [
            all(torch.equal(trace.notes[step][place], traces[0].notes[step][place]) for trace in traces)
            for step in range(12)
        ]
        assert alike == [(step + 1) % period == 0 for step in range(12)]


def test_fragments_take_their_own_moments_along() -> None:
    """Each in its turn: the first leaves after 2, 6, 10 steps, the second after 4, 8, 12."""
    traces = run(DiLoCo(4, fragments=2, first_moment_period=8), 13, rule=adam, note=moments)
    spread = [(traces[0].notes[step][0] - traces[1].notes[step][0]) == 0 for step in range(13)]
    share = [float(each.double().mean()) for each in spread]
    assert [step for step in range(13) if share[step] > 0] == [5, 7]
    assert share[5] + share[7] == 1.0
    assert not bool((spread[5] & spread[7]).any())


# -- where it is something else ----------------------------------------------------------------------------------------


def test_all_periods_one_with_momentum_is_synchronous() -> None:
    rule = sgd(momentum=0.9)
    theirs = run("EveryStep()", 8, rule=rule)[0]
    for trace in run(LocalSGD(1, first_moment_period=1), 8, rule=rule, note=buffers):
        for one, other in zip(trace.path, theirs.path, strict=True):
            close(one, other)
        close(trace.notes[-1], buffers(theirs))
    kept = run(LocalSGD(1), 8, rule=rule, note=buffers)[0]
    with pytest.raises(AssertionError, match="not close"):
        close(kept.notes[-1], buffers(theirs))


def buffers(trace: Trace) -> Tensor:
    held = [trace.optimizer.state[parameter]["momentum_buffer"] for parameter in trace.model.parameters()]
    return torch.cat([each.flatten() for each in held]).clone()


@dataclass(frozen=True)
class Pair:
    one: object
    other: object


@pytest.mark.parametrize(
    "pair",
    [
        Pair(
            LocalSGD(3, optimizer_state="average"),
            LocalSGD(3, first_moment_period=3, second_moment_period=3),
        ),
        Pair(
            DiLoCo(4, fragments=2, delay=1, optimizer_state="average"),
            DiLoCo(4, fragments=2, delay=1, first_moment_period=4, second_moment_period=4),
        ),
        Pair(
            LocalSGD(3, optimizer_state="average", second_moment_period=6),
            LocalSGD(3, first_moment_period=3, second_moment_period=6),
        ),
    ],
    ids=lambda pair: repr(pair.other),
)
def test_the_parameters_own_period_is_averaging_the_state_bit_for_bit(pair: Pair) -> None:
    one, other = (run(strategy, 11, rule=adam, note=moments) for strategy in (pair.one, pair.other))
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.path, b.path, strict=True))
        assert all(torch.equal(*both) for x, y in zip(a.notes, b.notes, strict=True) for both in zip(x, y, strict=True))


# -- bytes, and what is saved ------------------------------------------------------------------------------------------


def sent(recipe: str, steps: int, rule: Callable[[nn.Module], Optimizer]) -> tuple[list[float], events.Attached]:
    """Bytes of each step of a worker, on average."""
    with heard(events.StepEnded) as ended, heard(events.Attached) as attached:
        run(resolve(recipe, 3), steps, rule=rule, dtype=torch.float32)
    return [
        sum(event.bytes_sent for event in ended if event.step == step) / 3 for step in range(1, steps + 1)
    ], attached[0]


@pytest.mark.parametrize(
    ("recipe", "extra"),
    [
        ("LocalSGD(2, first_moment_period=4, second_moment_period=6)", [0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 2]),
        ("LocalSGD(2, optimizer_state='average', second_moment_period=6)", [0, 1, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2]),
        ("LocalSGD(2, second_moment='agreed')", [0, 1] * 6),
        ("LocalSGD(2, second_moment='amsgrad', second_moment_period=4)", [0, 0, 0, 1] * 3),
        ("DiLoCo(2, second_moment_period=4) + TopK(0.05)", [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]),
    ],
)
def test_bytes_are_those_of_the_moments_that_are_due(recipe: str, extra: list[int]) -> None:
    """A mean of N float32 costs a worker 2 (n-1)/n 4 N bytes, and the forecast is the mean over a cycle."""
    bare = recipe.partition("(")[0] + "(2)" + "".join(recipe.partition(" + ")[1:])
    measured, attached = sent(recipe, 12, adam)
    without, _ = sent(bare, 12, adam)
    moment = 2 * 2 / 3 * 4 * len(START)
    assert [a - b for a, b in zip(measured, without, strict=True)] == pytest.approx([moment * each for each in extra])
    told = estimate_traffic(resolve(recipe, 3), attached, workers=3)
    assert told.bytes_sent == pytest.approx(sum(measured) / 12, rel=1e-12)


@pytest.mark.parametrize(
    ("recipe", "after"),
    [
        ("LocalSGD(2, first_moment_period=4, second_moment_period=6) + Int8()", [3, 4, 7]),
        ("DiLoCo(3, delay=2, first_moment_period=6, second_moment_period=9)", [4, 7]),
    ],
)
def test_resumed_training_averages_moments_when_it_would_have(recipe: str, after: list[int]) -> None:
    check_resume(recipe, after)


def first_turn(session: Any) -> None:
    session["progress"]["turn"] += 1


def test_the_resume_check_catches_another_turn() -> None:
    with pytest.raises(AssertionError, match="another way"):
        check_resume("LocalSGD(2, first_moment_period=4)", [3], first_turn)


# -- refusals ----------------------------------------------------------------------------------------------------------


class Holding(Optimizer):
    """Two optimizers as one."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


FIRST = "LocalSGD(2, first_moment_period=4)"
SECOND = "LocalSGD(2, second_moment_period=4)"
REFUSED: list[tuple[str, Callable[[nn.Module], Optimizer], str]] = [
    (FIRST, lambda model: SGD(model.parameters(), 0.1), "SGD keeps no first moment, so there is"),
    (SECOND, sgd(momentum=0.9), "SGD keeps no second moment, but momentum_buffer, so"),
    (FIRST, lambda model: Adagrad(model.parameters(), 0.1), "Adagrad keeps sum"),
    (SECOND, lambda model: AdamW(model.parameters(), amsgrad=True), "AdamW keeps max_exp_avg_sq"),
    (FIRST, lambda model: Holding(SGD(model.parameters(), 0.1)), "Holding holds other optimizers"),
    ("LocalSGD(2, optimizer_state='average')", lambda model: Holding(SGD(model.parameters(), 0.1)), "require a step"),
]


@pytest.mark.parametrize(("recipe", "rule", "why"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_optimizers_without_such_moments_are_refused(
    recipe: str, rule: Callable[[nn.Module], Optimizer], why: str
) -> None:
    def work(worker: Worker) -> str:
        model = network(worker.rank)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(AttachError) as caught:
            worker.attach(model, rule(model), recipe)
        for parameter, was in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, was), "to find out what it keeps made a step"
        return str(caught.value)

    assert why in agree_on(cluster(work, 2))


def agree_on(said: list[str]) -> str:
    assert len(set(said)) == 1
    return said[0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"first_moment_period": 6}, "got 6. Write first_moment_period=8"),
        ({"second_moment_period": 2}, "got 2. Write second_moment_period=4"),
        ({"first_moment_period": 0}, "got 0. Write first_moment_period=4"),
        ({"first_moment_period": 4, "optimizer_state": "reset"}, "Omit one of them"),
        ({"optimizer_state": "mean"}, '"average" or "reset", got \'mean\''),
    ],
)
@pytest.mark.parametrize("strategy", [LocalSGD, DiLoCo])
def test_periods_that_do_not_fit_are_refused(strategy: type, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        strategy(4, **options)


def test_a_cycle_of_rounds() -> None:
    assert MomentRounds(first=3, second=6).cycle == 6
    assert MomentRounds(first=2, second=3).cycle == 6
    assert MomentRounds().cycle == 1
    assert not MomentRounds().any
    assert MomentRounds(others=1).any


# -- optimizer_state="align": after a merge each momentum is corrected by how the mean step differed from one's own

BETA, WORLD = 0.9, 3
B1, B2, EPS = 0.9, 0.98, 1e-8


def adam_gaps(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR, betas=(B1, B2), eps=EPS)


def momenta(trace: Trace, key: str = "momentum_buffer") -> Tensor:
    return torch.cat([trace.optimizer.state[p][key].flatten() for p in trace.model.parameters()]).clone()


def sgd_by_hand(period: int, steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    """(parameters, momentum) of each worker after each step."""
    agreed, xs, bs = START.clone(), [START.clone()] * WORLD, [torch.zeros_like(START)] * WORLD
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(WORLD)]
    for step in range(steps):
        bs = [BETA * b + gradient(x, step, rank) for rank, (b, x) in enumerate(zip(bs, xs, strict=True))]
        xs = [x - LR * b for x, b in zip(xs, bs, strict=True)]
        if (step + 1) % period == 0:
            mean = mean_of([agreed - x for x in xs])
            bs = [b + (mean - (agreed - x)) / (LR * period) for b, x in zip(bs, xs, strict=True)]
            agreed = agreed - mean
            xs = [agreed] * WORLD
        for rank in range(WORLD):
            found[rank].append((xs[rank], bs[rank]))
    return found


@pytest.mark.parametrize("period", [1, 3, 4])
def test_momentum_of_sgd_by_hand(period: int) -> None:
    traces = run(LocalSGD(period, optimizer_state=ALIGN), 10, rule=sgd(momentum=BETA), note=momenta)
    for trace, worker in zip(traces, sgd_by_hand(period, 10), strict=True):
        for x, b, (by_hand, moment) in zip(trace.path, trace.notes, worker, strict=True):
            close(x, by_hand)
            close(b, moment)


def test_a_period_of_one_with_momentum_is_synchronous_training() -> None:
    ours = run(LocalSGD(1, optimizer_state=ALIGN), 8, rule=sgd(momentum=BETA), note=momenta)
    theirs = run("EveryStep()", 8, rule=sgd(momentum=BETA), note=momenta)[0]
    for trace in ours:
        for x, other in zip([*trace.path, *trace.notes], [*theirs.path, *theirs.notes], strict=True):
            close(x, other)


@pytest.mark.parametrize("strategy", [LocalSGD(3, optimizer_state=ALIGN), DiLoCo(3, 1.0, 0.0, optimizer_state=ALIGN)])
def test_the_first_moment_of_adam_by_hand(strategy: LocalSGD | DiLoCo) -> None:
    """After the first merge; the second moment stays each worker's own."""
    note = {
        key: [t.notes for t in run(strategy, 3, rule=adam_gaps, note=lambda t, k=key: momenta(t, k))]
        for key in ("exp_avg", "exp_avg_sq")
    }
    ms, vs, xs = [torch.zeros_like(START)] * WORLD, [torch.zeros_like(START)] * WORLD, [START.clone()] * WORLD
    for step in range(3):
        gradients = [gradient(x, step, rank) for rank, x in enumerate(xs)]
        ms = [B1 * m + (1 - B1) * g for m, g in zip(ms, gradients, strict=True)]
        vs = [B2 * v + (1 - B2) * g * g for v, g in zip(vs, gradients, strict=True)]
        divisors = [(v / (1 - B2 ** (step + 1))).sqrt() + EPS for v in vs]
        xs = [x - LR * m / (1 - B1 ** (step + 1)) / d for x, m, d in zip(xs, ms, divisors, strict=True)]
    mean = mean_of([START - x for x in xs])
    for rank, (m, d, x) in enumerate(zip(ms, divisors, xs, strict=True)):
        close(note["exp_avg"][rank][-1], m + (mean - (START - x)) / (LR * 3) * (1 - B1**3) * d, 1e-9)
        close(note["exp_avg_sq"][rank][-1], vs[rank])


def test_fragments_divide_by_the_steps_since_their_own_last_round() -> None:
    """With two fragments in a period of 4 the first leaves after two steps."""
    strategy = DiLoCo(4, 1.0, 0.0, fragments=2, optimizer_state=ALIGN)
    kept = run(DiLoCo(4, 1.0, 0.0, fragments=2), 2, rule=sgd(momentum=BETA), note=momenta)
    aligned = run(strategy, 2, rule=sgd(momentum=BETA), note=momenta)
    alone = run("Silent()", 2, rule=sgd(momentum=BETA))
    displacements = [START - trace.path[-1] for trace in alone]
    for one, other, own in zip(aligned, kept, displacements, strict=True):
        difference, expected = one.notes[-1] - other.notes[-1], (mean_of(displacements) - own) / (LR * 2)
        moved = difference != 0
        assert 0 < moved.sum() < len(moved)
        close(difference[moved], expected[moved], 1e-9)


def test_aligned_moments_send_no_bytes() -> None:
    def sent(trace: Trace) -> float:
        return trace.session.stats.run.bytes_sent

    one, other = (
        run(f"LocalSGD(3, optimizer_state='{state}') + OneBit()", 6, rule=adam_gaps, note=sent)[0].notes[-1]
        for state in ("align", "keep")
    )
    assert one == other


def test_aligned_moments_stay_finite_if_all_steps_so_far_were_skipped() -> None:
    """A fused optimizer then has state that counts no step."""

    def work(worker: Worker) -> bool:
        model = network(0, torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        worker.attach(model, optimizer, "LocalSGD(period=2, optimizer_state='align')", scaler=scaler)
        for step in range(4):
            optimizer.zero_grad()
            overflows = worker.rank == 0 and step < 2
            scaler.scale(loss_of(model, step, worker.rank) * (float("inf") if overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return bool(parameters(model).isfinite().all())

    assert cluster(work, 2) == [True, True]


def test_aligned_moments_resume_bit_for_bit() -> None:
    check_resume("LocalSGD(3, optimizer_state='align') + OneBit()", [4, 6], rule=adamw)


@pytest.mark.parametrize(
    "rule",
    [sgd(), lambda model: torch.optim.RMSprop(model.parameters(), lr=LR)],
    ids=["SGD without momentum", "RMSprop"],
)
def test_optimizers_without_a_momentum_that_makes_the_step_are_refused(rule: Any) -> None:
    with pytest.raises(AttachError, match=r"align.*Leave optimizer_state out"):
        run(LocalSGD(2, optimizer_state=ALIGN), 1, rule=rule)


@pytest.mark.parametrize(
    "text",
    [
        "DiLoCo(4, delay=1, optimizer_state='align')",
        "DiLoCo(4, mix=0.5, optimizer_state='align')",
        "LocalSGD(4, first_moment_period=8, optimizer_state='align')",
        "LocalSGD(4, second_moment='agreed', optimizer_state='align')",
        "LocalSGD(4, optimizer_state='aline')",
    ],
)
def test_combinations_without_a_meaning_are_refused(text: str) -> None:
    with pytest.raises(GossamerError, match="optimizer_state"):
        run(text, 1, rule=adam_gaps)


def test_parameters_without_a_gradient_and_steps_of_length_zero_are_left_out() -> None:
    traces = run(LocalSGD(1, optimizer_state=ALIGN), 2, rule=sgd(lr=0.0, momentum=BETA), note=momenta)
    assert all(torch.isfinite(note).all() for trace in traces for note in trace.notes)
