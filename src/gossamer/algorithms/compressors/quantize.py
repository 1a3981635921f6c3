"""Base of quantizers: every entry in a few bits."""

from __future__ import annotations

from gossamer.algorithms.compressors.base import Codec
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors


def noise_key(x: FlatTensors, at: AggregationContext) -> int:
    """Return the seed of this worker's random numbers for x in this step; unique per worker, step and bucket."""
    return rng.address(at.seed, at.step, at.rank, next(iter(x.layout.names), ""))


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


class Quantizer(Codec):
    """Base class of codecs that send every entry in a few bits."""

    feedback: bool

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    @property
    def reencodable(self) -> bool:
        return True
