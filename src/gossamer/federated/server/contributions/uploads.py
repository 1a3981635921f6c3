"""Uploads: hold the parts of contributions that are still being sent, within a quota for each device."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Stamp
from gossamer.errors import MalformedError
from gossamer.federated.messages import Report
from gossamer.federated.upload import assembled

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

    def payload(self, client: int, report: Report) -> Payload:
        """What its parts make, none of which is missing. Raises MalformedError."""
        held = self._uploads[client].parts
        return assembled([held[number] for number in range(report.parts)], report.shapes)

    def drop(self, client: int) -> None:
        """Forget what a device has sent, if anything."""
        self._uploads.pop(client, None)
