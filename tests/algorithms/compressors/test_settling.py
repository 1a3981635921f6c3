"""A warm-up without a number of steps: it goes on where what waits has stopped growing, on all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group
from support.aggregations import priced
from support.resumed_training import check_resume
from torch import Tensor

from gossamer.algorithms.compressors import (
    Chain,
    Compressor,
    Feedback,
    Int8,
    OneBit,
    PowerSGD,
    SparseSum,
    TopK,
    Warmup,
    settling,
)
from gossamer.algorithms.compressors import base as compressors_base
from gossamer.algorithms.compressors import warmup as warmup_module
from gossamer.algorithms.compressors.base import aggregate_finite
from gossamer.algorithms.compressors.feedback_rules import RESIDUAL
from gossamer.algorithms.compressors.settling import SETTLED, WarmupProgress, blank
from gossamer.algorithms.compressors.topk import densities
from gossamer.base.aggregation import FORM, State
from gossamer.base.layout import FlatTensors
from gossamer.base.runner import simulate
from gossamer.errors import MalformedError

WARM = Feedback(Warmup(TopK(density=0.05)))  # 0.25, 0.0625, 0.05


def stage_of(state: State) -> int:
    return int(WarmupProgress.read(state[FORM]).stage)


# -- the rule ----------------------------------------------------------------------------------------------------------


def ends_after(ratio: Callable[[int], float], given: Callable[[int], float] = lambda step: 3.0) -> int | None:
    """The number of steps of the first stage, of at most 500."""
    progress = WarmupProgress()
    for step in range(1, 501):
        progress = progress.updated(ratio(step) * given(step), given(step))
        if progress.stage:
            assert progress == WarmupProgress(stage=1)
            return step
    return None


ENDINGS: list[tuple[Callable[[int], float], int | None]] = [
    (lambda step: step, None),  # as much more waits in every step
    (lambda step: step**2, None),
    (lambda step: 5.0, 2),
    (lambda step: 1 / step, 2),
    (lambda step: 1 - exp(-step / 3), 15),
    (lambda step: 1 - exp(-step / 30), 174),  # a tenth as fast, ten times as late
    (lambda step: min(step, 10), 27),
]


def check_endings() -> None:
    assert [ends_after(ratio) for ratio, _ in ENDINGS] == [end for _, end in ENDINGS]


def test_a_stage_ends_where_what_waits_has_stopped_growing() -> None:
    check_endings()


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.5])
def test_another_limit_is_found(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "SETTLED", limit)
    with pytest.raises(AssertionError):
        check_endings()


def test_gradients_that_shrink_do_not_look_like_growth() -> None:
    """The mean of the stage is of energies, not of ratios: what is no longer given weighs little."""
    assert ends_after(lambda step: 2.0, lambda step: 0.9**step) == 2
    assert ends_after(lambda step: step, lambda step: 0.9**step) is None


def test_a_step_without_gradients_is_no_news() -> None:
    begun = WarmupProgress().updated(1.0, 2.0)
    assert begun.updated(5.0, 0.0) == begun
    assert WarmupProgress().updated(0.0, 0.0) == WarmupProgress()


def test_the_newest_record_counts() -> None:
    """Of a tensor that was reset, or that nobody used, it is an older one."""
    kept = blank(("a", "b", "c"))
    newest = WarmupProgress(1.0, 3.0, 7.0, 5.0, 2.0, 1.0)
    for name, record in (("b", newest), ("c", WarmupProgress(0.0, 9.0, 8.0, 8.0, 8.0, 8.0))):
        kept[name].copy_(torch.tensor(record))
    assert WarmupProgress.read(kept) == newest
    assert WarmupProgress.read(newest.written(kept.layout)) == newest


def test_densities_are_those_of_the_paper() -> None:
    assert densities(0.001) == (0.25, 0.0625, 0.015625, 0.00390625)
    assert densities(0.25) == densities(0.5) == ()
    inner = Chain(TopK(density=0.05), Int8())
    assert [each.first.density for each in inner.denser()] == [0.25, 0.0625]
    assert [each.inner.density for each in SparseSum(TopK(density=0.1)).denser()] == [0.25]


# -- many ranks --------------------------------------------------------------------------------------------------------


def unlike(group: Group) -> list[Tensor]:
    """Each rank's gradients have another size, and another part that stays as it is."""
    return [x * 10.0**rank for rank, x in enumerate(group.gradients())]


def check_together(world: int, steps: int = 150) -> list[int]:
    """The stage after each step, the same on all ranks and as the residuals have it."""
    group, stages = Group(WARM, world), [0]
    energies: list[tuple[float, float]] = []
    for _ in range(steps):
        gradients = unlike(group)
        group.aggregate(gradients)
        found = {stage_of(state) for state in group.states}
        assert len(found) == 1, "ranks decided differently"
        (stage,) = found
        if stage < 2:
            settled = False
            if len(energies) > 1:  # a step later, since that is when all have heard of it
                waiting, given = (sum(each) for each in zip(*energies, strict=True))
                settled = energies[-1][0] * given <= SETTLED * waiting * energies[-1][1]
            assert (stage > stages[-1]) == settled, "it went on while more and more was waiting, or not when it should"
        energies = [] if stage > stages[-1] else energies
        waiting = sum(float(state[RESIDUAL].flat.square().sum()) for state in group.states)
        energies.append((waiting, sum(float(x.square().sum()) for x in gradients)))
        stages.append(stage)
    return stages[1:]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_with_unlike_data_continue_together_and_arrive(world: int) -> None:
    stages = check_together(world)
    assert stages[0] == 0
    assert stages[-1] == 2
    assert stages == sorted(stages)


def locally(progress: WarmupProgress, like: Tensor, at: Any) -> Any:
    """A twin that asks the others and does not listen."""
    yield from settling.exchange(progress, like, at)
    return progress.my_waiting, progress.my_given


def test_who_decides_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup_module, "exchange", locally)
    with pytest.raises((AssertionError, MalformedError)):
        check_together(3)


def at_the_end(group: Group) -> Group:
    while {stage_of(state) for state in group.states} != {2}:
        group.aggregate(group.gradients())
    return group


def test_at_the_end_it_is_the_inner_compressor() -> None:
    warm, plain = at_the_end(Group(WARM, 3)), Group(Feedback(TopK(density=0.05)), 3)
    plain.step = warm.step
    plain.states = [State({RESIDUAL: state[RESIDUAL].clone()}) for state in warm.states]
    for _ in range(3):
        gradients = warm.gradients()
        for a, b in zip(warm.aggregate(gradients), plain.aggregate(gradients), strict=True):
            assert torch.equal(a.mean, b.mean)
            assert torch.equal(a.own, b.own)
    for a_state, b_state in zip(warm.states, plain.states, strict=True):
        assert torch.equal(a_state[RESIDUAL].flat, b_state[RESIDUAL].flat)


def said(group: Group) -> tuple[list[type], float]:
    """The operations of the first rank's next aggregation, and what they send."""
    ops: list[Any] = []

    def overheard(script: Any) -> Any:
        op = next(script)
        while True:
            ops.append(op)
            try:
                op = script.send((yield op))
            except StopIteration as stop:
                return stop.value

    xs = [FlatTensors(x.float(), LAYOUT) for x in group.gradients()]
    scripts = [group.compressor.aggregate(x, group.states[r], group.at(r)) for r, x in enumerate(xs)]
    simulate([overheard(scripts[0]), *scripts[1:]])
    return [type(op) for op in ops], sum(op.bytes_sent(group.world, 0) for op in ops)


def test_it_says_sixteen_bytes_more_and_no_message_more_until_the_end() -> None:
    """And is priced as it ends: what it begins with depends on data."""
    group, plain = (Group(each, 3, dtype=torch.float32) for each in (WARM, Feedback(TopK(density=0.25))))
    (ops, nbytes), (plain_ops, plain_bytes) = said(group), said(plain)
    assert ops == plain_ops
    assert nbytes == plain_bytes + 2 * 16
    asked = Group(Feedback(TopK(density=0.05)), 3, dtype=torch.float32)
    assert said(at_the_end(group)) == said(asked)
    assert priced(WARM, 3, LAYOUT) == priced(asked.compressor, 3, LAYOUT)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 3, 6])
def test_resuming_changes_no_bit(after: int) -> None:
    check_resume("Warmup(TopK(0.05))", (after,))


def test_resuming_without_the_stage_is_found() -> None:
    def spoil(session: Any) -> None:
        for kept in session["state"].values():
            for key in [key for key in kept if key.endswith(FORM)]:
                kept[key].zero_()

    with pytest.raises(AssertionError, match="another way"):
        check_resume("Warmup(TopK(0.05))", (11,), spoil)


def check_nonsense_on_one_rank() -> None:
    """Zeros of the right form travel in its place; the others wait for those."""
    group = at_the_end(Group(WARM, 3, dtype=torch.float32))
    xs = [FlatTensors(x, LAYOUT) for x in group.gradients()]
    xs[1].flat[0] = torch.nan
    lost: list[int] = []
    scripts = [
        aggregate_finite(WARM, x, group.states[rank], group.at(rank), None, lambda rank=rank: lost.append(rank))
        for rank, x in enumerate(xs)
    ]
    simulate(scripts)
    assert lost == [1]


def test_nonsense_on_one_rank_looks_like_what_others_send(monkeypatch: pytest.MonkeyPatch) -> None:
    check_nonsense_on_one_rank()
    monkeypatch.setattr(compressors_base, "FORM", "another key")
    with pytest.raises(Exception, match=r"due|tensors|rank"):
        check_nonsense_on_one_rank()


@pytest.mark.parametrize("inner", [OneBit(), PowerSGD(rank=2), TopK(density=0.5)], ids=repr)
def test_what_has_no_density_that_could_fall_needs_steps(inner: Compressor) -> None:
    with pytest.raises(ValueError, match=r"no density.*Write Warmup\(.*, steps=500\)"):
        Warmup(inner)
