"""Distortion: how much of a random input a compressor loses when it encodes it once."""

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
    """|x - C(x)|^2 / |x|^2 of a Gaussian matrix x, in a first message. sample: the address of x's draws."""
    numbers = torch.randn(SAMPLE.numel, generator=rng.generator(sample), device="cpu")
    x, at = FlatTensors(numbers, SAMPLE), AggregationContext()
    own = point_to_point.encode(compressor, x, point_to_point.begin(compressor, x, at), at).own()
    return float((numbers - own).double().square().sum() / numbers.double().square().sum())


def has_memory(compressor: Compressor) -> bool:
    """Whether a compressor remembers anything from one message to the next, such as what it will send later."""
    x = FlatTensors.zeros(SAMPLE, dtype=torch.float32, device=torch.device("cpu"))
    return bool(point_to_point.begin(compressor, x, AggregationContext()))


@lru_cache(maxsize=64)
def kept_share(compressor: Compressor) -> float:
    """1 - |x - C(x)|^2 / |x|^2 of a Gaussian matrix x: of the worst that it holds, since a term may send other tensors
    by that, or begin to later."""
    held = (term for term in compressor.held() if isinstance(term, Compressor))
    return min(1 - relative_error(term, "share kept by a letter") for term in held)
