"""Adam's update as what travels: moments of each worker, and what is kept of updates that wait."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group, close
from support.aggregations import aggregate, priced_bytes
from torch import Tensor

from gossamer.algorithms.compressors import (
    AdamUpdate,
    Compressor,
    Dense,
    Feedback,
    OneBit,
    PowerSGD,
    Route,
    Sharded,
    TopK,
)
from gossamer.algorithms.compressors.adam_update import VARIANCE
from gossamer.algorithms.compressors.dgc import MOMENTUM
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext, Moments
from gossamer.base.layout import FlatTensors, Layout

MOMENTS = Moments(momentum=0.8, second_beta=0.9, epsilon=1e-6)


class Adaptive(Group):
    """A group whose optimizer is Adam."""

    def at(self, rank: int) -> AggregationContext:
        return replace(super().at(rank), **MOMENTS._asdict())


def test_two_steps_by_hand() -> None:
    """Betas 0.5 and 0.75: of gradients 2, 4 m is 1, 2.5 and v is 1, 4.75; another worker sees the opposite."""
    layout = Layout.of({"p": (1,)})
    compressor = AdamUpdate(inner=Dense())
    blank = FlatTensors.zeros(layout, dtype=torch.float64, device=torch.device("cpu"))
    states = [compressor.init(blank, AggregationContext()) for _ in range(2)]
    expected = [1 / 0.5 / (sqrt(1 / 0.25) + 0.5), 2.5 / 0.75 / (sqrt(4.75 / 0.4375) + 0.5)]
    for step, (gradient, update) in enumerate(zip([2.0, 4.0], expected, strict=True)):
        x = [torch.tensor([sign * gradient], dtype=torch.float64) for sign in (1, -1)]
        staged = aggregate(
            compressor,
            x,
            layout,
            states,
            at=lambda rank, step=step: AggregationContext(  # type: ignore[misc]
                step=step, rank=rank, world=2, momentum=0.5, second_beta=0.75, epsilon=0.5
            ),
        )
        states = [each.next_state for each in staged]
        close(torch.cat([each.own for each in staged]), torch.tensor([update, -update], dtype=torch.float64), 1e-12)
        assert torch.equal(staged[0].mean, torch.zeros(1, dtype=torch.float64))
    assert [float(states[0][key].flat) for key in (MOMENTUM, VARIANCE)] == [2.5, 4.75]


def test_without_epsilon_an_entry_that_had_no_gradient_has_no_update() -> None:
    at = AggregationContext(momentum=0.5, second_beta=0.75, epsilon=0.0)
    x, layout = torch.tensor([0.0, -2.0]), Layout.of({"p": (2,)})
    compressor = AdamUpdate(inner=Dense())
    (staged,) = aggregate(compressor, [x], layout, [compressor.init(FlatTensors(x, layout), at)], at=lambda _: at)
    assert staged.mean.tolist() == [0.0, -1.0]


def sums(inner: Compressor, steps: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """(What was sent, what the workers' updates were, what waits), all of the mean."""
    group, plain = (Adaptive(AdamUpdate(inner=each), 3) for each in (inner, Dense()))
    sent, given = torch.zeros(2, LAYOUT.numel, dtype=torch.float64)
    for _ in range(steps):
        gradients = group.gradients()
        staged = group.aggregate(gradients)
        sent += staged[0].mean
        given += plain.aggregate(gradients)[0].mean
    waits = torch.stack([state["residual"].flat for state in group.states if "residual" in state] or [0 * sent]).mean(0)
    return sent, given, waits


@pytest.mark.parametrize("inner", [TopK(density=0.1), OneBit(block=16), Int8(block=16)], ids=repr)
def test_no_part_of_an_update_is_lost(inner: Compressor) -> None:
    sent, given, waits = sums(Feedback(inner))
    close(sent + waits, given, 1e-11)
    sent, given, waits = sums(inner)  # the twin that forgets
    with pytest.raises(AssertionError):
        close(sent + waits, given, 1e-4)


def test_small_gradients_have_the_same_chance_to_travel() -> None:
    """Entries a million times smaller: of raw gradients none of them would be sent."""

    def share_of_small(compressor: Compressor) -> float:
        group = Adaptive(compressor, 3)
        scale = torch.where(torch.arange(LAYOUT.numel) % 2 == 0, 1.0, 1e-3).double()
        for _ in range(10):
            staged = group.aggregate([x * scale for x in group.gradients()])
        chosen = staged[0].mean != 0
        return float((chosen & (scale < 1)).sum() / chosen.sum())

    assert share_of_small(Feedback(TopK(density=0.1))) == 0
    assert 0.4 < share_of_small(AdamUpdate(inner=Feedback(TopK(density=0.1)))) < 0.6


@pytest.mark.parametrize("inner", [Dense(), PowerSGD(rank=2)], ids=repr)
def test_a_reader_needs_what_the_inner_compressors_reader_needs(inner: Compressor) -> None:
    assert AdamUpdate(inner=inner).decodes_without_input == inner.decodes_without_input


@pytest.mark.parametrize("world", [2, 3, 8])
def test_bytes_are_the_inner_compressors(world: int) -> None:
    inner = Feedback(OneBit(block=64))
    assert priced_bytes(AdamUpdate(inner=inner), world, LAYOUT) == priced_bytes(inner, world, LAYOUT)


def test_narrow_gradients_travel_narrow_and_are_remembered_wide() -> None:
    group = Adaptive(AdamUpdate(inner=Feedback(TopK(density=0.1))), 2, dtype=torch.bfloat16)
    staged = group.aggregate(group.gradients())
    assert torch.isfinite(staged[0].mean).all()
    assert {packed.flat.dtype for packed in group.states[0].values()} == {torch.float32}


def test_a_recipe_feeds_back_and_shards_the_inner_compressor() -> None:
    assert resolve("AdamUpdate()").compressor == Route(AdamUpdate(inner=Feedback(OneBit())))
    assert resolve("AdamUpdate()", 8).compressor == Route(AdamUpdate(inner=Feedback(Sharded(OneBit()))))


@pytest.mark.parametrize(("arguments", "wrong"), [({"clip": -1.0}, r"AdamUpdate\(clip=1.0\)")])
def test_refusals(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        AdamUpdate(**arguments)
