"""Remote tensors: activations and gradients of remote calls as payloads, optionally compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Dense, point_to_point
from gossamer.algorithms.recipes import parse
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.comm.rpc_protocol.tensor_codec import DTYPES
from gossamer.errors import MalformedError, NotFinite, RecipeError
from gossamer.train.parallel.remote_messages import ABSENT, TensorRecord

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class TensorCoder:
    """Encodes each floating-point tensor of a call separately; other and non-finite tensors are sent unchanged.

    most_bytes: maximum size of a decoded tensor; a larger one is refused before memory is allocated.
    """

    compressor: Compressor
    layer: int
    most_bytes: int

    def encode(
        self, tensors: Sequence[Tensor | None], address: tuple[object, ...], needs: Sequence[bool] = ()
    ) -> tuple[tuple[TensorRecord, ...], Payload]:
        """Encode tensors. address: of the message, seed of the codec's random numbers. needs: which need gradients."""
        records: list[TensorRecord] = []
        payload: list[Tensor] = []
        for place, tensor in enumerate(tensors):
            if tensor is None:
                records.append(ABSENT)
                continue
            parts = self._parts(tensor, (*address, place))
            payload += (tensor,) if parts is None else parts
            records.append(
                TensorRecord(
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    parts=1 if parts is None else len(parts),
                    encoded=parts is not None,
                    needs_gradient=bool(needs) and needs[place],
                )
            )
        return tuple(records), tuple(payload)

    def decode(
        self, records: Sequence[TensorRecord], payload: Payload, address: tuple[object, ...]
    ) -> list[Tensor | None]:
        """The inverse of `encode`. Raises MalformedError for an invalid message."""
        if sum(record.parts for record in records) != len(payload):
            raise MalformedError(f"a remote call has {len(payload)} tensors, which is not the number in its records")
        rest, found = payload, list[Tensor | None]()
        for place, record in enumerate(records):
            if record == ABSENT:
                found.append(None)
                continue
            found.append(self._tensor(record, rest[: record.parts], (*address, place)))
            rest = rest[record.parts :]
        return found

    def _parts(self, tensor: Tensor, address: tuple[object, ...]) -> Payload | None:
        if self.compressor == Dense() or not (tensor.is_floating_point() and tensor.dim() and tensor.numel()):
            return None
        x = FlatTensors(tensor.detach().contiguous().view(-1), Layout.of({"x": tuple(tensor.shape)}))
        try:
            return point_to_point.encode(self.compressor, x, State(), self._at(address)).payload
        except NotFinite:  # infinities and NaN are sent, as in a local model
            return None

    def _tensor(self, record: TensorRecord, parts: Payload, address: tuple[object, ...]) -> Tensor:
        dtype = _DTYPES.get(record.dtype)
        if dtype is None or record.parts < 1:
            raise MalformedError(f"a remote call has an invalid tensor record, {record}")
        if prod(record.shape) * dtype.itemsize > self.most_bytes:
            raise MalformedError(f"a tensor of {record.shape} is larger than the limit of {self.most_bytes:,} bytes")
        if not record.encoded:
            if len(parts) != 1 or parts[0].dtype != dtype or tuple(parts[0].shape) != record.shape:
                raise MalformedError(f"a tensor is not {record.dtype} of {record.shape} as in its record")
            return parts[0]
        if not dtype.is_floating_point or not record.shape:
            raise MalformedError(f"only floating-point tensors can be encoded, but this is {record.dtype}")
        out = torch.empty(prod(record.shape), dtype=dtype)
        point_to_point.decode(self.compressor, parts, Layout.of({"x": record.shape}), self._at(address), out)
        return out.view(record.shape)

    def _at(self, address: tuple[object, ...]) -> AggregationContext:
        return AggregationContext(seed=rng.address("remote", self.layer, *address))


def codec_of(codec: str | Compressor) -> Compressor:
    """Parse a codec. Raises RecipeError unless it encodes single messages."""
    terms = parse(codec).terms if isinstance(codec, str) else (codec,)
    if len(terms) != 1 or not isinstance(terms[0], Compressor):
        raise RecipeError(
            f"{codec!r} is not a single compressor; a remote module has neither a strategy nor a topology. Write "
            'codec="Int8()".'
        )
    found = terms[0]
    sample = FlatTensors.zeros(Layout.of({"x": (8, 16)}), dtype=torch.float32, device=torch.device("meta"))
    reason = (
        "it needs sums over a group or several rounds, but a call has one sender and one receiver"
        if found.decoders(sample.layout) is None
        else "it keeps state for the next message, which is of another batch"
        if found.adapts or found.init(sample, AggregationContext())
        else None
    )
    if reason is not None:
        raise RecipeError(
            f"{found!r} cannot compress remote calls: {reason}. Write Int8(), Float4(), TopK(density=0.1) or another "
            "codec without wrappers."
        )
    return found
