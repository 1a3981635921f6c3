"""Bin means, against the program of SparseLoCo's authors, written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.algorithms.compressors import BinMeans, Chain, Feedback, SignMagnitude, TopK
from gossamer.algorithms.recipes.parser import parse
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import MalformedError, NotFinite

AT = AggregationContext(world=2)
LAYOUT = Layout.of({"matrix": (20, 30), "empty": (0,), "one": (1,), "two": (2,), "same": (5,), "vector": (400,)})


def numbers(seed: int = 0, layout: Layout = LAYOUT) -> Tensor:
    x = torch.randn(layout.numel, generator=rng.generator("bin means", seed), dtype=torch.float64)
    if "same" in layout.names:
        layout.by_name["same"].flat_view(x).fill_(0.75)
    return x


def published(values: NDArray[np.float64], bits: int, deviations: float = 6.0) -> NDArray[np.float64]:
    """templar's quantizer: shift, bins of a width of 6 standard deviations / bins around zero, a table of means."""
    bins = 2**bits
    shift = values.mean()
    centered = values - shift
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = deviations * np.sqrt((centered**2).sum() / np.float64(values.size - 1)) / bins
    if scale == 0 or not np.isfinite(scale):
        scale = 1.0
    codes = np.clip(np.round(centered / scale + bins // 2), 0, bins - 1).astype(int)
    table = np.array([centered[codes == code].mean() if (codes == code).any() else 0.0 for code in range(bins)])
    return np.asarray(table[codes] + shift)


def decoded(codec: BinMeans | Chain | SignMagnitude, x: Tensor, layout: Layout = LAYOUT) -> Tensor:
    return codec.decoded(codec.encode(FlatTensors(x, layout), AT), layout, x)


@pytest.mark.parametrize(("bits", "deviations"), [(2, 6.0), (4, 6.0), (4, 4.0), (2, 3.0)])
def test_it_is_the_published_quantizer_per_tensor(bits: int, deviations: float) -> None:
    x = numbers()
    ours = decoded(BinMeans(bits=bits, deviations=deviations), x)
    for slot in LAYOUT:
        if slot.numel:
            theirs = published(slot.flat_view(x).numpy(), bits, deviations)
            np.testing.assert_allclose(slot.flat_view(ours).numpy(), theirs, rtol=1e-6, atol=1e-7)


def test_one_tensor_by_hand() -> None:
    """Mean 0, variance (4 + 4 + 1 + 1) / 3, width 1.5 sqrt(10/3) = 2.74; codes 1, 2, 2, 3 and their means."""
    layout = Layout.of({"w": (4,)})
    x = torch.tensor([-2.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    assert decoded(BinMeans(), x, layout).tolist() == [-2.0, 0.0, 0.0, 2.0]


def test_two_values_of_a_tensor_share_a_bin() -> None:
    layout = Layout.of({"w": (2,)})
    x = torch.tensor([1.38, -3.19], dtype=torch.float64)
    torch.testing.assert_close(decoded(BinMeans(), x, layout), torch.full((2,), -0.905, dtype=torch.float64))


def test_the_sum_of_each_tensor_is_kept_and_the_energy_splits() -> None:
    x = numbers(1)
    ours = decoded(BinMeans(), x)
    for slot in LAYOUT:
        given, told = slot.flat_view(x), slot.flat_view(ours)
        torch.testing.assert_close(told.sum(), given.sum(), rtol=1e-6, atol=1e-6)
        lost = (given - told).square().sum()
        torch.testing.assert_close(lost, given.square().sum() - told.square().sum(), rtol=1e-5, atol=1e-6)


def test_large_entries_of_a_gaussian_tensor_use_two_of_four_bins() -> None:
    """As the notes of the docstring claim: the other two bits' worth is unused, and SignMagnitude loses less."""
    layout = Layout.of({"matrix": (64, 64 * 20)})
    x = numbers(2, layout)
    top = TopK(density=0.015625, chunk=4096)
    values, _ = top.encode(FlatTensors(x, layout), AT)
    kept = Layout.of({"matrix": (len(values),)})
    assert len(decoded(BinMeans(), values, kept).unique()) == 2
    lost, less = (
        float((values - decoded(codec, values, kept)).square().sum() / values.square().sum())
        for codec in (BinMeans(), SignMagnitude())
    )
    assert less < 0.7 * lost < 0.02


@pytest.mark.parametrize("aliased", [False, True])
def test_its_loss_is_left_in_the_residual(aliased: bool) -> None:
    x, before = numbers(3), numbers(4)
    wanted = x + before
    residual = Residual(before, before if aliased else torch.empty_like(x))
    codec = BinMeans()
    payload = codec.encode(FlatTensors(x, LAYOUT), AT, residual)
    assert torch.equal(residual.after, wanted - codec.decoded(payload, LAYOUT, x))


def test_damaged_payloads_are_refused_before_anything_is_written() -> None:
    codec, out = BinMeans(), numbers(5)
    kept = out.clone()
    means, codes = codec.encode(FlatTensors(numbers(6), LAYOUT), AT)
    broken = [
        (means[:-1], codes),
        (means, codes[:-1]),
        (means.double(), codes),
        (torch.full_like(means, torch.nan), codes),
    ]
    for payload in broken:
        with pytest.raises(MalformedError):
            codec.decode([(means, codes), payload], LAYOUT, out)
        assert torch.equal(out, kept)


def test_numbers_without_a_float32_mean_are_not_sent() -> None:
    with pytest.raises(NotFinite):
        BinMeans().encode(FlatTensors(torch.full((4,), 1e300, dtype=torch.float64), Layout.of({"w": (4,)})), AT)


@pytest.mark.parametrize(
    ("bits", "deviations", "why"),
    [(3, 6.0, "bits must be 2 or 4.*Write BinMeans"), (2, 0.0, "deviations must be above 0.*Write BinMeans")],
)
def test_binmeans_rejects(bits: int, deviations: float, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        BinMeans(bits=bits, deviations=deviations)


def test_sparselocos_line_is_read_from_text() -> None:
    text = "Feedback(Chain(TopK(density=0.015625, chunk=4096), BinMeans()), decay=0.95)"
    (term,) = parse(text).terms
    assert term == Feedback(Chain(TopK(density=0.015625, chunk=4096), BinMeans()), decay=0.95)
    assert repr(term) == text
