"""Messages between a server and a device: tasks, reports and receipts as JSON, contributions in parts.

A device requests a task (Pull of TASK, with the version that it holds) and gets an answer once it is chosen. It sends
its contribution in parts of at most `part_bytes` (Push of PART, each acknowledged immediately), then a report (Push of
REPORT). The receipt of the report arrives when the outcome is known: counted in a version, or not and the reason.
Stamps are (client, round, base version), so a repeated message is answered again and never counted twice."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from gossamer.base.json_text import read_json
from gossamer.base.ops import Payload, payload_bytes
from gossamer.base.peer_ops import SERVER, Peer, Push, Receipt, Stamp
from gossamer.errors import MalformedError

CLIENT = "client"
THE_SERVER = Peer(SERVER, 0)
TASK, PART, REPORT = "task", "part", "report"  # keys of requests
PART_BYTES = 1 << 20
FATE_UNKNOWN, NOT_COUNTED = -2, -1  # versions of a receipt: parts are missing; too late, or refused
GO_ON = -3  # version of a receipt: a phase of a masked round has ended, and the next begins

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
LARGEST = 1e300  # largest magnitude of a number in a message
Finite = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Scalar = bool | int | float | str | None


class SecureTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Terms of a masked round, shared by its cohort."""

    members: tuple[Count, ...]  # numbers of its devices, ascending
    ranges: tuple[Finite, ...]  # of entries, by block of a contribution, then of weights


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A device's task. The payload of the same message updates its replica to `version`."""

    round: Count  # of the contribution's stamp; ascending for every device
    version: Count
    chain: str = ""  # decoding of the payload, as `Pulled.about` of a delta chain
    config: dict[str, Scalar] = {}  # the user's, for this round
    finished: bool = False  # the federation has ended, and there is no task
    seed: Count = 0  # of this device in this round
    refused: str = ""  # reason of a permanent refusal
    secure: SecureTask | None = None  # terms of masking; None: unmasked
    lineage: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the version; versions of other lineages are invalid


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A device's report of its local training."""

    samples: Count  # 0: the device had nothing to train on, and sends no contribution
    steps: Count
    learning_rate: Finite = 0.0
    metrics: dict[str, Finite] = {}
    counts: tuple[Count, ...] = ()  # tensors of the message, by block
    parts: Count = 0  # number of parts sent before; 0: the payload is in this message
    shapes: tuple[tuple[Count, ...], ...] = ()  # of the payload's tensors, if it was sent in parts
    layout: str = ""  # fingerprint of the model's state
    train_seconds: Finite = 0.0
    failed: str = ""  # reason of a missing contribution, so that the server does not wait


class Fate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The outcome of a contribution, in the receipt of its report."""

    refused: str = ""  # reason, unless it was only late
    missing: tuple[Count, ...] = ()  # parts that the server does not have


MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


def decode(text: str, kind: type[MessageT], sender: Peer | str) -> MessageT:
    """Parse a message. Raises MalformedError."""
    try:
        found: Any = read_json(text)
        return msgspec.convert(found, kind, strict=True)
    except (ValueError, msgspec.ValidationError) as error:
        raise MalformedError(
            f"{sender} sent an invalid {kind.__name__} message ({error}); it was not used. Install the same "
            "version of Gossamer everywhere"
        ) from error


MOST_DIMENSIONS = 8


def cut(payload: Payload, part_bytes: int) -> list[Tensor]:
    """Cut the payload into parts (m,) of at most `part_bytes`; no parts if the whole payload fits."""
    if payload_bytes(payload) <= part_bytes:
        return []
    parts: list[Tensor] = []
    for tensor in payload:
        flat = tensor.reshape(-1)
        parts += flat.split(max(part_bytes // flat.element_size(), 1)) if flat.numel() else [flat]
    return parts


def assembled(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Payload:
    """Assemble the payload from its parts. Raises MalformedError if they do not match the shapes."""
    if any(len(shape) > MOST_DIMENSIONS or prod(max(size, 1) for size in shape) > 1 << 60 for shape in shapes):
        raise MalformedError(f"a contribution has {len(shapes)} shapes, and one of them is impossible")
    found: list[Tensor] = []
    end = 0
    for shape in shapes:
        begin, count, wanted = end, 0, prod(shape)
        while end < len(parts) and (end == begin or count < wanted) and parts[end].dtype == parts[begin].dtype:
            count += parts[end].numel()
            end += 1
        if end == begin or count != wanted:
            shown = [*map(tuple, shapes[:10])]
            raise MalformedError(f"the parts of a contribution do not make tensors of shapes {shown}")
        found.append(torch.cat([piece.reshape(-1) for piece in parts[begin:end]]).reshape(tuple(shape)))
    if end < len(parts):
        raise MalformedError(f"a contribution has {len(parts) - end} parts more than its tensors need")
    return tuple(found)


def deliver(
    stamp: Stamp, report: Report, payload: Payload, part_bytes: int = PART_BYTES, begun: bool = False
) -> Generator[Any, Any, Receipt]:
    """Send a contribution.

    Each part is acknowledged separately, so a broken connection costs one part.

    Args:
        stamp: of the contribution.
        report: of the device, completed with the parts.
        payload: the contribution.
        part_bytes: largest part.
        begun: an earlier process may have sent parts, so the server is asked first for the missing ones.

    Returns:
        The receipt of the report, or of a part that came too late.
    """
    receipt: Receipt
    parts = cut(payload, part_bytes)
    for number, part in enumerate(() if begun else parts):
        receipt = yield Push(to=THE_SERVER, key=PART, stamp=stamp, payload=(part,), about=str(number))
        if receipt.version != FATE_UNKNOWN:  # already counted, or the round is over
            return receipt
    if parts:
        report = msgspec.structs.replace(
            report, parts=len(parts), shapes=tuple(tuple(tensor.shape) for tensor in payload)
        )
    while True:
        receipt = yield Push(
            to=THE_SERVER, key=REPORT, stamp=stamp, payload=() if parts else payload, about=encode(report)
        )
        if receipt.version != FATE_UNKNOWN:
            return receipt
        for number in decode(receipt.about, Fate, THE_SERVER).missing:
            yield Push(to=THE_SERVER, key=PART, stamp=stamp, payload=(parts[number],), about=str(number))


MOST_MISSING = 1024  # parts requested by one receipt


@dataclass
class Upload:
    """The parts of one contribution, by number."""

    stamp: Stamp
    parts: dict[int, Tensor] = field(default_factory=dict)
    nbytes: int = 0
    empty: int = 0  # parts without elements, which use memory but no bytes


class Uploads:
    """One upload per device: a later contribution replaces it, an earlier one does not."""

    def __init__(self) -> None:
        self._uploads: dict[int, Upload] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all stored parts."""
        return sum(upload.nbytes for upload in self._uploads.values())

    def add(self, client: int, stamp: Stamp, number: int, part: Tensor, most_bytes: int, most_empty: int = 0) -> None:
        """Keep a part, the first of its number. Raises MalformedError above `most_bytes` bytes or `most_empty` parts
        without elements."""
        upload = self._uploads.get(client)
        if upload is None or (upload.stamp.step, upload.stamp.known) < (stamp.step, stamp.known):
            upload = self._uploads[client] = Upload(stamp)
        if upload.stamp != stamp or number in upload.parts:
            return
        if upload.nbytes + part.nbytes > most_bytes:
            raise MalformedError(
                f"it sent more than the {most_bytes} bytes that a contribution has with this federation's recipe"
            )
        if not part.numel() and upload.empty == most_empty:
            raise MalformedError(f"it sent more than the {most_empty} empty parts that a contribution has")
        upload.parts[number] = part
        upload.nbytes += part.nbytes
        upload.empty += not part.numel()

    def missing(self, client: int, stamp: Stamp, parts: int) -> tuple[int, ...]:
        """The first missing parts, at most MOST_MISSING."""
        upload = self._uploads.get(client)
        held = upload.parts if upload is not None and upload.stamp == stamp else {}
        found: list[int] = []
        for number in range(parts):
            if number not in held:
                found.append(number)
                if len(found) == MOST_MISSING:
                    break
        return tuple(found)

    def take(self, client: int, report: Report) -> Payload:
        """Remove and return the payload of a device's parts, which are complete. Raises MalformedError."""
        held = self._uploads.pop(client).parts
        return assembled([held[number] for number in range(report.parts)], report.shapes)

    def drop(self, client: int) -> None:
        """Drop the device's upload, if any."""
        self._uploads.pop(client, None)
