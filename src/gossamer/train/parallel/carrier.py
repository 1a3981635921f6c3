"""Carriers: one encoded message as the bits of a float32 tensor, which a pipeline stage can send forward and backward.

Autograd gives gradients to floating-point tensors only, and a gradient has the dtype and shape of what it belongs to.
So the bytes of a message travel as the bits of float32 numbers, which may form NaNs: a carrier may be copied and sent,
and no arithmetic may touch it.
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

MAGIC = 0x476F7373616D6572  # "Gossamer"; no float32 number of a tensor that torch allocated or filled with ones
FINITE, REMEMBERED = 1, 2


class CarrierHeader(NamedTuple):
    """What stands before a message's bytes: five int64."""

    magic: int
    boundary: int  # the fingerprint of codec, shape and dtype
    number: int  # of the message; what the codec drew is addressed by it
    flags: int  # FINITE: numbers follow; REMEMBERED: both sides keep them
    base: int  # the fingerprint of what a difference is to; 0: of nothing


HEADER_BYTES = 8 * len(CarrierHeader._fields)


@dataclass(frozen=True)
class MessageFormat:
    """How numbers of one layout and dtype become bytes: always equally many."""

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
        """Where in a carrier's bytes the header ends, and then each tensor."""
        return list(accumulate((prod(shape) * dtype.itemsize for shape, dtype in self.parts), initial=HEADER_BYTES))

    def encode(self, flat: Tensor, at: AggregationContext) -> Payload:
        """flat: (n,) in `dtype`. Raises NotFinite."""
        return point_to_point.encode(self.compressor, FlatTensors(flat, self.layout), State(), at).payload

    def decode(self, payload: Payload, at: AggregationContext) -> Tensor:
        """(n,) in `dtype`. Raises MalformedError."""
        out = torch.empty(self.layout.numel, dtype=self.dtype, device=payload[0].device)
        point_to_point.decode(self.compressor, payload, self.layout, at, out)
        return out


@dataclass(frozen=True)
class CarrierFormat:
    """Carriers of one size for messages of several formats, which all go over one boundary."""

    boundary: int
    formats: tuple[MessageFormat, ...]

    @cached_property
    def numel(self) -> int:
        """The float32 numbers of a carrier: room for the largest format."""
        return -(-max(each.ends[-1] for each in self.formats) // 4)

    def pack(
        self, form: MessageFormat, flat: Tensor, number: int, base: int = 0, remembered: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(carrier, what it stands for). flat: (n,); numbers that are not finite are told as such, and stand for None.

        The other side decodes the same bytes by the same code, so what they stand for has the same bits there.
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
        """(header, numbers); None where the sender's were not finite. Raises MalformedError, also for what is none."""
        if carrier.shape != (self.numel,) or carrier.dtype != torch.float32:
            raise MalformedError(
                f"a carrier of {self.numel} float32 numbers was due at this boundary, and {tuple(carrier.shape)} of "
                f"{carrier.dtype} came, which is no message of it. End the stage before with the "
                "same boundary: CompressedStage(module, before=..., after=edge)."
            )
        data = carrier.detach().contiguous().view(torch.uint8)
        header = CarrierHeader(*data[:HEADER_BYTES].clone().view(torch.int64).tolist())
        if header.magic != MAGIC:
            raise MalformedError(
                "this carrier holds no message: torch runs stages on memory that nothing was written to, to learn "
                "their shapes, or something computed with the carrier on its way. Say the shapes: "
                "PipelineStage(module, index, count, device, input_args=edge.carrier(), output_args=edge.carrier())."
            )
        if header.boundary != self.boundary:
            raise MalformedError(
                "the stage that sent this has another boundary, so its numbers would be misread. Give boundary(...) "
                "the same codec, shape, dtype, feedback and samples on both sides."
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
