"""Adaptive: how entries are spread over tensors, who decides it, and what is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws.laws import LAYOUT, Group
from support.aggregations import aggregate, priced_bytes

from gossamer.algorithms.compressors import Adaptive, Chain, Compressor, Feedback, Int8, TopK
from gossamer.algorithms.compressors.adaptive import spread
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.topk import LargestEntries
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import FORM, AggregationContext
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import AllGather
from gossamer.errors import MalformedError

SIZES = LAYOUT.sizes
INNER = TopK(density=0.1)
Rule = Callable[[int, tuple[int, ...], tuple[float, ...]], Sequence[int]]

# -- the rule --------------------------------------------------------------------------------------------------------


def waiting(counts: Sequence[int], sizes: Sequence[int], energies: Sequence[float]) -> float:
    return sum(energy * size / count for count, size, energy in zip(counts, sizes, energies, strict=True))


def check_least_waiting(rule: Rule) -> None:
    """Nobody who moves entries from one tensor to another makes less energy wait."""
    draws = Random(0)
    for _ in range(40):
        sizes = tuple(draws.randrange(20_000, 60_000) for _ in range(4))
        energies = tuple(draws.uniform(0.2, 5.0) * size for size in sizes)
        counts = rule(4000, sizes, energies)
        assert sum(counts) == 4000
        least = waiting(counts, sizes, energies)
        for _ in range(20):
            here, there = draws.sample(range(4), 2)
            moved, count = list(counts), draws.randrange(10, min(counts[here], 200))
            moved[here], moved[there] = moved[here] - count, moved[there] + count
            assert waiting(moved, sizes, energies) > least * (1 - 1e-9)


def test_no_other_numbers_of_entries_let_less_energy_wait() -> None:
    check_least_waiting(spread)


def one_density(total: int, sizes: tuple[int, ...], energies: tuple[float, ...]) -> Sequence[int]:
    return spread(total, sizes, tuple(map(float, sizes)))


def by_energy(total: int, sizes: tuple[int, ...], energies: tuple[float, ...]) -> Sequence[int]:
    return spread(total, sizes, tuple(energy**2 / size for size, energy in zip(sizes, energies, strict=True)))


@pytest.mark.parametrize("twin", [one_density, by_energy])
def test_other_rules_are_caught(twin: Rule) -> None:
    with pytest.raises(AssertionError):
        check_least_waiting(twin)


@pytest.mark.parametrize(
    ("total", "sizes", "energies", "counts"),
    [
        (30, (100, 200), (100.0, 200.0), (10, 20)),  # every entry has as much energy: one density
        (30, (100, 100), (4.0, 1.0), (20, 10)),
        (30, (10, 100), (1e6, 1.0), (10, 20)),  # no more than there are
        (30, (1000, 1000), (1e12, 1e-12), (29, 1)),  # no fewer than one
        (30, (20, 1000), (1.0, 0.0), (20, 10)),  # what others have no room for
        (2, (5, 5), (1.0, 3.0), (1, 1)),
        (7, (99, 99, 99), (19.0**2, 24.0**2, 27.0**2), (2, 2, 3)),  # of 1.9, 2.4 and 2.7
        (3, (1, 1, 1), (1.0, 2.0, 3.0), (1, 1, 1)),
        (4, (0, 9), (0.0, 1.0), (0, 4)),
        (7, (7,), (1e-300,), (7,)),
    ],
)
def test_entries_are_spread(
    total: int, sizes: tuple[int, ...], energies: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    assert spread(total, sizes, energies) == counts


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.0, 1e300)), min_size=1, max_size=8).filter(
        lambda tensors: any(energy for _, energy in tensors)
    ),
    st.floats(0.0, 1.0),
)
def test_none_is_lost_and_none_is_invented(tensors: list[tuple[int, float]], share: float) -> None:
    sizes, energies = tuple(size for size, _ in tensors), tuple(energy for _, energy in tensors)
    total = len(sizes) + round(share * (sum(sizes) - len(sizes)))
    counts = spread(total, sizes, energies)
    assert sum(counts) == total
    assert all(1 <= count <= size for count, size in zip(counts, sizes, strict=True))


# -- in a group ------------------------------------------------------------------------------------------------------


def uneven(group: Group) -> list[torch.Tensor]:
    """Gradients whose last tensor has by far the most energy."""
    gradients = group.gradients()
    for x in gradients:
        x[LAYOUT.slots[-1].offset :] *= 100.0
    return gradients


def sent_of_each(own: torch.Tensor) -> list[int]:
    return [int(own[slot.offset : slot.end].count_nonzero()) for slot in LAYOUT]


@pytest.mark.parametrize("wrap", [lambda inner: inner, Feedback], ids=["alone", "in feedback"])
def test_it_begins_as_the_inner_compressor_and_sends_as_many_entries(wrap: Callable[[Compressor], Compressor]) -> None:
    group, plain = Group(wrap(Adaptive(INNER, every=2)), 3), Group(wrap(INNER), 3)
    gradients = uneven(group)
    first = group.aggregate(gradients)
    assert torch.equal(first[0].mean, plain.aggregate(gradients)[0].mean)
    second = group.aggregate(uneven(group))
    counts = sent_of_each(second[0].own)
    assert sum(counts) == sum(INNER.counts(SIZES))
    assert counts[-1] > 1.5 * INNER.counts(SIZES)[-1]
    assert all(sent_of_each(each.own) == counts for each in second)


def test_all_ranks_together_say_where_energy_is() -> None:
    group = Group(Adaptive(INNER), 3)
    gradients = group.gradients()
    group.aggregate(gradients)
    energies = [sum(float(x[slot.offset : slot.end].square().sum()) for x in gradients) for slot in LAYOUT]
    for state in group.states:
        torch.testing.assert_close(state[FORM].flat, torch.tensor(energies, dtype=torch.float64))
        assert torch.equal(state[FORM].flat, group.states[0][FORM].flat)


def test_between_measurements_nothing_changes() -> None:
    group = Group(Feedback(Adaptive(INNER, every=3)), 2)
    seen = []
    for _ in range(7):
        group.aggregate(group.gradients())
        seen.append(group.states[0][FORM].flat.tolist())
    assert [now == before for before, now in pairwise(seen)] == [True, True, False, True, True, False]


def test_where_nothing_was_given_the_next_step_is_measured() -> None:
    group = Group(Adaptive(INNER, every=5), 2)
    group.aggregate([torch.zeros_like(x) for x in group.gradients()])
    assert not group.states[0][FORM].flat.any()
    group.aggregate(group.gradients())
    assert group.states[0][FORM].flat.all()


def test_what_is_owed_survives_another_spread() -> None:
    """Sum of what was sent + mean residual = sum of what was given, while the numbers of entries change."""
    group = Group(Feedback(Adaptive(INNER, every=1)), 3)
    given, sent = torch.zeros(LAYOUT.numel, dtype=torch.float64), torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for step in range(6):
        gradients = uneven(group) if step % 2 else group.gradients()
        given += torch.stack(gradients).mean(0)
        sent += group.aggregate(gradients)[0].mean
    owed = torch.stack([state[RESIDUAL].flat for state in group.states]).mean(0)
    torch.testing.assert_close(sent + owed, given)


@pytest.mark.parametrize("world", [2, 5])
def test_a_measurement_costs_eight_bytes_a_tensor(world: int) -> None:
    plain, more = priced_bytes(INNER, world, LAYOUT), 8 * len(LAYOUT) * (world - 1)
    costs = [priced_bytes(Adaptive(INNER, every=4), world, LAYOUT, step) for step in range(6)]
    assert costs == [plain + more, plain, plain, plain, plain + more, plain]


def test_numbers_of_entries_of_a_chain() -> None:
    counts = tuple(min(size, 3) for size in SIZES)
    chained = Chain(INNER, Int8()).with_counts(counts)
    assert chained == Chain(LargestEntries(counts), Int8())
    assert chained.counts(SIZES) == counts
    (sent,) = aggregate(LargestEntries(counts), [torch.arange(1.0, LAYOUT.numel + 1)], LAYOUT)
    assert sent_of_each(sent.own) == list(counts)


def test_half_a_measurement_is_refused() -> None:
    adaptive = Adaptive(INNER)
    group = Group(adaptive, 2)
    x, at = group.gradients()[0], AggregationContext(world=2)
    script = adaptive.aggregate(type(group.states[0][FORM])(x, LAYOUT), group.states[0], at)
    asked = next(script)
    answers = [[tuple(tensor[:-1] for tensor in op.payload)] * 2 for op in getattr(asked, "ops", [asked])]
    with pytest.raises(MalformedError, match="rank 0"):
        script.send(answers if hasattr(asked, "ops") else answers[0])


def test_a_measurement_that_is_no_number_counts_as_nothing() -> None:
    adaptive = Adaptive(INNER)
    group = Group(adaptive, 2)
    x, at = FlatTensors(group.gradients()[0], LAYOUT), AggregationContext(world=2)
    script = adaptive.aggregate(x, group.states[0], at)
    asked = next(script)
    assert isinstance(asked, AllGather)
    *entries, measured = asked.payload
    with pytest.raises(StopIteration) as stop:
        script.send([asked.payload, (*entries, torch.full_like(measured, float("nan")))])
    assert torch.equal(stop.value.value.next_state[FORM].flat, measured)


def test_energies_add_up_to_a_finite_number() -> None:
    group = Group(Adaptive(INNER), 2)
    gradients = group.gradients()
    for x in gradients:
        x[LAYOUT.slots[0].offset] = 1.1e154  # whose square is above half of the largest float64
    group.aggregate(gradients)
    assert all(bool(state[FORM].flat.isfinite().all()) for state in group.states)


# -- in a recipe -----------------------------------------------------------------------------------------------------


def test_it_remembers_what_waits() -> None:
    assert "Feedback(Adaptive(TopK(density=0.01)))" in repr(resolve("Adaptive(TopK(density=0.01))"))


@pytest.mark.parametrize("text", ["Adaptive(Int8())", "Adaptive(TopK(density=0.01), every=0)"])
def test_what_cannot_be_spread_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Write Adaptive\(TopK\(density=0.01\)"):
        resolve(text)
