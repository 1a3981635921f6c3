"""Tensors as bytes and back, without a copy of either: only what they are travels beside them."""

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

from gossamer.core.ops import Payload
from gossamer.errors import MalformedError
from gossamer.kernels import buffer_pool

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


class Laid(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one tensor lies in a payload: its bytes in row-major order, then zeros up to a multiple of 8."""

    dtype: Annotated[int, msgspec.Meta(ge=0, lt=len(DTYPES))]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_DIMENSIONS)]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def room_bytes(self) -> int:
        return self.nbytes + -self.nbytes % ALIGNMENT


def lay(payload: Payload) -> tuple[tuple[Laid, ...], list[memoryview]]:
    """What to write into a control record about `payload`, and its bytes, with padding, as buffers to send.

    The buffers are the tensors' own memory where they are contiguous and on the CPU: nobody may write to it before it
    was sent.
    """
    arrays = [_bytes_of(tensor) for tensor in payload]
    laid = tuple([Laid(_CODES[tensor.dtype], tuple(tensor.shape)) for tensor in payload])
    buffers = [buffer for array in arrays for buffer in (array.data, _PADDING[: -array.nbytes % ALIGNMENT])]
    return laid, [buffer for buffer in buffers if buffer.nbytes]


def room(laid: Sequence[Laid], payload_bytes: int) -> Tensor:
    """(payload_bytes,) of uint8 to receive into; refused unless the tensors fill it exactly."""
    wanted = sum(each.room_bytes for each in laid)
    if wanted != payload_bytes:
        raise MalformedError(f"A frame describes tensors of {wanted} bytes and carries {payload_bytes}.")
    try:
        return buffer_pool.empty(payload_bytes, torch.uint8)
    except MemoryError:
        raise MalformedError(f"There is no memory for a frame of {payload_bytes} bytes.") from None


def views(laid: Sequence[Laid], received: Tensor) -> Payload:
    """The tensors that lie in `received`, which they share; refused where one cannot be."""
    if len(laid) == 1 and laid[0].nbytes == received.numel():
        return (_view(laid[0], received),)
    places = accumulate((each.room_bytes for each in laid), initial=0)
    return tuple(_view(each, received[place : place + each.nbytes]) for each, place in zip(laid, places, strict=False))


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    if tensor.dtype not in _CODES or tensor.dim() > MOST_DIMENSIONS:
        raise ValueError(
            f"A tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot travel: a payload holds at most "
            f"{MOST_DIMENSIONS} dimensions of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}. "
            "Send tensor.flatten(), or another dtype."
        )
    array: npt.NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _view(laid: Laid, data: Tensor) -> Tensor:
    dtype = DTYPES[laid.dtype]
    if dtype is torch.bool and data.numel() and int(data.max()) > 1:
        raise MalformedError("A tensor of bool holds bytes that are neither 0 nor 1.")
    try:
        return data.view(dtype).view(laid.shape)
    except (RuntimeError, TypeError, OverflowError):
        raise MalformedError(f"No tensor has the shape {laid.shape}.") from None
