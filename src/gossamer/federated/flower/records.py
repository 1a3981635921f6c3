"""Records: creation and parsing of Flower's records and of Gossamer's notes, and counts of their bytes.

Flower is imported on use; sizes are checked before numpy allocates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from math import prod
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from gossamer.errors import GossamerError, LoopError, MalformedError
from gossamer.federated.flower.arrays import is_gossamer_record
from gossamer.federated.messages import Count, decode

FLOOR = (1, 23)  # the oldest tested version
TESTED = "1.41.0"


class FlowerMissing(GossamerError, ImportError):
    """Flower is not installed, or is too old."""


def need_flower() -> None:
    """Raises FlowerMissing if Flower is not installed or too old."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise FlowerMissing(
            "This needs Flower, which is not installed here. Write: pip install 'gossamer[flower]' (tested with flwr "
            f"{TESTED})"
        ) from None
    if parsed(found) < FLOOR:
        raise FlowerMissing(
            f"This needs flwr {'.'.join(map(str, FLOOR))} or newer, with strategies that exchange messages, but "
            f"{found} is installed. Write: pip install -U 'flwr=={TESTED}'"
        )
    import_module("flwr.serverapp.strategy")


def parsed(text: str) -> tuple[int, int]:
    """(1, 41) for "1.41.0"; (0, 0) for an invalid version."""
    first, _, rest = text.partition(".")
    second = rest.partition(".")[0]
    return (int(first), int(second)) if first.isdecimal() and second.isdecimal() else (0, 0)


@dataclass
class RoundTraffic:
    """Bytes of arrays in one round. Notes and metrics are not counted.

    Attributes:
        up_bytes: from nodes to the server.
        down_bytes: from the server to nodes.
        up_plain_bytes: the same contributions without compression.
        down_plain_bytes: the same models without compression.
        by_node: (up, down) of each node.

    Example:
        >>> traffic = gossamer.federated.flower.RoundTraffic(up_bytes=10, up_plain_bytes=40)
        >>> traffic.up_plain_bytes / traffic.up_bytes
        4.0
    """

    up_bytes: int = 0
    down_bytes: int = 0
    up_plain_bytes: int = 0
    down_plain_bytes: int = 0
    by_node: dict[int, tuple[int, int]] = field(default_factory=dict)

    def went_up(self, node: int, nbytes: int, plain: int) -> None:
        self.up_bytes += nbytes
        self.up_plain_bytes += plain
        self._add(node, nbytes, 0)

    def went_down(self, node: int, nbytes: int, plain: int) -> None:
        self.down_bytes += nbytes
        self.down_plain_bytes += plain
        self._add(node, 0, nbytes)

    def _add(self, node: int, up: int, down: int) -> None:
        before_up, before_down = self.by_node.get(node, (0, 0))
        self.by_node[node] = before_up + up, before_down + down


RECORD = "gossamer"  # of the notes, among a message's records and a node's
PAYLOAD = "gossamer"  # of the payload, among a record's arrays
NOTE = "note"  # of the JSON text, in the record
MOST_LETTERS = 1 << 16

Since = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]  # -1: none yet
Short = Annotated[str, msgspec.Meta(max_length=8192)]


class NodeInvitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Note to a node, sent with the model."""

    run: Short  # of the wrapper; a node drops the state of another run
    recipe: Short  # the compressor of contributions
    pull: Short = ""  # the compressor of differences between versions; empty: whole models
    seed: Count = 0
    step: Since = -1  # of the requested contribution; -1: no contribution
    counted: Since = -1  # the step of this node's last contribution that was counted
    version: Count = 0  # of the arrays in this message


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Note of a node, sent with its update."""

    run: Short
    step: Since = -1  # of the contribution; -1: no contribution was requested
    held: Since = -1  # the version that the node holds


Note = TypeVar("Note", NodeInvitation, NodeAnswer)


def from_text(text: object, kind: type[Note], sender: str) -> Note:
    """Parse a note. Raises MalformedError."""
    if not isinstance(text, str) or len(text) > MOST_LETTERS:
        raise MalformedError(f"{sender} sent a note that is no JSON text of at most {MOST_LETTERS} characters")
    return decode(text, kind, sender)


NUMPY = "numpy.ndarray"  # the stype of Flower's own arrays


def payload_array(stype: str, data: bytes) -> Any:
    """An Array with a payload."""
    from flwr.app import Array

    return Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)


def payload_of(record: Any, source: str) -> bytes:
    """The bytes of a record's payload. Raises MalformedError."""
    array = record[PAYLOAD]
    if not is_gossamer_record(array.stype):
        raise MalformedError(f"{source} holds a payload of unknown type {array.stype[:80]!r}; it was not used")
    return bytes(array.data)


def has_payload(record: Any) -> bool:
    return PAYLOAD in record and is_gossamer_record(record[PAYLOAD].stype)


def array_record(arrays: Mapping[str, Any]) -> Any:
    """An ArrayRecord from numpy arrays and Arrays."""
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(each) if isinstance(each, np.ndarray) else each for name, each in arrays.items()})


def note_record(text: str) -> Any:
    from flwr.app import ConfigRecord

    return ConfigRecord({NOTE: text})


def numpy_arrays(record: Any, source: str) -> dict[str, npt.NDArray[Any]]:
    """A record's arrays except the payload, by name. Sizes are checked before allocation. Raises MalformedError."""
    return {
        name: _numpy(array, f'{source}: "{name}"')
        for name, array in record.items()
        if not is_gossamer_record(array.stype)
    }


def _numpy(array: Any, source: str) -> npt.NDArray[Any]:
    if array.stype != NUMPY:
        raise MalformedError(f"{source} is of type {array.stype[:80]!r}, expected {NUMPY!r}; it was not used")
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
        raise MalformedError(f"{source} is no numpy array ({error}); it was not used") from error


def only_record(content: Any, source: str) -> tuple[str, Any]:
    """The only ArrayRecord, with its name. Raises LoopError if there is another number of records."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise LoopError(
            f"{source} has {len(found)} ArrayRecords {[name for name, _ in found][:5]}, but only one, the model, can "
            "be compressed. Put everything into one ArrayRecord, or leave compression out."
        )
    name, record = found[0]
    return str(name), record


def record_bytes(record: Any) -> int:
    """Serialized bytes of a record's arrays."""
    return sum(len(array.data) for array in record.values())
