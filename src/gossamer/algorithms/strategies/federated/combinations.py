"""Combinations: finds in a federation's compressors what would make no sense there."""

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
FEW = 0.5  # share of a tensor's entries below which most devices say nothing of any one of them
MOST_LOST = 1.01  # of a difference's square, or the next difference would be larger


def check_pull(pull: Compressor) -> None:
    """Raise RecipeError for a compressor that cannot tell devices of versions."""
    if pull == Dense():
        raise RecipeError("pull=Dense() is what goes without saying: leave it out.")
    if isinstance(pull, Feedback | DeMo):
        raise RecipeError(
            f"pull={pull!r}: pulls are differences to what devices already have, so what one loses is in the next, and "
            f"{type(pull).__name__} would send it twice. Write pull={getattr(pull, 'inner', None) or 'Int8()'!r}."
        )
    if pull.owns_momentum(MATRIX) is not None:
        raise RecipeError(
            f"pull={pull!r} applies an optimizer's momentum to gradients on their way, and what is pulled are "
            "parameters. Write pull=Int8()."
        )
    lost = relative_error(pull, "lost")
    if not lost <= MOST_LOST:
        raise RecipeError(
            f"pull={pull!r} loses {lost:.1f} times what it is given on random numbers, so differences that "
            "are sent again and again would grow without end. Write pull=Int8(), or pull=TopK(density=0.01)."
        )


@lru_cache(maxsize=64)
def few_entries(compressor: Compressor) -> Compressor | None:
    """What of a complete compressor sends few of a matrix's entries, if it does, and zero for the others."""
    numbers = torch.randn(SAMPLE.numel, generator=rng.generator("entries that are sent"), device="cpu")
    x, at = FlatTensors(numbers, SAMPLE), AggregationContext()
    own = point_to_point.encode(compressor, x, point_to_point.begin(compressor, x, at), at).own()
    if int(own.count_nonzero()) >= FEW * SAMPLE.numel:
        return None
    terms = [term for term in compressor.held() if isinstance(term, Compressor)]
    return next((term for term in terms if not isinstance(term, Route | Feedback)), compressor)
