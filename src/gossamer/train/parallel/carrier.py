"""Carriers: one encoded message as the bits of a float32 tensor, which a pipeline stage can send forward and backward.

Autograd gives gradients to floating-point tensors only, and a gradient has the dtype and shape of its tensor. The bytes
of a message are therefore sent as the bits of float32 values, which may be NaNs: a carrier may be copied and sent, but
not used in arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, point_to_point
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError, NotFinite

MAGIC = 0x476F7373616D6572  # "Gossamer"; does not occur in tensors that torch allocates or fills with ones
FINITE, REMEMBERED = 1, 2


class CarrierHeader(NamedTuple):
    """Header before a message's bytes: five int64."""

    magic: int
    boundary: int  # the fingerprint of codec, shape and dtype
    number: int  # of the message; seed of the codec's random numbers
    flags: int  # FINITE: values follow; REMEMBERED: both sides store them
    base: int  # fingerprint of the base of a difference; 0: not a difference


HEADER_BYTES = 8 * len(CarrierHeader._fields)


@dataclass(frozen=True)
class MessageFormat:
    """Encodes values of one layout and dtype in a fixed number of bytes."""

    compressor: Compressor
    layout: Layout
    dtype: torch.dtype

    @cached_property
    def parts(self) -> Sequence[tuple[torch.Size, torch.dtype]]:
        """The shape and dtype of each tensor of a message."""
        nothing = FlatTensors.zeros(self.layout, dtype=self.dtype, device=torch.device("meta"))
        message = point_to_point.encode(self.compressor, nothing, State(), AggregationContext())
        return [(tensor.shape, tensor.dtype) for tensor in message.payload]

    @cached_property
    def ends(self) -> Sequence[int]:
        """Offsets in a carrier's bytes: the end of the header, and of each tensor."""
        return list(accumulate((prod(shape) * dtype.itemsize for shape, dtype in self.parts), initial=HEADER_BYTES))

    def encode(self, flat: Tensor, at: AggregationContext) -> Payload:
        """Encode flat: (n,) in `dtype`. Raises NotFinite."""
        return point_to_point.encode(self.compressor, FlatTensors(flat, self.layout), State(), at).payload

    def decode(self, payload: Payload, at: AggregationContext) -> Tensor:
        """Decode to (n,) in `dtype`. Raises MalformedError."""
        out = torch.empty(self.layout.numel, dtype=self.dtype, device=payload[0].device)
        point_to_point.decode(self.compressor, payload, self.layout, at, out)
        return out


@dataclass(frozen=True)
class CarrierFormat:
    """Carriers of one size for messages of several formats at the same boundary."""

    boundary: int
    formats: tuple[MessageFormat, ...]

    @cached_property
    def numel(self) -> int:
        """Number of float32 values of a carrier, sufficient for the largest format."""
        return -(-max(each.ends[-1] for each in self.formats) // 4)

    def pack(
        self, form: MessageFormat, flat: Tensor, number: int, base: int = 0, remembered: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Encode flat: (n,). Returns (carrier, decoded values); values that are not finite are sent as a flag, with
        None.

        The receiver decodes the same bytes with the same code, so it gets the same bits.
        """
        at = AggregationContext(step=number, seed=self.boundary)
        data = torch.zeros(4 * self.numel, dtype=torch.uint8, device=flat.device)
        try:
            payload = form.encode(flat, at)
        except NotFinite:
            _write(data, CarrierHeader(MAGIC, self.boundary, number, 0, 0))
            return data.view(torch.float32), None
        for tensor, (start, end) in zip(payload, pairwise(form.ends), strict=True):
            data[start:end].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        _write(data, CarrierHeader(MAGIC, self.boundary, number, FINITE | remembered * REMEMBERED, base))
        return data.view(torch.float32), form.decode(payload, at)

    def unpack(self, form: MessageFormat, carrier: Tensor) -> tuple[CarrierHeader, Tensor | None]:
        """Returns (header, values), or (header, None) if the sender's were not finite. Raises MalformedError."""
        if carrier.shape != (self.numel,) or carrier.dtype != torch.float32:
            raise MalformedError(
                f"expected a carrier of {self.numel} float32 values at this boundary, got {tuple(carrier.shape)} of "
                f"{carrier.dtype}. End the previous stage with the same boundary: CompressedStage(module, before=..., "
                "after=edge)."
            )
        data = carrier.detach().contiguous().view(torch.uint8)
        header = CarrierHeader(*data[:HEADER_BYTES].clone().view(torch.int64).tolist())
        if header.magic != MAGIC:
            raise MalformedError(
                "this carrier holds no message: torch ran the stage on uninitialized memory to infer shapes, or the "
                "carrier was used in arithmetic. Pass the shapes: "
                "PipelineStage(module, index, count, device, input_args=edge.carrier(), output_args=edge.carrier())."
            )
        if header.boundary != self.boundary:
            raise MalformedError(
                "the sending stage has another boundary, so its values would be misread. Pass boundary(...) the same "
                "codec, shape, dtype, feedback and samples on both sides."
            )
        if not header.flags & FINITE:
            return header, None
        payload = tuple(
            data[start:end].clone().view(dtype).view(shape)
            for (shape, dtype), (start, end) in zip(form.parts, pairwise(form.ends), strict=True)
        )
        return header, form.decode(payload, AggregationContext(step=header.number, seed=self.boundary))


def _write(data: Tensor, header: CarrierHeader) -> None:
    data[:HEADER_BYTES].copy_(torch.tensor(header, dtype=torch.int64).view(torch.uint8))
