"""Tensor codec: tensors to and from bytes without a copy. Dtypes and shapes are sent separately."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.base.kernels import buffer_pool
from gossamer.base.layout import bytes_of
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError

ALIGNMENT = 8
MOST_DIMENSIONS = 8
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_PADDING = memoryview(bytes(ALIGNMENT))

Count = Annotated[int, msgspec.Meta(ge=0)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor in a payload: its bytes in row-major order, padded with zeros to a multiple of 8."""

    dtype: Annotated[int, msgspec.Meta(ge=0, lt=len(DTYPES))]  # index in DTYPES
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_DIMENSIONS)]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def padded_bytes(self) -> int:
        return self.nbytes + -self.nbytes % ALIGNMENT


def encode_tensors(payload: Payload) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """Return the dtypes and shapes of `payload` for its control record, and its padded bytes as buffers to send.

    The buffers are the memory of contiguous CPU tensors, which must not change until it is sent.
    """
    arrays = [_bytes_of(tensor) for tensor in payload]
    specs = tuple([TensorSpec(_CODES[tensor.dtype], tuple(tensor.shape)) for tensor in payload])
    buffers = [buffer for array in arrays for buffer in (array.data, _PADDING[: -array.nbytes % ALIGNMENT])]
    return specs, [buffer for buffer in buffers if buffer.nbytes]


def allocate(specs: Sequence[TensorSpec], payload_bytes: int) -> Tensor:
    """Allocate uint8 of shape (payload_bytes,) to receive into. Raises MalformedError unless the tensors fill it."""
    wanted = sum(each.padded_bytes for each in specs)
    if wanted != payload_bytes:
        raise MalformedError(f"A frame describes tensors of {wanted} bytes but has a payload of {payload_bytes}.")
    try:
        return buffer_pool.empty(payload_bytes, torch.uint8)
    except MemoryError:
        raise MalformedError(
            f"Out of memory for a frame of {payload_bytes} bytes. Set a smaller largest_frame_bytes=... at both "
            "ends, or give this process more memory."
        ) from None


def decode_tensors(specs: Sequence[TensorSpec], received: Tensor) -> Payload:
    """Return the tensors in `received` as views. Raises MalformedError for an invalid one."""
    if len(specs) == 1 and specs[0].nbytes == received.numel():
        return (_view(specs[0], received),)
    places = accumulate((each.padded_bytes for each in specs), initial=0)
    return tuple(_view(each, received[place : place + each.nbytes]) for each, place in zip(specs, places, strict=False))


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    if tensor.dtype not in _CODES or tensor.dim() > MOST_DIMENSIONS:
        raise ValueError(
            f"A tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot be sent: a payload supports at most "
            f"{MOST_DIMENSIONS} dimensions of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}. "
            "Send tensor.flatten(), or convert the dtype."
        )
    array: npt.NDArray[np.uint8] = bytes_of(tensor.detach().cpu().contiguous()).numpy()
    return array


def _view(spec: TensorSpec, data: Tensor) -> Tensor:
    dtype = DTYPES[spec.dtype]
    if dtype is torch.bool and data.numel() and int(data.max()) > 1:
        raise MalformedError("A bool tensor has bytes other than 0 and 1.")
    try:
        return data.view(dtype).view(spec.shape)
    except (RuntimeError, TypeError, OverflowError):
        raise MalformedError(f"A tensor has an invalid shape {spec.shape}.") from None
