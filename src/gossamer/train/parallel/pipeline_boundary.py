"""Pipeline boundary: which codec compresses the activations and gradients that cross between two pipeline stages."""

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
    """What crosses between two stages, equal on both sides; made by `boundary`."""

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
        """Host memory that feedback takes on each of the two sides."""
        return self.samples * (prod(self.shape[1:]) * self.dtype.itemsize + 8)

    @cached_property
    def activation(self) -> MessageFormat:
        """How activations become bytes; differences of narrow numbers are taken in float32."""
        dtype = self.dtype if self.feedback is None else accumulation_dtype(self.dtype)
        return MessageFormat(self.codec, self.layout, dtype)

    @cached_property
    def gradient(self) -> MessageFormat:
        return MessageFormat(self.codec, self.layout, self.dtype)

    @cached_property
    def format(self) -> CarrierFormat:
        return CarrierFormat(self.fingerprint, (self.activation, self.gradient))

    def carrier(self) -> Tensor:
        """What crosses, without contents: for PipelineStage's input_args and output_args."""
        return torch.empty(self.format.numel, dtype=torch.float32, device="meta", requires_grad=True)


def boundary(
    codec: str | Compressor,
    *,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    feedback: str | None = None,
    samples: int = 0,
) -> Boundary:
    """Compress what crosses a boundary between two pipeline stages: activations forward, their gradients backward.

    codec: a compressor such as "Int8()", as in a recipe. shape: of a microbatch's activations, (microbatch, ...).

    feedback="difference" sends by how much a sample's activations differ from what the other side knows of them since
    that sample came last (AQ-SGD): a'(s) = a(s) + C(x - a(s)), a(s) = 0 before the first visit. Both sides keep a(s)
    for sample ids 0 to `samples` - 1, in host memory: see `memory_bytes`. Gradients are sent without memory.

    Raises RecipeError for a codec whose messages change their size, remember, or need a group, and with feedback for
    one that loses more than it sends.

    source: Wang et al. 2022, NeurIPS (differences); Bian et al. 2024, MLSys (which codecs suit activations)
    """
    terms = parse(codec).terms if isinstance(codec, str) else (codec,)
    if len(terms) != 1 or not isinstance(terms[0], Compressor):
        raise RecipeError(
            f"{codec!r} is no single compressor: between two stages there is no strategy and no topology. Write "
            'boundary("Int8()", ...).'
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
            f"shape is that of a microbatch's activations and dtype theirs, not {edge.shape} of {edge.dtype}. Write "
            "shape=(microbatch, length, width), dtype=torch.float32."
        )
    if edge.feedback not in (None, DIFFERENCE):
        raise ValueError(
            f'feedback is "{DIFFERENCE}" or None, not {edge.feedback!r}: what was lost of one sample\'s activations '
            f'means nothing to the next sample. Write feedback="{DIFFERENCE}", samples=len(data).'
        )
    if (edge.feedback is None) != (samples == 0) or samples < 0:
        raise ValueError(
            f"samples={samples} with feedback={edge.feedback!r}: the samples of the data set bound the memory of "
            f'feedback="{DIFFERENCE}", and nothing else has one. Write feedback="{DIFFERENCE}", samples=len(data), or '
            "leave out both."
        )
    reason = _unfit(edge)
    if reason is not None:
        raise RecipeError(
            f"{edge.codec!r} cannot compress what crosses a boundary: {reason}. Write Int8(), Float4(), "
            "TopK(density=0.1) or another codec without wrappers."
        )
    if edge.feedback is None:
        return
    if edge.codec == Dense():
        raise RecipeError("Dense() loses nothing, so differences gain nothing. Leave out feedback= and samples=.")
    lost = relative_error(edge.codec, "lost at a boundary")
    if lost >= 1:
        raise RecipeError(
            f"{edge.codec!r} loses {lost:.1f} times the energy of what it is given, so what is known of a sample would "
            "move away from it with every visit. Write Float4(), more levels or smaller blocks, or leave out feedback=."
        )


def _unfit(edge: Boundary) -> str | None:
    """Why a compressor cannot stand at a boundary; None where it can."""
    if edge.codec.adapts:
        return "its messages change their size while training, and pipelining receives into buffers of one size"
    if edge.codec.decoders(edge.layout) is None:
        return "it asks a group for sums or in several rounds, and a boundary has one sender and one receiver"
    nothing = FlatTensors.zeros(edge.layout, dtype=edge.dtype, device=torch.device("meta"))
    if edge.codec.init(nothing, AggregationContext()):
        return (
            "it remembers something for the next message, which is of other samples; "
            f'feedback="{DIFFERENCE}" remembers by sample'
        )
    return None
