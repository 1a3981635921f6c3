"""Layers: the shapes of their tensors, and their multiply-adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model."""

    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes by name
    multiply_adds: float  # of its forward pass, for one sample


def convolution(name: str, inputs: int, outputs: int, kernel: int, side: int, *, bias: bool = False) -> Layer:
    """A square kernel over channels; side: of the image that comes out, in pixels."""
    tensors: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs, kernel, kernel)}
    if bias:
        tensors[f"{name}.bias"] = (outputs,)
    return Layer(tensors=tensors, multiply_adds=outputs * inputs * kernel**2 * side**2)


def linear(name: str, inputs: int, outputs: int, tokens: int = 1, *, bias: bool = True) -> Layer:
    tensors: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    if bias:
        tensors[f"{name}.bias"] = (outputs,)
    return Layer(tensors=tensors, multiply_adds=inputs * outputs * tokens)


def norm(name: str, channels: int, places: int) -> Layer:
    """A scale and a shift per channel; places: tokens or pixels."""
    tensors = {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}
    return Layer(tensors=tensors, multiply_adds=channels * places)


def attention(channels: int, tokens: int, window: int, tensors: Mapping[str, tuple[int, ...]] | None = None) -> Layer:
    """Scores and their weighted sums, for each token over `window` tokens."""
    return Layer(tensors=tensors or {}, multiply_adds=2 * channels * tokens * window)
