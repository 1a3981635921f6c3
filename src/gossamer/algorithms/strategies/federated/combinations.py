"""Combinations: detects compressors that cannot be used in a federation."""

from __future__ import annotations

from functools import lru_cache

import torch

from gossamer.algorithms.compressors import Compressor, DeMo, Dense, Feedback, Route, point_to_point
from gossamer.algorithms.compressors.distortion import SAMPLE, relative_error
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Slot
from gossamer.errors import RecipeError

MATRIX = Slot("weight", (64, 64), 0, (64, 1))
FEW = 0.5  # share of a tensor's entries; below it, most devices send no value for a given entry
MOST_LOST = 1.01  # largest relative squared error of a difference; above it, differences would grow


def check_pull(pull: Compressor) -> None:
    """Raise RecipeError for a compressor that cannot encode differences between versions."""
    if pull == Dense():
        raise RecipeError("pull=Dense() is the default. Omit it.")
    if isinstance(pull, Feedback | DeMo):
        raise RecipeError(
            f"pull={pull!r}: pull sends differences to the devices' parameters; the error of one is in the next, and "
            f"{type(pull).__name__} would send it twice. Write pull={getattr(pull, 'inner', None) or 'Int8()'!r}."
        )
    if pull.owns_momentum(MATRIX) is not None:
        raise RecipeError(
            f"pull={pull!r} applies an optimizer's momentum to gradients, and pull sends parameters. Write pull=Int8()."
        )
    lost = relative_error(pull, "lost")
    if not lost <= MOST_LOST:
        raise RecipeError(
            f"pull={pull!r} has a relative error of {lost:.1f} on random numbers, so differences that are "
            "sent again in each version would grow without limit. Write pull=Int8(), or pull=TopK(density=0.01)."
        )


@lru_cache(maxsize=64)
def few_entries(compressor: Compressor) -> Compressor | None:
    """Return the sparse compressor in a recipe's compressor, which sends few of a matrix's entries; None if there is no
    such.
    """
    numbers = torch.randn(SAMPLE.numel, generator=rng.generator("entries that are sent"), device="cpu")
    x, at = FlatTensors(numbers, SAMPLE), AggregationContext()
    own = point_to_point.encode(compressor, x, point_to_point.begin(compressor, x, at), at).own()
    if int(own.count_nonzero()) >= FEW * SAMPLE.numel:
        return None
    terms = [term for term in compressor.held() if isinstance(term, Compressor)]
    return next((term for term in terms if not isinstance(term, Route | Feedback)), compressor)
