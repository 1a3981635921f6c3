"""Delivery: sends a contribution, in parts where it is long, and says again what the server does not have."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Push, Receipt, Stamp
from gossamer.federated.messages import (
    FATE_UNKNOWN,
    PART,
    PART_BYTES,
    REPORT,
    THE_SERVER,
    Fate,
    Report,
    decode,
    encode,
)
from gossamer.federated.upload import cut


def upload(
    stamp: Stamp, report: Report, payload: Payload, part_bytes: int = PART_BYTES, begun: bool = False
) -> Generator[Any, Any, int]:
    """Send a contribution; returns the version that it was counted in, or NOT_COUNTED."""
    receipt = yield from deliver(stamp, report, payload, part_bytes, begun)
    return int(receipt.version)


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
