"""Messages: what a server and a device send each other: tasks, reports and fates as JSON, contributions in parts.

A device asks for a task (Pull of TASK, from the version that it holds) and is answered once it is chosen. Its
contribution goes up as parts of at most `part_bytes` (Push of PART, each acknowledged at once) and a report (Push of
REPORT), whose receipt comes when the fate of the contribution is known: counted in a version, or not and why. Stamps
are (client, round, version that it began from), so a repeated message is answered again and never counted twice."""

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
TASK, PART, REPORT = "task", "part", "report"  # keys of asks
PART_BYTES = 1 << 20
FATE_UNKNOWN, NOT_COUNTED = -2, -1  # versions of a receipt: parts are missing; too late, or refused
GO_ON = -3  # version of a receipt: a phase of a round under masks has ended, and the next begins

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
LARGEST = 1e300  # number of a message, either sign
Finite = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Scalar = bool | int | float | str | None


class SecureTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """That a round is summed under masks, and what all devices of its cohort have alike."""

    members: tuple[Count, ...]  # numbers of its devices, ascending
    ranges: tuple[Finite, ...]  # of entries, by block of a contribution, then of weights


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a device is to do. The payload beside it brings its replica to `version`."""

    round: Count  # the contribution's stamp; ascends for every device
    version: Count
    chain: str = ""  # how to read the payload, as `Pulled.about` of a delta chain
    config: dict[str, Scalar] = {}  # the user's, for this round
    finished: bool = False  # the federation has ended, and there is nothing to do
    seed: Count = 0  # of this device's part in this round
    refused: str = ""  # why there is none, and never will be
    secure: SecureTask | None = None  # how the contribution is to be masked; None: it goes as it is
    lineage: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the version: one of another is of another past


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a device did."""

    samples: Count  # 0: it had nothing to train on, and no contribution follows
    steps: Count
    learning_rate: Finite = 0.0
    metrics: dict[str, Finite] = {}
    counts: tuple[Count, ...] = ()  # tensors of the message, by block
    parts: Count = 0  # that were sent before; 0: the payload is here
    shapes: tuple[tuple[Count, ...], ...] = ()  # of the payload's tensors, where it was sent in parts
    layout: str = ""  # fingerprint of the model's state
    train_seconds: Finite = 0.0
    failed: str = ""  # why there is no contribution, so that nobody waits for it


class Fate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of a contribution, in the receipt of its report."""

    refused: str = ""  # why it does not count, where it was not merely late
    missing: tuple[Count, ...] = ()  # parts that the server does not have, any more or yet


Told = TypeVar("Told", bound=msgspec.Struct)


def encode(told: msgspec.Struct) -> str:
    return msgspec.json.encode(told).decode()


def decode(text: str, kind: type[Told], sender: Peer | str) -> Told:
    """Raises MalformedError."""
    try:
        found: Any = read_json(text)
        return msgspec.convert(found, kind, strict=True)
    except (ValueError, msgspec.ValidationError) as error:
        raise MalformedError(
            f"{sender} sent an invalid {kind.__name__} message ({error}); nothing of it was used. Install the same "
            "version of Gossamer everywhere"
        ) from error


MOST_DIMENSIONS = 8


def cut(payload: Payload, part_bytes: int) -> list[Tensor]:
    """The payload in parts (m,) of at most so many bytes, tensors cut along their elements; none where it is short."""
    if payload_bytes(payload) <= part_bytes:
        return []
    parts: list[Tensor] = []
    for tensor in payload:
        flat = tensor.reshape(-1)
        parts += flat.split(max(part_bytes // flat.element_size(), 1)) if flat.numel() else [flat]
    return parts


def assembled(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Payload:
    """The payload of which these are the parts. Raises MalformedError where they are not."""
    if any(len(shape) > MOST_DIMENSIONS or prod(max(size, 1) for size in shape) > 1 << 60 for shape in shapes):
        raise MalformedError(f"a contribution has tensors of {len(shapes)} shapes, one of which no tensor has")
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
    """Send a contribution; returns the receipt of its report, or of a part of it that came too late.

    Each part is acknowledged by itself, so what a broken connection costs is one part. begun: parts may have arrived
    before this process began, so the server is asked first which it has not.
    """
    receipt: Receipt
    parts = cut(payload, part_bytes)
    for number, part in enumerate(() if begun else parts):
        receipt = yield Push(to=THE_SERVER, key=PART, stamp=stamp, payload=(part,), about=str(number))
        if receipt.version != FATE_UNKNOWN:  # it counted before, or the round is over
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


MOST_MISSING = 1024  # parts that one receipt asks for


@dataclass
class Upload:
    """The parts of one contribution, by number."""

    stamp: Stamp
    parts: dict[int, Tensor] = field(default_factory=dict)
    nbytes: int = 0
    empty: int = 0  # parts without elements, which take space and no bytes


class Uploads:
    """One upload a device: a contribution begun later replaces it, and nothing begun earlier does."""

    def __init__(self) -> None:
        self._uploads: dict[int, Upload] = {}

    @property
    def nbytes(self) -> int:
        """Of all parts that are held."""
        return sum(upload.nbytes for upload in self._uploads.values())

    def add(self, client: int, stamp: Stamp, number: int, part: Tensor, most_bytes: int, most_empty: int = 0) -> None:
        """Keep a part, the first of its number. most_empty: parts without elements. Raises MalformedError beyond these
        quotas."""
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
        """The first parts of so many that are not there."""
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
        """The payload of a device's parts, none of which is missing; they are forgotten. Raises MalformedError."""
        held = self._uploads.pop(client).parts
        return assembled([held[number] for number in range(report.parts)], report.shapes)

    def drop(self, client: int) -> None:
        """Forget what a device has sent, if anything."""
        self._uploads.pop(client, None)
