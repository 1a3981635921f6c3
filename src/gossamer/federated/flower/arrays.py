"""Arrays: a record's arrays as one flat tensor, and a payload as the bytes of one Flower Array, without Flower.

    magic (4) | bytes of the header, little-endian (4) | header, JSON | zeros to a multiple of 8 | tensors, each padded
    to a multiple of 8

Nothing is allocated by what a header claims: the tensors must fill the bytes that came exactly, and are views of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Feedback, Route
from gossamer.base.json_text import read_json
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.base.ops import Payload
from gossamer.comm.wire.tensor_codec import ALIGNMENT, TensorSpec, decode_tensors, encode_tensors
from gossamer.errors import LayoutError, MalformedError
from gossamer.federated.messages import Count

MAGIC = b"GSM1"
PREFIX_BYTES = len(MAGIC) + 4
MOST_HEADER_BYTES = 1 << 20
STYPE = re.compile(r"gossamer\.([a-z0-9_]{1,64})\.v1")


class PayloadHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a payload is, beside its numbers."""

    recipe: str = ""  # the compressor's text
    layout: str = ""  # fingerprint of the model's arrays
    step: Count = 0  # up: the contribution's; down: the version that it leads to
    counts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)] = ()  # tensors, by block
    about: str = ""  # how to read the payload, as JSON
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=65536)] = ()


class FramedPayload(NamedTuple):
    """A payload and what it is."""

    header: PayloadHeader
    payload: Payload


def stype_of(noun: str) -> str:
    """ "gossamer.topk.v1" for "TopK"."""
    return f"gossamer.{noun.lower()}.v1"


def is_ours(stype: str) -> bool:
    """Whether an Array of this stype holds a payload of ours."""
    return STYPE.fullmatch(stype) is not None


def codec_noun(compressor: Compressor) -> str:
    """The noun of what a user wrote, inside what a recipe put around it."""
    while isinstance(compressor, Route | Feedback):
        compressor = compressor.inner
    return type(compressor).__name__


def frame(header: PayloadHeader, payload: Payload) -> bytes:
    """The bytes of an Array. header.tensors is filled in."""
    specs, buffers = encode_tensors(payload)
    text = msgspec.json.encode(msgspec.structs.replace(header, tensors=specs))
    if len(text) > MOST_HEADER_BYTES:
        raise ValueError(
            f"a payload of {len(specs)} tensors needs a header of {len(text)} bytes, and none above "
            f"{MOST_HEADER_BYTES} is read. Write a compressor that sends fewer tensors, such as TopK(0.01)"
        )
    start = PREFIX_BYTES + len(text)
    prefix = MAGIC + len(text).to_bytes(4, "little") + text + bytes(-start % ALIGNMENT)
    return b"".join([prefix, *buffers])


def unframe(data: bytes) -> FramedPayload:
    """What `frame` made. Raises MalformedError for anything else."""
    if len(data) < PREFIX_BYTES or data[: len(MAGIC)] != MAGIC:
        raise MalformedError(
            f"an array of {len(data)} bytes is no payload of this version of Gossamer; nothing of it was used. Install "
            "the same version everywhere"
        )
    size = int.from_bytes(data[len(MAGIC) : PREFIX_BYTES], "little")
    end = PREFIX_BYTES + size
    if size > MOST_HEADER_BYTES or end > len(data):
        raise MalformedError(f"an array of {len(data)} bytes claims a header of {size}; nothing of it was used")
    header = _header(data[PREFIX_BYTES:end])
    start = end + -end % ALIGNMENT
    wanted = sum(each.padded_bytes for each in header.tensors)
    if start + wanted != len(data):
        raise MalformedError(
            f"an array describes tensors of {wanted} bytes and carries {max(len(data) - start, 0)}; nothing of it was "
            "used. It was damaged on its way, or made by something else"
        )
    own = bytearray(memoryview(data)[start:])
    received = torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)
    return FramedPayload(header, decode_tensors(header.tensors, received))


def _header(text: bytes) -> PayloadHeader:
    try:
        found: Any = read_json(text)
        return msgspec.convert(found, PayloadHeader, strict=True)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise MalformedError(f"an array's header cannot be read ({error}); nothing of it was used") from error


Arrays = Mapping[str, npt.NDArray[Any]]
FLOATS = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class ArrayLayout:
    """The arrays of the floating-point dtype that most numbers have, in the record's order.

    What else a record holds travels as it is: integers, and arrays without dimensions, such as BatchNorm's counts,
    which an averaging strategy makes floats of.
    """

    layout: Layout
    array_dtype: str  # of the arrays

    @classmethod
    def of(cls, arrays: Arrays) -> ArrayLayout:
        """Raises LayoutError where there is nothing to compress."""
        floats = {name: each for name, each in arrays.items() if _is_float(each.dtype) and each.ndim}
        numbers: Counter[str] = Counter()
        for each in floats.values():
            numbers[each.dtype.name] += each.size
        if not numbers:
            raise LayoutError(
                f"None of the arrays {sorted(arrays)[:5]} has floating-point numbers, so there is nothing to compress. "
                "Leave the mod and the strategy's wrapper out."
            )
        ((dtype, _),) = numbers.most_common(1)
        shapes = {name: tuple(each.shape) for name, each in floats.items() if each.dtype.name == dtype}
        return cls(Layout.of(shapes), dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the flat tensor: at least float32."""
        return accumulation_dtype(FLOATS[self.array_dtype])

    @property
    def is_exact(self) -> bool:
        """Whether a flat tensor, written to arrays and read again, is the same bits."""
        return FLOATS[self.array_dtype] == self.dtype

    def __contains__(self, name: object) -> bool:
        return name in self.layout.by_name

    def read(self, arrays: Arrays, whose: str) -> Tensor:
        """A copy of the arrays, (n,). Raises LayoutError where they are not such as this says."""
        packed = FlatTensors.zeros(self.layout, dtype=self.dtype, device=torch.device("cpu"))
        for name, view in packed.items():
            found = arrays.get(name)
            if found is None or found.shape != tuple(view.shape) or not _is_float(found.dtype):
                came = "is missing" if found is None else f"is {found.shape} of {found.dtype}"
                raise LayoutError(
                    f'{whose}: "{name}" {came}, and {tuple(view.shape)} of {self.array_dtype} was due, so there is '
                    "nothing to subtract it from. Return the arrays that came, trained: the same names and shapes."
                )
            view.copy_(torch.from_numpy(found))
        return packed.flat

    def write(self, flat: Tensor) -> dict[str, npt.NDArray[Any]]:
        """Arrays in memory of their own, of a flat tensor (n,)."""
        dtype = FLOATS[self.array_dtype]
        return {name: np.array(view.to(dtype).numpy()) for name, view in FlatTensors(flat, self.layout).items()}

    def fingerprint(self) -> str:
        return self.layout.fingerprint() + self.array_dtype

    def to_text(self) -> str:
        return msgspec.json.encode([self.array_dtype, [[slot.name, slot.shape] for slot in self.layout]]).decode()

    @classmethod
    def from_text(cls, text: str) -> ArrayLayout:
        """Raises MalformedError for what `to_text` did not write."""
        try:
            dtype, rows = msgspec.json.decode(text, type=tuple[str, list[tuple[str, tuple[int, ...]]]])
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedError(f"what a node kept of its arrays cannot be read: {error}") from error
        if dtype not in FLOATS:
            raise MalformedError(f"what a node kept of its arrays cannot be read: {dtype[:20]!r} is no dtype")
        return cls(Layout.of(dict(rows)), dtype)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name in FLOATS and bool(dtype.isnative)
