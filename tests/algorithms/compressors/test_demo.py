"""DeMo: what leaves the momentum and what fades from it. What training comes to is in tests/moments/test_sign.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group, close
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, DeMo, Dense, Feedback, Rotated, Route, Sharded, TopK
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.ownership import UpdateRule
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors, Layout, Slot
from gossamer.errors import RecipeError

PAIR = Layout.of({"pair": (2,)})


def momenta(group: Group) -> list[Tensor]:
    return [state[RESIDUAL].flat for state in group.states]


# -- what it is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner",
    [TopK(density=0.1), Rotated(TopK(density=0.1)), Sharded(Int8(block=16)), Rotated(Sharded(Int8()))],
    ids=repr,
)
def test_without_decay_it_is_feedback_to_the_bit(inner: Compressor) -> None:
    ours, theirs = Group(DeMo(inner, decay=1.0), 3), Group(Feedback(inner), 3)
    for _ in range(5):
        gradients = ours.gradients()
        assert torch.equal(ours.aggregate(gradients)[0].mean, theirs.aggregate(gradients)[0].mean)
        for mine, other in zip(ours.states, theirs.states, strict=True):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[key].flat, other[key].flat) for key in mine)


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_where_everything_is_sent_nothing_has_momentum(decay: float) -> None:
    group = Group(DeMo(Dense(), decay=decay), 3)
    for _ in range(3):
        gradients = group.gradients()
        (mean, *_) = (each.mean for each in Group(Dense(), 3).aggregate(gradients))
        assert torch.equal(group.aggregate(gradients)[0].mean, mean)
        assert not any(m.any() for m in momenta(group))


def check_by_hand(compressor: DeMo) -> None:
    """Two workers, one entry of two each; (6, 4) and (2, 8) at first, (1, 1) and (-2, 0) then.

    m = (6, 4), (2, 8): 6 and 8 are sent, Q = (3, 4), (0, 4) and (2, 0) are left; half of it is (0, 2) and (1, 0).
    m = (1, 3), (-1, 0): 3 and -1 are sent, Q = (-0.5, 1.5), (1, 0) and (0, 0) are left.
    """
    group = Group(compressor, 2, layout=PAIR)
    said = [
        group.aggregate([torch.tensor(x, dtype=torch.float64) for x in pair])[0].mean.tolist()
        for pair in ([[6, 4], [2, 8]], [[1, 1], [-2, 0]])
    ]
    assert said == [[3.0, 4.0], [-0.5, 1.5]]
    assert [m.tolist() for m in momenta(group)] == [[1.0, 0.0], [0.0, 0.0]]


def test_two_steps_by_hand() -> None:
    check_by_hand(DeMo(TopK(density=0.5), decay=0.5))


def check_nothing_is_lost_but_by_decay(compressor: DeMo, world: int) -> None:
    """Exactly, with whole numbers and decays that are powers of two: what was sent, what is left, and what faded."""
    group = Group(compressor, world, dtype=torch.float32)
    given, sent, faded = torch.zeros(3, LAYOUT.numel, dtype=torch.float64)
    for step in range(8):
        draws = [rng.generator("whole", rank, step) for rank in range(world)]
        gradients = [torch.randint(-9, 10, (LAYOUT.numel,), generator=each).float() * 64 * world for each in draws]
        given += torch.stack(gradients).double().mean(0)
        faded += (1 - compressor.decay) * torch.stack(momenta(group)).double().mean(0)
        sent += group.aggregate(gradients)[0].mean.double()
    left = torch.stack(momenta(group)).double().mean(0)
    assert torch.equal(sent + left + faded, given)
    assert float(left.abs().sum()) > 0
    assert float(faded.abs().sum()) > 0 or compressor.decay == 1


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("world", [2, 4])
def test_nothing_is_lost_but_by_decay(world: int, decay: float) -> None:
    check_nothing_is_lost_but_by_decay(DeMo(TopK(density=0.1), decay=decay), world)


def test_what_waits_fades() -> None:
    """An entry that is never the largest is worth g / (1 - decay) in the end, and no more."""
    group = Group(DeMo(TopK(density=0.5), decay=0.5), 2, layout=PAIR)
    for _ in range(60):
        group.aggregate([torch.tensor([100.0, 1.0], dtype=torch.float64)] * 2)
    close(momenta(group)[0], torch.tensor([0.0, 2.0]), 1e-12)


def test_each_tensor_may_be_clipped() -> None:
    group = Group(DeMo(TopK(density=1.0), clip=1.0), 4, layout=PAIR)
    staged = group.aggregate([torch.tensor([30.0, 40.0], dtype=torch.float64)] * 4)
    close(staged[0].mean, torch.tensor([1.2, 1.6], dtype=torch.float64), 1e-12)  # a norm of sqrt(4)


# -- in recipes --------------------------------------------------------------------------------------------------------


def test_recipes_send_vectors_dense_and_move_them_by_signs_too() -> None:
    found = resolve("DeMo()").compressor
    assert found == DeMo(Route(Rotated(TopK(density=0.01))))
    assert resolve(found).compressor == found
    for shape in ((8,), (64, 64)):
        owner = found.owns_momentum(Slot("any", shape, 0, (1,) * len(shape)))
        assert owner is not None
        assert owner.rule is UpdateRule.SIGN
    assert resolve("DeMo(sign=False)").compressor == Route(DeMo(sign=False))
    assert resolve("Route(DeMo(TopK(0.1)), smallest=0)").compressor == Route(DeMo(Route(TopK(density=0.1))), smallest=0)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"decay": 1.5}, r"in \[0, 1\], got 1\.5\. Write DeMo\(decay=0\.999\)"),
        ({"decay": -0.1}, "decay must be"),
        ({"clip": 0.0}, r"DeMo\(clip=1\.0\)"),
        ({"inner": Feedback(TopK(density=0.1))}, "would be sent twice"),
        ({"inner": Route(Feedback(TopK(density=0.1)))}, "would be sent twice"),
    ],
)
def test_refusals(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        DeMo(**arguments)


@pytest.mark.parametrize(
    ("recipe", "wrong"),
    [
        ("LocalSGD(period=4) + DeMo()", "gradients are not sent"),
        ("DiLoCo(period=4) + DeMo()", "gradients are not sent"),
        ("EveryStep(delay=1) + DeMo()", "arrive a step too late"),
        ("Gossip() + Ring() + DeMo(sign=False)", "Feedback and DeMo would send errors twice"),
        ("ParameterServer(push=DeMo())", "the optimizer runs on the servers"),
        ("ParameterServer(pull=DeMo(Int8(), sign=False))", "Feedback or DeMo would send it twice"),
        ("Warmup(DeMo(), steps=3)", "Warmup, may be around it"),
        ("Rotated(DeMo())", "Rotated, may be around it"),
    ],
)
def test_pairs_that_do_not_fit(recipe: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        resolve(recipe)


@pytest.mark.parametrize("strategy", ["LocalSGD(period=4)", "DiLoCo(period=4)", "EveryStep(delay=1)"])
def test_without_signs_it_goes_with_what_feedback_goes_with(strategy: str) -> None:
    assert resolve(f"{strategy} + DeMo(sign=False)").compressor == Route(DeMo(sign=False))


# -- the broken twins --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Keeping(DeMo):
    """Sends from the momentum and takes nothing out."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        kept = FlatTensors(state[RESIDUAL].flat * self.decay + x.flat, x.layout)
        staged = yield from super().aggregate(x, state, at, out)
        return replace(staged, next_state=State({RESIDUAL: kept}))


@dataclass(frozen=True, repr=False)
class Late(DeMo):
    """Lets the momentum fade after the gradient was added."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        left = FlatTensors(torch.empty_like(state[RESIDUAL].flat), x.layout)
        faint = FlatTensors(x.flat * self.decay, x.layout)
        torch.mul(state[RESIDUAL].flat, self.decay, out=left.flat)
        staged = yield from self.inner.aggregate_compensated(faint, Residual(left.flat, left.flat), State(), at, out)
        return replace(staged, next_state=State({RESIDUAL: left}))


@dataclass(frozen=True, repr=False)
class Undecayed(DeMo):
    """Feedback, whatever `decay` says."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return Feedback(self.inner).aggregate(x, state, at, out)


@pytest.mark.parametrize("twin", [Keeping, Late, Undecayed])
def test_mutants_are_found(twin: type[DeMo]) -> None:
    with pytest.raises(AssertionError):
        check_by_hand(twin(TopK(density=0.5), decay=0.5))
    with pytest.raises(AssertionError):
        check_nothing_is_lost_but_by_decay(twin(TopK(density=0.1), decay=0.5), 2)


def test_a_recipe_error_is_what_recipes_raise() -> None:
    with pytest.raises(RecipeError):
        resolve("Gossip() + Ring() + DeMo(sign=False)")
