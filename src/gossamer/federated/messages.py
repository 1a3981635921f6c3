"""Federated messages: what a server and a device tell each other beside tensors, as JSON in `about`.

A device asks for a task (Pull of TASK, from the version that it holds) and is answered once it is chosen. What it
learned goes up as parts of at most `part_bytes` (Push of PART, each acknowledged at once) and a report (Push of
REPORT), whose receipt comes when the fate of the contribution is known: counted in a version, or not and why. Stamps
are (client, round, version that it began from), so whatever is sent again is answered again and never counted twice.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from gossamer.base.json_text import read_json
from gossamer.base.peer_ops import SERVER, Peer
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


def decode(text: str, kind: type[Told], sender: Peer) -> Told:
    """Raises MalformedError."""
    try:
        found: Any = read_json(text)
        return msgspec.convert(found, kind, strict=True)
    except (ValueError, msgspec.ValidationError) as error:
        raise MalformedError(
            f"{sender} sent what is no {kind.__name__.lower()} ({error}); nothing of it was used. Install the same "
            "version of Gossamer everywhere"
        ) from error
