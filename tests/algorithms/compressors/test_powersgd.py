"""PowerSGD: a reference of its own, in numpy and float64, over several ranks and steps; and its warm start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from laws.laws import Group
from numpy.typing import NDArray
from support.aggregations import aggregate
from torch import Tensor

from gossamer.algorithms.compressors import Feedback, PowerSGD, powersgd
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout

RANK, WORLD, STEPS = 3, 3, 6
LAYOUT = Layout.of({"wide": (12, 40), "bias": (9,), "tall": (30, 14), "kernel": (10, 4, 3, 3), "small": (3, 3)})
MATRICES = {"wide": (12, 40), "tall": (30, 14), "kernel": (10, 36)}
Array = NDArray[np.float64]


# -- Vogels et al. 2019, algorithm 1 and 2, by matrices ----------------------------------------------------------------


def orthonormal(p: Array) -> Array:
    """Gram-Schmidt, column after column."""
    columns: list[Array] = []
    for column in p.T:
        for other in columns:
            column = column - other * (other @ column)
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, 1)


class Reference:
    """Algorithm 2 with algorithm 1 for its compressor: error feedback around one warm power iteration, rank by rank."""

    def __init__(self, q: dict[str, Array]) -> None:
        self.q = q
        self.errors = [{name: np.zeros(shape) for name, shape in MATRICES.items()} for _ in range(WORLD)]

    def step(self, inputs: Sequence[dict[str, Array]]) -> dict[str, Array]:
        answer: dict[str, Array] = {}
        for name, shape in MATRICES.items():
            wanted = [x[name].reshape(shape) + e[name] for x, e in zip(inputs, self.errors, strict=True)]
            p = orthonormal(np.mean([m @ self.q[name] for m in wanted], 0))
            mine = [m.T @ p for m in wanted]
            self.q[name] = np.mean(mine, 0)
            answer[name] = p @ self.q[name].T
            for m, q, e in zip(wanted, mine, self.errors, strict=True):
                e[name] = m - p @ q.T
        for name in ("bias", "small"):
            answer[name] = np.mean([x[name] for x in inputs], 0)
        return answer


def as_arrays(flat: Tensor) -> dict[str, Array]:
    return {name: view.numpy() for name, view in FlatTensors(flat, LAYOUT).items()}


def check_reference(compressor: PowerSGD) -> None:
    group = Group(Feedback(compressor), WORLD, layout=LAYOUT)
    begun = {name: view.clone().numpy() for name, view in group.states[0]["q"].items()}
    assert set(begun) == set(MATRICES), "the others two factors would not make smaller"
    reference = Reference(begun)
    for _ in range(STEPS):
        inputs = group.gradients()
        found = as_arrays(group.aggregate(inputs)[0].mean)
        wanted = reference.step([as_arrays(x) for x in inputs])
        for name, expected in wanted.items():
            np.testing.assert_allclose(found[name].reshape(expected.shape), expected, atol=1e-11, err_msg=name)
        for rank, state in enumerate(group.states):
            for name, expected in reference.errors[rank].items():
                owed = state["residual"][name].numpy().reshape(expected.shape)
                np.testing.assert_allclose(owed, expected, atol=1e-11, err_msg=f"residual of {name}")


def test_it_is_the_papers_algorithm_over_ranks_and_steps() -> None:
    check_reference(PowerSGD(rank=RANK))


# -- the warm start ----------------------------------------------------------------------------------------------------


def errors_on_one_matrix(compressor: PowerSGD, steps: int) -> list[float]:
    """How far the answer is from a fixed matrix of rank RANK under weak noise, step by step and without feedback."""
    layout = Layout.of({"m": (60, 50)})
    draws = rng.generator("fixed")
    strong = torch.randn(60, RANK, generator=draws) @ torch.randn(RANK, 50, generator=draws)
    matrix = strong + 1.0 * torch.randn(60, 50, generator=draws)
    best = float((torch.linalg.svdvals(matrix)[RANK:] ** 2).sum().sqrt())
    group = Group(compressor, 2, layout=layout, dtype=torch.float32)
    return [float((group.aggregate([matrix.reshape(-1)] * 2)[0].mean.view(60, 50) - matrix).norm()) / best - 1
            for _ in range(steps)]  # fmt: skip


def test_every_step_starts_from_the_factor_of_the_last() -> None:
    """One power iteration a step comes near the best matrix of this rank, whose error counts as 0."""
    errors = errors_on_one_matrix(PowerSGD(rank=RANK), 5)
    assert errors[0] > 0.05
    assert errors[4] < errors[0] / 50


def test_the_next_factor_is_another_and_the_same_on_all_ranks() -> None:
    group = Group(PowerSGD(rank=RANK), WORLD, layout=LAYOUT)
    before = group.states[0]["q"].flat.clone()
    group.aggregate(group.gradients())
    assert not torch.equal(group.states[0]["q"].flat, before)
    for state in group.states[1:]:
        assert torch.equal(state["q"].flat, group.states[0]["q"].flat)


def test_equal_shapes_start_from_other_factors() -> None:
    """Else what one of them is blind to, all are."""
    layout = Layout.of({"a": (30, 20), "b": (30, 20), "c": (30, 20)})
    q = Group(PowerSGD(rank=2), WORLD, layout=layout).states[0]["q"]
    assert not torch.equal(q["a"], q["b"])
    assert not torch.equal(q["b"], q["c"])
    assert abs(float(torch.corrcoef(torch.stack([q["a"].reshape(-1), q["b"].reshape(-1)]))[0, 1])) < 0.5


# -- ranges ------------------------------------------------------------------------------------------------------------


def test_a_second_factor_that_overflows_is_told_to_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """x q stays in the range and x^T p does not. With the headroom as it is, that takes more than a million rows."""
    monkeypatch.setattr(powersgd, "HEADROOM", 1)
    group = Group(PowerSGD(rank=1), 2, layout=Layout.of({"m": (64, 8)}), dtype=torch.float32)
    for state in group.states:
        state["q"].flat.fill_(1e-6)
    small, large = (torch.full((64 * 8,), number) for number in (1e36, 1.5e38))
    assert all(staged.finite for staged in group.aggregate_into([small, small], [torch.empty(512) for _ in range(2)]))
    assert not any(staged.finite for staged in group.aggregate([large, large]))


def test_rank_and_shapes() -> None:
    assert PowerSGD(rank=2).suits((10, 10))
    assert not PowerSGD(rank=5).suits((10, 10))
    assert not PowerSGD().suits((1000,))
    with pytest.raises(ValueError, match="rank must be the number of columns"):
        PowerSGD(rank=0)


def test_products_of_half_precision_have_the_range_of_float32() -> None:
    """A gradient of 3,000 fits float16, and all sums are those of float32."""
    compressor, layout = PowerSGD(rank=1, feedback=False), Layout.of({"weight": (16, 20)})
    inputs = [torch.full((layout.numel,), 1000.0 * (rank + 1), dtype=torch.float16) for rank in range(3)]
    states = [compressor.init(FlatTensors(x, layout), AggregationContext(world=3)) for x in inputs]
    for staged in aggregate(compressor, inputs, layout, states):
        torch.testing.assert_close(staged.mean, torch.full((layout.numel,), 2000.0), rtol=1e-5, atol=0)
        assert staged.finite
