"""Feedback by differences (EF21): what all others know of a worker, and what is told of it next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nextafter
from typing import Any

import pytest
import torch
from laws.differences import ALONE, ef21
from laws.laws import LAYOUT, WORLDS, Group, close
from torch import Tensor, nn

from gossamer.algorithms.compressors import (
    Compressor,
    Dense,
    Feedback,
    Int8,
    OneBit,
    PowerSGD,
    Route,
    Sharded,
    SparseSum,
    TopK,
)
from gossamer.algorithms.compressors.base import with_mean_in
from gossamer.algorithms.compressors.feedback_rules import BEGUN, KNOWN, KNOWN_MEAN, SMOOTHED, Differences
from gossamer.algorithms.compressors.sharded import UNSENT, settle
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather
from gossamer.base.runner import simulate

THREE = Layout.of({"w": (3,)})
FORTY = Layout.of({"w": (5, 8)})


def whole(group: Group, seed: int = 0) -> list[Tensor]:
    """Integers, of which every mean over the group is one, too."""
    draws = [rng.generator("whole", seed, group.step, rank) for rank in range(group.world)]
    return [
        torch.randint(-99, 100, (group.layout.numel,), generator=each).to(group.dtype) * group.world for each in draws
    ]


def known(group: Group) -> list[Tensor]:
    return [state[KNOWN].flat for state in group.states]


# -- what is known -----------------------------------------------------------------------------------------------------


def check_known(compressor: Compressor, world: int) -> None:
    """What is known averages to the answer, but for what the group owes itself."""
    group = Group(compressor, world)
    for _ in range(5):
        staged = group.aggregate(group.gradients())
        assert torch.equal(staged[0].mean, group.states[0][KNOWN_MEAN].flat)
        for state in group.states:
            assert torch.equal(state[KNOWN_MEAN].flat, group.states[0][KNOWN_MEAN].flat)
        debts = [state[UNSENT].flat for state in group.states if UNSENT in state]
        debt = torch.cat(debts) if debts else torch.zeros_like(staged[0].mean)
        close(torch.stack(known(group)).mean(0) - debt, staged[0].mean, 1e-11)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("compressor", ALONE, ids=repr)
def test_what_is_known_averages_to_the_answer(compressor: Compressor, world: int) -> None:
    check_known(compressor, world)


class Wrong(Differences):
    """A twin changes what is remembered."""

    def aggregate(self, inner: Compressor, x: FlatTensors, state: State, at: AggregationContext, out: Any) -> Any:
        staged = yield from super().aggregate(inner, x, state, at, out)
        return replace(staged, next_state=State({**staged.next_state, **self.changed(staged.next_state, state, x, at)}))

    def changed(self, after: State, before: State, x: FlatTensors, at: AggregationContext) -> dict[str, Any]:
        raise NotImplementedError


class Forgetful(Wrong):
    def changed(self, after: State, before: State, x: FlatTensors, at: AggregationContext) -> dict[str, Any]:
        return {KNOWN: before[KNOWN]}


class TakesItAsToldInFull(Wrong):
    def changed(self, after: State, before: State, x: FlatTensors, at: AggregationContext) -> dict[str, Any]:
        return {KNOWN: FlatTensors(x.flat.clone(), x.layout)}


class ForgetsTheAnswer(Wrong):
    def changed(self, after: State, before: State, x: FlatTensors, at: AggregationContext) -> dict[str, Any]:
        return {KNOWN_MEAN: before[KNOWN_MEAN]}


class NeverSmooths(Wrong):
    def changed(self, after: State, before: State, x: FlatTensors, at: AggregationContext) -> dict[str, Any]:
        return {BEGUN: before[BEGUN]} if BEGUN in before else {}


def by(twin: type[Wrong], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feedback, "_rule", property(lambda self: twin(self.momentum or 1.0)))


@pytest.mark.parametrize("twin", [Forgetful, TakesItAsToldInFull, ForgetsTheAnswer])
def test_that_check_catches(twin: type[Wrong], monkeypatch: pytest.MonkeyPatch) -> None:
    by(twin, monkeypatch)
    with pytest.raises(AssertionError):
        check_known(ef21(TopK(density=0.1)), 3)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "inner", [TopK(density=0.1), SparseSum(TopK(density=0.1)), Sharded(TopK(density=0.1))], ids=repr
)
def test_whole_numbers_are_known_bit_for_bit(inner: Compressor, world: int) -> None:
    group = Group(ef21(inner), world, dtype=torch.float32)
    for _ in range(6):
        staged = group.aggregate(whole(group))
        debts = [state[UNSENT].flat * world for state in group.states if UNSENT in state]
        assert torch.equal(sum(known(group)) - (torch.cat(debts) if debts else 0), staged[0].mean * world)
        own = torch.stack([each.own for each in staged]).mean(0)
        assert torch.equal(own, staged[0].mean)


@pytest.mark.parametrize("inner", [TopK(density=0.1), Int8(block=16), OneBit(block=16)], ids=repr)
def test_what_is_known_is_the_sum_of_the_messages(inner: Any) -> None:
    """As whoever heard all of them would add them up, bit for bit."""
    group = Group(ef21(inner), 3, dtype=torch.float32)
    heard = [torch.zeros(LAYOUT.numel) for _ in range(3)]

    def overheard(rank: int, script: Any) -> Any:
        op = next(script)
        while True:
            assert isinstance(op, AllGather)
            heard[rank] += inner.decoded(op.payload, LAYOUT, heard[rank])
            try:
                op = script.send((yield op))
            except StopIteration as stop:
                return stop.value

    for _ in range(4):
        xs = [FlatTensors(x, LAYOUT) for x in group.gradients()]
        scripts = [group.compressor.aggregate(x, group.states[r], group.at(r)) for r, x in enumerate(xs)]
        staged: list[Any] = simulate([overheard(rank, script) for rank, script in enumerate(scripts)])
        group.states = [each.next_state.after(old) for each, old in zip(staged, group.states, strict=True)]
        group.step += 1
        for mine, theirs in zip(known(group), heard, strict=True):
            assert torch.equal(mine, theirs)


# -- what it comes to --------------------------------------------------------------------------------------------------


def check_identity(dtype: torch.dtype, gradients: Callable[[Group], list[Tensor]], tolerance: float) -> None:
    group = Group(ef21(Dense()), 3, dtype=dtype)
    for _ in range(5):
        xs = gradients(group)
        (mean, *_), exact = [each.mean for each in group.aggregate(xs)], torch.stack(xs).mean(0)
        torch.testing.assert_close(mean, exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "gradients", "tolerance"), [(torch.float32, whole, 0.0), (torch.float64, Group.gradients, 1e-12)]
)
def test_without_compression_it_is_the_mean(dtype: torch.dtype, gradients: Any, tolerance: float) -> None:
    check_identity(dtype, gradients, tolerance)


@pytest.mark.parametrize("twin", [Forgetful, ForgetsTheAnswer])
def test_the_identity_catches(twin: type[Wrong], monkeypatch: pytest.MonkeyPatch) -> None:
    by(twin, monkeypatch)
    with pytest.raises(AssertionError):
        check_identity(torch.float64, Group.gradients, 1e-12)


def check_momentum(world: int, keep: float) -> None:
    """SGD on the answers is torch's SGD with momentum and as much dampening, on the mean gradient."""
    group = Group(ef21(Dense(), 1 - keep), world, layout=FORTY)
    target = torch.randn(40, generator=rng.generator("target"), dtype=torch.float64)
    mine, theirs = (nn.Parameter(torch.zeros(40, dtype=torch.float64)) for _ in range(2))
    plain, damped = torch.optim.SGD([mine], lr=0.3), torch.optim.SGD([theirs], lr=0.3, momentum=keep, dampening=keep)
    for _ in range(20):
        noise = group.gradients()
        mine.grad = group.aggregate([mine.detach() - target + each for each in noise])[0].mean
        theirs.grad = theirs.detach() - target + torch.stack(noise).mean(0)
        plain.step()
        damped.step()
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("keep", [0.9, 0.5])
def test_momentum_is_the_averaging_form(world: int, keep: float) -> None:
    check_momentum(world, keep)


def test_momentum_that_begins_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    by(NeverSmooths, monkeypatch)
    with pytest.raises(AssertionError):
        check_momentum(3, 0.9)


@pytest.mark.parametrize("inner", [TopK(density=0.1), PowerSGD(rank=2)], ids=repr)
def test_momentum_near_one_comes_near_to_none(inner: Compressor) -> None:
    smooth, plain, one = (Group(ef21(inner, share), 3) for share in (nextafter(1, 0), None, 1.0))
    for _ in range(4):
        gradients = plain.gradients()
        answer = plain.aggregate(gradients)[0].mean
        close(smooth.aggregate(gradients)[0].mean, answer, 1e-12)
        assert torch.equal(one.aggregate(gradients)[0].mean, answer)
        assert SMOOTHED in smooth.states[0]
        assert SMOOTHED not in plain.states[0]


def test_two_steps_by_hand() -> None:
    """Two workers, the largest of three entries, momentum 1/2.

    v1 = (4, 1, 0), (0, -2, 8): told (4, ., .), (., ., 8); G = (2, 0, 4)
    v2 = (v1 + g)/2 = (4, 4, 1), (4, -1, 4), less what is known: (0, 4, 1), (4, -1, -4) -> told (., 4, .), (4, ., .)
    (of equals the first); G = (4, 2, 4)
    """
    group = Group(ef21(TopK(density=0.34), 0.5), 2, dtype=torch.float32, layout=THREE)
    first = group.aggregate([torch.tensor([4.0, 1, 0]), torch.tensor([0.0, -2, 8])])
    assert first[0].mean.tolist() == [2, 0, 4]
    assert [each.own.tolist() for each in first] == [[4, 0, 0], [0, 0, 8]]
    second = group.aggregate([torch.tensor([4.0, 7, 2]), torch.tensor([8.0, 0, 0])])
    assert group.states[1][SMOOTHED].flat.tolist() == [4, -1, 4]
    assert second[0].mean.tolist() == [4, 2, 4]
    assert [each.own.tolist() for each in second] == [[4, 4, 0], [4, 0, 8]]


def errors_of(compressor: Compressor, world: int, steps: int) -> list[float]:
    """How far the answers are from the mean of gradients that stay as they are."""
    group = Group(compressor, world, dtype=torch.float32, layout=FORTY)
    gradients = whole(group)
    exact = torch.stack(gradients).mean(0)
    return [float((group.aggregate(gradients)[0].mean - exact).abs().max()) for _ in range(steps)]


def check_learned(compressor: Compressor, world: int) -> None:
    """Within as many steps as there are tenths in everything, and for good."""
    assert errors_of(compressor, world, 14)[9:] == [0] * 5


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_constant_gradient_is_learned_exactly(world: int) -> None:
    check_learned(ef21(TopK(density=0.1)), world)
    check_learned(ef21(Route(TopK(density=0.1), smallest=0)), world)
    assert min(errors_of(Feedback(TopK(density=0.1)), world, 60)) > 0, "classic feedback did not oscillate"


@pytest.mark.parametrize("twin", [Forgetful, TakesItAsToldInFull, ForgetsTheAnswer])
def test_who_forgets_what_is_known_never_learns_it(twin: type[Wrong], monkeypatch: pytest.MonkeyPatch) -> None:
    by(twin, monkeypatch)
    with pytest.raises(AssertionError):
        check_learned(ef21(TopK(density=0.1)), 3)


def test_who_runs_out_of_data_is_counted_out() -> None:
    """Zeros are news like any others: what was known of the worker leaves the mean."""
    group = Group(ef21(TopK(density=0.1)), 3, dtype=torch.float32, layout=FORTY)
    gradients = whole(group)
    for _ in range(3):
        group.aggregate(gradients)
    gradients[1].zero_()
    for _ in range(12):
        staged = group.aggregate(gradients)
    assert torch.equal(staged[0].mean, torch.stack(gradients).mean(0))
    assert not group.states[1][KNOWN].flat.any()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_is_done_to_an_answer_leaves_no_trace() -> None:
    """Gradients are clipped where they lie."""
    rough, plain = Group(ef21(TopK(density=0.1), 0.5), 2), Group(ef21(TopK(density=0.1), 0.5), 2)
    for _ in range(3):
        gradients = plain.gradients()
        a, b = rough.aggregate(gradients), plain.aggregate(gradients)
        assert torch.equal(a[0].mean, b[0].mean)
        for each in a:
            each.mean.fill_(torch.nan)
            each.own.fill_(torch.nan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_remembered_in_full(dtype: torch.dtype) -> None:
    group, full = Group(ef21(Int8(), 0.3), 2, dtype=dtype), Group(ef21(Int8(), 0.3), 2, dtype=torch.float32)
    for _ in range(3):
        gradients = [x.to(dtype) for x in full.gradients()]
        outs = [x.clone() for x in gradients]
        written = group.aggregate_into(outs, outs)
        a, b = group.aggregate(gradients), full.aggregate([x.float() for x in gradients])
        assert torch.equal(a[0].mean.float(), b[0].mean)
        assert written[0].mean is outs[0]
        assert torch.equal(outs[0], b[0].mean.to(dtype))
        assert {packed.flat.dtype for packed in group.states[0].values()} == {torch.float32}


@dataclass(frozen=True, repr=False)
class Twice(Compressor):
    """Sends twice what it is given, for each worker by itself."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Any = None) -> Any:
        yield from ()
        own = x.flat * 2
        return with_mean_in(AggregationResult(mean=own, own_contribution=lambda: own), out)


def test_an_answer_beyond_the_range_is_noticed() -> None:
    """Though neither what travels now nor the last answer is."""
    group = Group(ef21(Twice()), 1, dtype=torch.float32, layout=THREE)
    assert group.aggregate([torch.full((3,), 1.5e38)])[0].finite
    assert not group.aggregate([torch.full((3,), 3.3e38)])[0].finite


def test_a_tensor_that_begins_later_has_its_own_beginning() -> None:
    """As one that was reset: its first gradient is its average."""
    group = Group(ef21(Dense(), 0.5), 2, dtype=torch.float32)
    group.aggregate(whole(group))
    for state in group.states:
        for packed in state.values():
            packed["matrix"].zero_()
    before = [state[SMOOTHED].flat.clone() for state in group.states]
    gradients = whole(group)
    group.aggregate(gradients)
    for state, old, x in zip(group.states, before, gradients, strict=True):
        expected = (old + x) / 2
        LAYOUT.by_name["matrix"].view(expected).copy_(LAYOUT.by_name["matrix"].view(x))
        assert torch.equal(state[SMOOTHED].flat, expected)


def test_debts_are_settled_out_of_what_is_known() -> None:
    group = Group(ef21(Sharded(TopK(density=0.3))), 3, dtype=torch.float32)
    for _ in range(3):
        answer = group.aggregate(whole(group))[0].mean
    assert any(state[UNSENT].flat.any() for state in group.states)
    for rank, state in enumerate(group.states):
        settle(state, group.at(rank))
        assert not state[UNSENT].flat.any()
    assert torch.equal(sum(known(group)), answer * 3)


# -- the text ----------------------------------------------------------------------------------------------------------


def test_nothing_is_shown_that_was_not_written() -> None:
    inner = TopK(density=0.1)
    shown: Sequence[Compressor] = (Feedback(inner), ef21(inner), ef21(inner, 0.1))
    assert [repr(each) for each in shown] == [
        "Feedback(TopK(density=0.1))",
        "Feedback(TopK(density=0.1), rule='ef21')",
        "Feedback(TopK(density=0.1), rule='ef21', momentum=0.1)",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "ef22"}, r'got \'ef22\'. Write Feedback\(TopK\(density=0.1\), rule="ef21"\)'),
        ({"rule": "ef21", "momentum": 0.0}, r"in \(0, 1\], got 0.0.*momentum=0.1"),
        ({"rule": "ef21", "momentum": 1.5}, r"in \(0, 1\], got 1.5"),
        ({"inner": Route(TopK(density=0.1), rest=Dense(dtype="bfloat16")), "rule": "ef21"}, r"'bfloat16'.*Int8\(\)"),
        ({"momentum": 0.1}, r'no effect.* Write Feedback\(TopK\(density=0.1\), rule="ef21", momentum=0.1\)'),
    ],
)
def test_arguments_that_mean_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Feedback(**{"inner": TopK(density=0.1), **arguments})


def drift(compressor: Compressor, steps: int) -> float:
    """How much further answers are from the mean after so many steps than at first."""
    group = Group(compressor, 4, dtype=torch.float32, layout=FORTY)
    errors: list[float] = []
    for _ in range(steps):
        gradients = group.gradients()
        errors.append(float((group.aggregate(gradients)[0].mean - torch.stack(gradients).mean(0)).norm()))
    return errors[-1] / errors[0]


def test_half_precision_means_would_drift_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are refused: the errors of rounding them add up, like a random walk. Those of encoders do not."""
    assert drift(ef21(Int8(block=8)), 400) < 4
    monkeypatch.setattr(Feedback, "__post_init__", lambda self: None)
    assert drift(ef21(Dense(dtype="bfloat16")), 400) > 4
