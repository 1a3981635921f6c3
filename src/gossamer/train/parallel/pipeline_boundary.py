"""Pipeline boundary: the codec for activations and gradients between two pipeline stages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.compressors.distortion import relative_error
from gossamer.algorithms.recipes import parse
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.errors import RecipeError
from gossamer.train.parallel.carrier import CarrierFormat, MessageFormat

DIFFERENCE = "difference"


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Message format between two stages, equal on both sides; made by `boundary`.

    Attributes:
        codec, shape, dtype, feedback, samples: the arguments of `boundary`.
        memory_bytes: host memory of feedback on each of the two sides.
    """

    codec: Compressor
    shape: tuple[int, ...]
    dtype: torch.dtype
    feedback: str | None
    samples: int

    @cached_property
    def layout(self) -> Layout:
        return Layout.of({"activation": self.shape})

    @cached_property
    def fingerprint(self) -> int:
        """A hash of all fields: 56 bits."""
        text = repr((self.codec, self.shape, self.dtype, self.feedback, self.samples))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    @property
    def memory_bytes(self) -> int:
        """Host memory in bytes that feedback uses on each of the two sides."""
        return self.samples * (prod(self.shape[1:]) * self.dtype.itemsize + 8)

    @cached_property
    def activation(self) -> MessageFormat:
        """Encoding of activations; differences of half-precision values are computed in float32."""
        dtype = self.dtype if self.feedback is None else accumulation_dtype(self.dtype)
        return MessageFormat(self.codec, self.layout, dtype)

    @cached_property
    def gradient(self) -> MessageFormat:
        return MessageFormat(self.codec, self.layout, self.dtype)

    @cached_property
    def format(self) -> CarrierFormat:
        return CarrierFormat(self.fingerprint, (self.activation, self.gradient))

    def carrier(self) -> Tensor:
        """A meta tensor with the shape of messages, for PipelineStage's input_args and output_args."""
        return torch.empty(self.format.numel, dtype=torch.float32, device="meta", requires_grad=True)


def boundary(
    codec: str | Compressor,
    *,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    feedback: str | None = None,
    samples: int = 0,
) -> Boundary:
    """Compress the tensors between two pipeline stages: activations forward, their gradients backward.

    feedback="difference" (AQ-SGD) sends the difference of a sample's activations x to those known to the other side,
    a(s), from its previous visit: a'(s) = a(s) + C(x - a(s)), with a(s) = 0 before the first one. Both sides store a(s)
    in host memory: see `memory_bytes`. Gradients are sent without feedback.

    Args:
        codec: a compressor as in a recipe, such as "Int8()".
        shape: of a microbatch's activations, (microbatch, ...).
        dtype: of the activations.
        feedback: "difference" or None.
        samples: number of samples of the data set with feedback, for ids 0 to `samples` - 1.

    Returns:
        The boundary, for the CompressedStage on both sides.

    Raises:
        RecipeError: the codec has messages of varying size, keeps state, or needs a group; or, with feedback, its error
            is larger than its input.
        ValueError: an argument is invalid.

    Example:
        >>> edge = gossamer.parallel.boundary("Int8()", shape=(8, 512))
        >>> edge.memory_bytes
        0

    source: Wang et al. 2022, NeurIPS (differences); Bian et al. 2024, MLSys (which codecs suit activations)
    """
    terms = parse(codec).terms if isinstance(codec, str) else (codec,)
    if len(terms) != 1 or not isinstance(terms[0], Compressor):
        raise RecipeError(
            f"{codec!r} is not a single compressor; a boundary between two stages has no strategy and no topology. "
            'Write boundary("Int8()", ...).'
        )
    found = Boundary(
        codec=terms[0], shape=tuple(shape), dtype=dtype, feedback=feedback, samples=samples if feedback else 0
    )
    _check(found, samples)
    events.emit(events.WithoutSession(trains=True))
    return found


def _check(edge: Boundary, samples: int) -> None:
    if not edge.shape or min(edge.shape) < 1 or not edge.dtype.is_floating_point:
        raise ValueError(
            f"shape and dtype must be those of a microbatch's activations, got {edge.shape} of {edge.dtype}. Example: "
            "shape=(microbatch, length, width), dtype=torch.float32."
        )
    if edge.feedback not in (None, DIFFERENCE):
        raise ValueError(
            f'feedback must be "{DIFFERENCE}" or None, got {edge.feedback!r}: a residual of one sample\'s activations '
            f'does not apply to the next sample. Write feedback="{DIFFERENCE}", samples=len(data).'
        )
    if (edge.feedback is None) != (samples == 0) or samples < 0:
        raise ValueError(
            f"samples={samples} with feedback={edge.feedback!r}: samples is the size of the memory of "
            f'feedback="{DIFFERENCE}" and only used with it. Write feedback="{DIFFERENCE}", samples=len(data), or '
            "leave out both."
        )
    reason = _unfit(edge)
    if reason is not None:
        raise RecipeError(
            f"{edge.codec!r} cannot be used at a boundary: {reason}. Write Int8(), Float4(), "
            "TopK(density=0.1) or another codec without wrappers."
        )
    if edge.feedback is None:
        return
    if edge.codec == Dense():
        raise RecipeError("Dense() is lossless, so feedback has no effect. Leave out feedback= and samples=.")
    lost = relative_error(edge.codec, "lost at a boundary")
    if lost >= 1:
        raise RecipeError(
            f"{edge.codec!r} has an error of {lost:.1f} times the energy of its input, so the stored activations would "
            "diverge with every visit. Write Float4(), more levels or smaller blocks, or leave out feedback=."
        )


def _unfit(edge: Boundary) -> str | None:
    """Why a compressor cannot be used at a boundary; None if it can."""
    if edge.codec.adapts:
        return "its messages change their size during training, but pipelining receives into buffers of one size"
    if edge.codec.decoders(edge.layout) is None:
        return "it needs sums over a group or several rounds, but a boundary has one sender and one receiver"
    nothing = FlatTensors.zeros(edge.layout, dtype=edge.dtype, device=torch.device("meta"))
    if edge.codec.init(nothing, AggregationContext()):
        return (
            "it keeps state for the next message, which has other samples; "
            f'feedback="{DIFFERENCE}" keeps state by sample'
        )
    return None
