"""Distortion: the relative error of a compressor that encodes a random input once."""

from __future__ import annotations

from functools import lru_cache

import torch

from gossamer.algorithms.compressors import point_to_point
from gossamer.algorithms.compressors.base import Compressor
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout

SAMPLE = Layout.of({"weight": (64, 64)})


def relative_error(compressor: Compressor, sample: str) -> float:
    """Return |x - C(x)|^2 / |x|^2 of a Gaussian matrix x, for a first message. sample: the seed address of x."""
    numbers = torch.randn(SAMPLE.numel, generator=rng.generator(sample), device="cpu")
    x, at = FlatTensors(numbers, SAMPLE), AggregationContext()
    own = point_to_point.encode(compressor, x, point_to_point.begin(compressor, x, at), at).own()
    return float((numbers - own).double().square().sum() / numbers.double().square().sum())


def has_memory(compressor: Compressor) -> bool:
    """Whether a compressor keeps state between messages, such as a residual."""
    x = FlatTensors.zeros(SAMPLE, dtype=torch.float32, device=torch.device("cpu"))
    return bool(point_to_point.begin(compressor, x, AggregationContext()))


@lru_cache(maxsize=64)
def kept_share(compressor: Compressor) -> float:
    """Return 1 - |x - C(x)|^2 / |x|^2 of a Gaussian matrix x.

    The result is the lowest of all compressors in the term, since it may use each of them for some tensors or steps.
    """
    held = (term for term in compressor.held() if isinstance(term, Compressor))
    return min(1 - relative_error(term, "share kept by a letter") for term in held)
