"""Invitations: what a device asks when it joins a federation, and what it is told, as JSON in `about`.

The wire's hello compares what both ends can know beforehand: Gossamer's version, the name RUN, and the fingerprint of
the model that the script makes. The recipe travels in the invitation, so a device needs the script and the server only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gossamer.federated.messages import PART_BYTES, Count

DEVICE = "device"  # the kind of a peer that joins; its number is an identity that it drew, not the client's number
RUN = "federated"  # of every federation, so that a run's workers and a federation's devices refuse each other
JOIN, LEAVE = "join", "leave"  # keys of asks
UNKNOWN = '{"unknown":true}'  # what a device is told that has not joined, or that a restarted server forgot


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device asks for."""

    number: Count | None = None  # the client that it wants to be; None: any that is free


class Invitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device is told of the federation, or why it may not take part."""

    refused: str = ""
    federation: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]*\Z", max_length=64)] = ""  # drawn at its beginning
    number: Count = 0
    recipe: Annotated[str, msgspec.Meta(max_length=100_000)] = ""
    clients: Count = 0
    rounds: Count = 0
    seed: Count = 0
    part_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**32)] = PART_BYTES
