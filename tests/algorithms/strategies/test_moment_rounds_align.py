"""optimizer_state="align": after a merge each momentum is corrected by how the mean step differed from one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.resumed_training import adamw, check_resume
from support.training_loops import LR, START, Trace, close, gradient, mean_of, run, sgd
from torch import Tensor

from gossamer.algorithms.strategies import ALIGN, DiLoCo, LocalSGD
from gossamer.errors import AttachError, GossamerError

BETA, WORLD = 0.9, 3
B1, B2, EPS = 0.9, 0.98, 1e-8


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
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
        key: [t.notes for t in run(strategy, 3, rule=adam, note=lambda t, k=key: momenta(t, k))]
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
        run(f"LocalSGD(3, optimizer_state='{state}') + OneBit()", 6, rule=adam, note=sent)[0].notes[-1]
        for state in ("align", "keep")
    )
    assert one == other


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
        run(text, 1, rule=adam)


def test_parameters_without_a_gradient_and_steps_of_length_zero_are_left_out() -> None:
    traces = run(LocalSGD(1, optimizer_state=ALIGN), 2, rule=sgd(lr=0.0, momentum=BETA), note=momenta)
    assert all(torch.isfinite(note).all() for trace in traces for note in trace.notes)
