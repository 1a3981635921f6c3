"""Tensor codec: tensors as bytes and back without a copy; dtypes and shapes travel beside them."""

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
    """A tensor in a payload: its bytes in row-major order, then zeros up to a multiple of 8."""

    dtype: Annotated[int, msgspec.Meta(ge=0, lt=len(DTYPES))]  # its place in DTYPES
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_DIMENSIONS)]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def padded_bytes(self) -> int:
        return self.nbytes + -self.nbytes % ALIGNMENT


def encode_tensors(payload: Payload) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """Dtypes and shapes of `payload` for its control record, and its bytes, with padding, as buffers to send.

    The buffers are the tensors' own memory where they are contiguous and on the CPU: it must not change before it was
    sent.
    """
    arrays = [_bytes_of(tensor) for tensor in payload]
    specs = tuple([TensorSpec(_CODES[tensor.dtype], tuple(tensor.shape)) for tensor in payload])
    buffers = [buffer for array in arrays for buffer in (array.data, _PADDING[: -array.nbytes % ALIGNMENT])]
    return specs, [buffer for buffer in buffers if buffer.nbytes]


def allocate(specs: Sequence[TensorSpec], payload_bytes: int) -> Tensor:
    """(payload_bytes,) of uint8 to receive into. Raises MalformedError unless the tensors fill it exactly."""
    wanted = sum(each.padded_bytes for each in specs)
    if wanted != payload_bytes:
        raise MalformedError(f"A frame describes tensors of {wanted} bytes and carries {payload_bytes}.")
    try:
        return buffer_pool.empty(payload_bytes, torch.uint8)
    except MemoryError:
        raise MalformedError(
            f"There is no memory for a frame of {payload_bytes} bytes. Write a smaller largest_frame_bytes=... at both "
            "ends, or give this process more memory."
        ) from None


def decode_tensors(specs: Sequence[TensorSpec], received: Tensor) -> Payload:
    """Views of `received` as the tensors that lie in it. Raises MalformedError where one cannot be."""
    if len(specs) == 1 and specs[0].nbytes == received.numel():
        return (_view(specs[0], received),)
    places = accumulate((each.padded_bytes for each in specs), initial=0)
    return tuple(_view(each, received[place : place + each.nbytes]) for each, place in zip(specs, places, strict=False))


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    if tensor.dtype not in _CODES or tensor.dim() > MOST_DIMENSIONS:
        raise ValueError(
            f"A tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot travel: a payload holds at most "
            f"{MOST_DIMENSIONS} dimensions of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}. "
            "Send tensor.flatten(), or another dtype."
        )
    array: npt.NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _view(spec: TensorSpec, data: Tensor) -> Tensor:
    dtype = DTYPES[spec.dtype]
    if dtype is torch.bool and data.numel() and int(data.max()) > 1:
        raise MalformedError("A tensor of bool holds bytes that are neither 0 nor 1.")
    try:
        return data.view(dtype).view(spec.shape)
    except (RuntimeError, TypeError, OverflowError):
        raise MalformedError(f"No tensor has the shape {spec.shape}.") from None
