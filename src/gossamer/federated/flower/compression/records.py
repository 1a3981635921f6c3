"""Records: Flower's records and arrays, made and read; lengths are checked before numpy allocates."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from gossamer.errors import LoopError, MalformedError
from gossamer.federated.flower.compression.framing import is_ours
from gossamer.federated.flower.compression.notes import NOTE, PAYLOAD

NUMPY = "numpy.ndarray"  # the stype of Flower's own arrays


def payload_array(stype: str, data: bytes) -> Any:
    """An Array that holds a payload."""
    from flwr.app import Array

    return Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)


def payload_of(record: Any, whose: str) -> bytes:
    """The bytes of a record's payload. Raises MalformedError."""
    array = record[PAYLOAD]
    if not is_ours(array.stype):
        raise MalformedError(f"{whose} holds a payload of type {array.stype[:80]!r}, which is none; it was not used")
    return bytes(array.data)


def has_payload(record: Any) -> bool:
    return PAYLOAD in record and is_ours(record[PAYLOAD].stype)


def array_record(arrays: Mapping[str, Any]) -> Any:
    """An ArrayRecord of numpy arrays, and of Arrays as they are."""
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(each) if isinstance(each, np.ndarray) else each for name, each in arrays.items()})


def note_record(text: str) -> Any:
    from flwr.app import ConfigRecord

    return ConfigRecord({NOTE: text})


def numpy_arrays(record: Any, whose: str) -> dict[str, npt.NDArray[Any]]:
    """A record's arrays but the payload, by name. Raises MalformedError, before memory is allocated for one that lies
    about its size."""
    return {name: _numpy(array, f'{whose}: "{name}"') for name, array in record.items() if not is_ours(array.stype)}


def _numpy(array: Any, whose: str) -> npt.NDArray[Any]:
    if array.stype != NUMPY:
        raise MalformedError(f"{whose} is of type {array.stype[:80]!r}, and {NUMPY!r} is read; nothing of it was used")
    data = bytes(array.data)
    try:
        stream = BytesIO(data)
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, in_columns, dtype = read(stream)
        claimed = prod(shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0 or claimed != len(data) - stream.tell():
            raise ValueError(f"it claims {claimed} bytes and has {len(data) - stream.tell()}")
        numbers: npt.NDArray[Any] = np.frombuffer(data, dtype, prod(shape), stream.tell())
        return numbers.reshape(shape, order="F" if in_columns else "C").copy()
    except (ValueError, EOFError, OSError, TypeError) as error:
        raise MalformedError(f"{whose} is no numpy array ({error}); nothing of it was used") from error


def only_record(content: Any, whose: str) -> tuple[str, Any]:
    """The name of the one ArrayRecord, and itself. Raises LoopError."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise LoopError(
            f"{whose} has {len(found)} ArrayRecords {[name for name, _ in found][:5]}, and one can be compressed: the "
            "model. Put everything into one ArrayRecord, or leave compression out."
        )
    name, record = found[0]
    return str(name), record


def record_bytes(record: Any) -> int:
    """Bytes of a record's arrays, as they are serialized."""
    return sum(len(array.data) for array in record.values())
