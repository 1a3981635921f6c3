"""Arrays: a record's arrays as one flat tensor, and a payload as the bytes of one Flower Array, without Flower.

    magic (4) | bytes of the header, little-endian (4) | header, JSON | zeros to a multiple of 8 | tensors, each padded
    to a multiple of 8

Sizes in a header cause no allocation: the tensors must fill the received bytes exactly, and are views of them.
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
from gossamer.comm.rpc_protocol.tensor_codec import ALIGNMENT, TensorSpec, decode_tensors, encode_tensors
from gossamer.errors import LayoutError, MalformedError
from gossamer.federated.messages import Count

MAGIC = b"GSM1"
PREFIX_BYTES = len(MAGIC) + 4
MOST_HEADER_BYTES = 1 << 20
STYPE = re.compile(r"gossamer\.([a-z0-9_]{1,64})\.v1")


class PayloadHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a payload."""

    recipe: str = ""  # the compressor's text
    layout: str = ""  # fingerprint of the model's arrays
    step: Count = 0  # up: the contribution's; down: the new version
    counts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)] = ()  # tensors, by block
    about: str = ""  # parameters of decoding, as JSON
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=65536)] = ()


class FramedPayload(NamedTuple):
    """A payload and its header."""

    header: PayloadHeader
    payload: Payload


def stype_of(noun: str) -> str:
    """Type of an Array: "gossamer.topk.v1" for "TopK"."""
    return f"gossamer.{noun.lower()}.v1"


def is_gossamer_record(stype: str) -> bool:
    """Whether an Array of this stype has a Gossamer payload."""
    return STYPE.fullmatch(stype) is not None


def codec_noun(compressor: Compressor) -> str:
    """The name of the user's compressor, without the wrappers of a recipe."""
    while isinstance(compressor, Route | Feedback):
        compressor = compressor.inner
    return type(compressor).__name__


def frame(header: PayloadHeader, payload: Payload) -> bytes:
    """Serialize a payload as the bytes of an Array. Fills in header.tensors."""
    specs, buffers = encode_tensors(payload)
    text = msgspec.json.encode(msgspec.structs.replace(header, tensors=specs))
    if len(text) > MOST_HEADER_BYTES:
        raise ValueError(
            f"a payload of {len(specs)} tensors needs a header of {len(text)} bytes, above the limit of "
            f"{MOST_HEADER_BYTES}. Write a compressor that sends fewer tensors, such as TopK(0.01)"
        )
    start = PREFIX_BYTES + len(text)
    prefix = MAGIC + len(text).to_bytes(4, "little") + text + bytes(-start % ALIGNMENT)
    return b"".join([prefix, *buffers])


def unframe(data: bytes) -> FramedPayload:
    """Parse the bytes from `frame`. Raises MalformedError."""
    if len(data) < PREFIX_BYTES or data[: len(MAGIC)] != MAGIC:
        raise MalformedError(
            f"an array of {len(data)} bytes is no payload of this version of Gossamer; it was not used. Install "
            "the same version everywhere"
        )
    size = int.from_bytes(data[len(MAGIC) : PREFIX_BYTES], "little")
    end = PREFIX_BYTES + size
    if size > MOST_HEADER_BYTES or end > len(data):
        raise MalformedError(f"an array of {len(data)} bytes claims a header of {size}; it was not used")
    header = _header(data[PREFIX_BYTES:end])
    start = end + -end % ALIGNMENT
    wanted = sum(each.padded_bytes for each in header.tensors)
    if start + wanted != len(data):
        raise MalformedError(
            f"an array describes tensors of {wanted} bytes but has {max(len(data) - start, 0)}; it was not "
            "used. It was damaged in transit, or made by another program"
        )
    own = bytearray(memoryview(data)[start:])
    received = torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)
    return FramedPayload(header, decode_tensors(header.tensors, received))


def _header(text: bytes) -> PayloadHeader:
    try:
        found: Any = read_json(text)
        return msgspec.convert(found, PayloadHeader, strict=True)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise MalformedError(f"an array's header cannot be read ({error}); it was not used") from error


Arrays = Mapping[str, npt.NDArray[Any]]
FLOATS = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class ArrayLayout:
    """The arrays to compress: all of the most common floating-point dtype, in the record's order.

    Other arrays are sent unchanged: integers, and arrays without dimensions, such as BatchNorm's counts, which an
    averaging strategy converts to floats.
    """

    layout: Layout
    array_dtype: str  # of the arrays

    @classmethod
    def of(cls, arrays: Arrays) -> ArrayLayout:
        """Raises LayoutError if there is no floating-point array."""
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
        """Whether a flat tensor keeps its bits when it is written to arrays and read again."""
        return FLOATS[self.array_dtype] == self.dtype

    def __contains__(self, name: object) -> bool:
        return name in self.layout.by_name

    def read(self, arrays: Arrays, source: str) -> Tensor:
        """Copy the arrays to a flat tensor (n,). Raises LayoutError if they do not match the layout."""
        packed = FlatTensors.zeros(self.layout, dtype=self.dtype, device=torch.device("cpu"))
        for name, view in packed.items():
            found = arrays.get(name)
            if found is None or found.shape != tuple(view.shape) or not _is_float(found.dtype):
                came = "is missing" if found is None else f"is {found.shape} of {found.dtype}"
                raise LayoutError(
                    f'{source}: "{name}" {came}, but {tuple(view.shape)} of {self.array_dtype} is expected, so no '
                    "difference can be computed. Return the received arrays, trained, with the same names and shapes."
                )
            view.copy_(torch.from_numpy(found))
        return packed.flat

    def write(self, flat: Tensor) -> dict[str, npt.NDArray[Any]]:
        """New arrays from a flat tensor (n,)."""
        dtype = FLOATS[self.array_dtype]
        return {name: np.array(view.to(dtype).numpy()) for name, view in FlatTensors(flat, self.layout).items()}

    def fingerprint(self) -> str:
        return self.layout.fingerprint() + self.array_dtype

    def to_text(self) -> str:
        return msgspec.json.encode([self.array_dtype, [[slot.name, slot.shape] for slot in self.layout]]).decode()

    @classmethod
    def from_text(cls, text: str) -> ArrayLayout:
        """Parse the text from `to_text`. Raises MalformedError."""
        try:
            dtype, rows = msgspec.json.decode(text, type=tuple[str, list[tuple[str, tuple[int, ...]]]])
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedError(f"a node's stored layout of arrays cannot be read: {error}") from error
        if dtype not in FLOATS:
            raise MalformedError(f"a node's stored layout of arrays cannot be read: {dtype[:20]!r} is no dtype")
        return cls(Layout.of(dict(rows)), dtype)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name in FLOATS and bool(dtype.isnative)
