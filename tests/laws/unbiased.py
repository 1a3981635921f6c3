"""Whether a rule that rounds at random is right on average, by z-score."""

from __future__ import annotations

from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.base.aggregation import AggregationContext, AggregationResult
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import simulate

LARGEST_Z = 4.5


def draws_of(compressor: Compressor, x: Tensor, draws: int = 20_000, at: AggregationContext | None = None) -> Tensor:
    """What `compressor` makes of x: (n,), many times over: (draws, n), all of it one tensor."""
    layout = Layout.of({"x": (draws * len(x),)})
    many = FlatTensors(x.repeat(draws), layout)
    at = AggregationContext(seed=3) if at is None else at
    staged: list[AggregationResult] = simulate([compressor.aggregate(many, compressor.init(many, at), at)])
    return staged[0].mean.view(draws, len(x)).double()


def check_unbiased(compressor: Compressor, x: Tensor, draws: int = 20_000) -> None:
    """The mean over many draws is x up to chance. A scale may be off by a rounding, and x then with it."""
    drawn = draws_of(compressor, x, draws)
    error = (drawn.mean(0) - x.double()).abs()
    allowed = LARGEST_Z * drawn.std(0) / draws**0.5 + 1e-6 * float(x.abs().max())
    assert (error <= allowed).all(), f"{int((error > allowed).sum())} of {len(x)} entries are wrong on average"
