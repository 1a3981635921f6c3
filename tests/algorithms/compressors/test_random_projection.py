"""Random projections: a reference of their own in numpy, factors alike to the last bit, and what each draw keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch
from laws.laws import Group
from numpy.typing import NDArray
from support.simulated_peers import expect_noticed
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Feedback, RandomProjection, random_projection
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels.reference.counter_rng import uniform
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import NotFinite

RANK, WORLD, STEPS = 3, 3, 5
LAYOUT = Layout.of({"wide": (12, 40), "bias": (9,), "tall": (30, 14), "kernel": (10, 4, 3, 3), "small": (3, 3)})
MATRICES = {"wide": (12, 40), "tall": (30, 14), "kernel": (10, 36)}
AT = AggregationContext(step=3, seed=5)
Array = NDArray[np.float64]


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_arrays(flat: Tensor) -> dict[str, Array]:
    return {name: view.numpy() for name, view in FlatTensors(flat, LAYOUT).items()}


def uncached(check: Callable[[], None]) -> Callable[[], None]:
    """The check with factors that are drawn in it, and forgotten after it."""

    def fresh() -> None:
        random_projection._bases.cache_clear()
        try:
            check()
        finally:
            random_projection._bases.cache_clear()

    return fresh


# -- (x q) q^T, by matrices --------------------------------------------------------------------------------------------


def kept(name: str, x: Array, step: int) -> Array:
    """What of a matrix lies in the subspace of this step, by way of an n by n projector."""
    q = RandomProjection(rank=RANK).bases(LAYOUT, AggregationContext(step=step, seed=7))[name].numpy()
    matrix = x.reshape(x.shape[0], -1)
    found = matrix @ (q @ q.T) if len(q) == matrix.shape[1] else (q @ q.T) @ matrix
    return found.reshape(x.shape)


def check_reference(compressor: Compressor) -> None:
    group = Group(compressor, WORLD, layout=LAYOUT)
    errors = [as_arrays(torch.zeros(LAYOUT.numel, dtype=torch.float64)) for _ in range(WORLD)]
    for step in range(STEPS):
        inputs = group.gradients()
        found = as_arrays(group.aggregate(inputs)[0].mean)
        wanted = [{k: v + e[k] for k, v in as_arrays(x).items()} for x, e in zip(inputs, errors, strict=True)]
        for name in LAYOUT.names:
            own = [kept(name, x[name], step) if name in MATRICES else x[name] for x in wanted]
            np.testing.assert_allclose(found[name], np.mean(own, 0), atol=1e-12, err_msg=name)
            for rank in range(WORLD):
                errors[rank][name] = wanted[rank][name] - own[rank]
                owed = group.states[rank]["residual"][name].numpy()
                np.testing.assert_allclose(owed, errors[rank][name], atol=1e-12, err_msg=f"residual of {name}")


def test_it_is_a_projection_over_ranks_and_steps() -> None:
    check_reference(Feedback(RandomProjection(rank=RANK)))


def test_a_residual_that_is_not_kept_is_noticed() -> None:
    def forgets(self: RandomProjection, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return self.expand(values, layout, at) / 2

    expect_noticed(RandomProjection, "_read", forgets, lambda: check_reference(Feedback(RandomProjection(rank=RANK))))


# -- the factor that nobody sends --------------------------------------------------------------------------------------


def check_orthonormal() -> None:
    for name, (rows, cols) in MATRICES.items():
        q = RandomProjection(rank=RANK).bases(LAYOUT, AT)[name]
        assert q.shape == (min(rows, cols), RANK)
        assert (q.T @ q - torch.eye(RANK, dtype=torch.float64)).abs().max() < 1e-14


def test_factors_are_orthonormal() -> None:
    check_orthonormal()
    expect_noticed(random_projection, "orthonormal_columns", lambda drawn: list(drawn), uncached(check_orthonormal))


def test_factors_are_the_same_bits_wherever_they_are_drawn() -> None:
    """A literal, so that this holds between machines, too; and with any number of threads."""
    digests = set()
    for threads in (1, 2):
        random_projection._bases.cache_clear()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            bases = RandomProjection(rank=RANK).bases(LAYOUT, AT)
        finally:
            torch.set_num_threads(before)
        told = b"".join(each.numpy().tobytes() for each in bases.values())
        digests.add(hashlib.blake2b(told, digest_size=8).hexdigest())
    assert digests == {"d9edc35666f849b1"}


def test_factors_differ_between_steps_seeds_and_matrices() -> None:
    layout = Layout.of({"a": (30, 20), "b": (30, 20)})
    own = RandomProjection(rank=2)
    found = [
        own.bases(layout, AggregationContext(step=step, seed=seed))[name]
        for step, seed, name in ((0, 0, "a"), (0, 0, "b"), (1, 0, "a"), (0, 1, "a"))
    ]
    for place, each in enumerate(found):
        assert not any(torch.equal(each, other) for other in found[place + 1 :])


def test_a_factor_is_the_same_whatever_lies_next_to_its_matrix() -> None:
    own = RandomProjection(rank=2)
    alone, beside = Layout.of({"a": (30, 20)}), Layout.of({"z": (90, 80), "a": (30, 20), "b": (4, 5)})
    assert torch.equal(own.bases(alone, AT)["a"], own.bases(beside, AT)["a"])


# -- what is kept ------------------------------------------------------------------------------------------------------


def readings(compressor: RandomProjection, x: Tensor, layout: Layout, steps: int) -> Tensor:
    scaled = 1.0 if compressor.feedback else None
    found = []
    for step in range(steps):
        at = AggregationContext(step=step)
        values = compressor.project(x, layout, at)
        values = values * (scaled or compressor.scales(layout, values))
        found.append(compressor.expand(values, layout, at))
    return torch.stack(found)


def check_unbiased() -> None:
    """Also of a matrix that lies in a corner, where draws that favor an axis would show."""
    layout, steps = Layout.of({"m": (5, 7), "b": (3,)}), 4000
    x = torch.zeros(38, dtype=torch.float64)
    x[:7] = torch.arange(1.0, 8.0)
    x[35:] = 2.0
    found = readings(RandomProjection(rank=2, feedback=False), x, layout, steps)
    error = (found.mean(0) - x).abs()
    assert (error <= 5 * found.std(0) / steps**0.5 + 1e-12).all()


def test_without_feedback_it_is_right_on_average() -> None:
    check_unbiased()


def test_draws_that_lean_to_one_side_are_noticed() -> None:
    def leaning(key: int, n: int, device: str) -> Tensor:
        return 0.5 + uniform(key, n, device) / 2

    with patch.object(random_projection, "uniform", leaning), pytest.raises(AssertionError):
        uncached(check_unbiased)()


def test_a_draw_keeps_the_share_that_its_rank_has_of_the_shorter_side() -> None:
    layout, steps = Layout.of({"m": (24, 10)}), 2000
    x = torch.randn(240, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = readings(RandomProjection(rank=3), x, layout, steps).square().sum(1) / x.square().sum()
    assert abs(float(shares.mean()) - 0.3) < 5 * float(shares.std()) / steps**0.5
    assert float(shares.max()) < 1


def test_linear_maps_are_each_others_transpose() -> None:
    own = RandomProjection(rank=RANK)
    x, y = numbers(0), torch.randn(sum(own.coefficient_counts(LAYOUT)), dtype=torch.float64)
    assert torch.allclose(own.project(x, LAYOUT, AT) @ y, x @ own.expand(y, LAYOUT, AT), atol=1e-10)
    assert torch.allclose(own.project(own.expand(y, LAYOUT, AT), LAYOUT, AT), y, atol=1e-12)


def test_strides_change_nothing() -> None:
    """A kernel in channels_last is the same matrix."""
    kernel = torch.randn(10, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found: list[Sequence[float]] = []
    for each in (kernel, kernel.to(memory_format=torch.channels_last)):
        packed = FlatTensors.pack({"k": each})
        own = RandomProjection(rank=2)
        values = own.project(packed.flat, packed.layout, AT)
        found.append(FlatTensors(own.expand(values, packed.layout, AT), packed.layout)["k"].reshape(-1).tolist())
    assert found[0] == found[1]


def test_rank_and_shapes() -> None:
    own = RandomProjection(rank=3)
    assert own.suits((4, 5))
    assert not own.suits((3, 500))
    assert not own.suits((500,))
    assert list(own.coefficient_counts(LAYOUT)) == [120, 9, 90, 108, 9]
    with pytest.raises(ValueError, match=r"rank must be the number of columns.*RandomProjection\(rank=4\)"):
        RandomProjection(rank=0)


def test_numbers_that_cannot_be_sent_are_refused_by_their_reason() -> None:
    x = numbers().float()
    large, broken = x.clone(), x.clone()
    large[-1], broken[0] = 3e38, float("nan")
    for compressor in (RandomProjection(rank=3), Feedback(RandomProjection(rank=3))):
        for bad, why in ((large, "too large for the sum over the group"), (broken, "is not finite")):
            group = Group(compressor, WORLD, layout=LAYOUT, dtype=torch.float32)
            with pytest.raises(NotFinite, match=why):
                group.aggregate([bad] * WORLD)
