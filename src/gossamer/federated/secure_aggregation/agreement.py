"""Agreement: the terms of one masked round, shared by the server and its devices, and the published keys.

In each phase every device pushes a message, and its receipt arrives at the end of the phase:
KEYS     public keys, signed
SHARES   shares of the device's two secrets, encrypted for each neighbor
(report) the masked vector
CONSENT  the device's signature of the list of devices with vectors
REVEAL   one share per neighbor, after a quorum has signed the same list
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from math import ceil
from random import Random

import msgspec
import numpy as np
import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules.secure_aggregation import SecureAggregation
from gossamer.base import rng
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError
from gossamer.federated.messages import Count, SecureTask
from gossamer.federated.secure_aggregation.fixed_point import FixedPoint
from gossamer.federated.secure_aggregation.identities import Identity, IdentityRoster
from gossamer.federated.secure_aggregation.masking import SHARE_BYTES, TAG_BYTES, SumRing

Neighbors = dict[int, tuple[int, ...]]  # by device, ascending


def mask_graph(members: Sequence[int], neighbors: int | None, key: int) -> Neighbors:
    """The neighbors that each device shares masks with.

    A Harary graph over a random order: the nearest `neighbors` on a ring (one more if that is odd).
    source: Bell et al. 2020, CCS

    Args:
        members: device numbers, ascending.
        neighbors: per device; None: all others.
        key: seed of the order, so that devices can verify the server's graph.
    """
    reach = len(members) if neighbors is None else ceil(neighbors / 2)
    if 2 * reach >= len(members) - 1:
        return {each: tuple(other for other in members if other != each) for each in members}
    ring = list(members)
    Random(rng.address("secure graph", key)).shuffle(ring)
    count = len(ring)
    return {
        each: tuple(sorted(ring[(place + step) % count] for step in range(-reach, reach + 1) if step))
        for place, each in enumerate(ring)
    }


def shares_needed(threshold: float, holders: int) -> int:
    """Number of holders that recover a secret: above a half, so that no two disjoint groups can."""
    return max(2, holders // 2 + 1, ceil(threshold * holders - 1e-9))


KEYS, SHARES, CONSENT, REVEAL = "secure keys", "secure shares", "secure consent", "secure reveal"  # keys of pushes
FEWEST_MEMBERS = 3  # with two, each could subtract its own part from the sum and see the other's
SEALED_BYTES = 2 * SHARE_BYTES + TAG_BYTES


class Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices of the rows of a payload, in order."""

    clients: tuple[Count, ...]


class Survivors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All devices of the cohort that sent a vector, ascending.

    Holders reveal shares of the self-mask seed of these devices, and shares of the masking key of all others.
    """

    active: tuple[Count, ...]


@dataclass(frozen=True)
class Agreement:
    """One round's terms. All signatures and keys include their hash, so that devices with other terms cannot join."""

    secure: SecureAggregation
    index: int  # of the round
    version: int
    members: tuple[int, ...]
    ranges: tuple[float, ...]
    count: int  # numbers of a message
    federation: str  # fingerprint of the model, the seed, and the encoding

    def __post_init__(self) -> None:
        """Raises MalformedError."""
        if len(self.members) < FEWEST_MEMBERS or any(a >= b for a, b in pairwise(self.members)):
            raise MalformedError(
                f"round {self.index} has the cohort {list(self.members[:10])}: it must have at least "
                f"{FEWEST_MEMBERS} devices, each named once, ascending"
            )
        if not self.ranges or not all(0 < each < 1e300 for each in self.ranges):
            raise MalformedError(f"round {self.index} has the ranges {list(self.ranges[:10])}, which must be above 0")

    @classmethod
    def of(cls, form: FixedPoint, task: SecureTask, index: int, version: int, layout: str) -> Agreement:
        """The terms of a round. layout: fingerprint of the model's state. Raises MalformedError."""
        if len(task.ranges) != form.blocks + 1:
            raise MalformedError(
                f"round {index} has {len(task.ranges)} ranges for {form.blocks} blocks and the weights: "
                "install the same version of Gossamer everywhere"
            )
        count, federation = form.count, f"{layout} {form.seed} {form.terms}"
        return cls(form.secure, index, version, task.members, task.ranges, count, federation)

    @cached_property
    def context(self) -> bytes:
        text = "\x1f".join(repr(getattr(self, item.name)) for item in fields(self))
        return hashlib.sha256(f"gossamer secure aggregation 1\x1f{text}".encode()).digest()

    @cached_property
    def ring(self) -> SumRing:
        return SumRing(self.secure.bits, len(self.members))

    @cached_property
    def graph(self) -> Neighbors:
        return mask_graph(self.members, self.secure.neighbors, rng.address(self.federation, self.index))

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return {client: place for place, client in enumerate(self.members, 1)}

    def place(self, client: int) -> int:
        """The device's place in secret sharing, from 1."""
        return self._places[client]

    def shares_needed(self, holders: int) -> int:
        """Number of shares that recover a secret shared among `holders` devices."""
        return shares_needed(self.secure.threshold, holders)

    @property
    def quorum(self) -> int:
        """Number of signatures of the list of vectors before any device reveals shares. Two quorums have honest devices
        in common, and an honest device signs only one list."""
        return max(self.shares_needed(len(self.members)), FEWEST_MEMBERS)

    def consent(self, active: Sequence[int]) -> bytes:
        """The message that a device signs to confirm the list of vectors."""
        return self.purpose(b"consent", *active)

    @property
    def survivors(self) -> int:
        """Smallest number of devices in a sum, which share the noise under DistributedPrivacy."""
        return max(int(self.secure.threshold * len(self.members)), FEWEST_MEMBERS)

    def fewest_around(self, client: int) -> int:
        """Smallest number of devices around a client, itself included, for which shares are revealed: half of its
        neighborhood, and at least FEWEST_MEMBERS in a complete graph."""
        around = len(self.graph[client]) + 1
        return max(ceil(around / 2), FEWEST_MEMBERS if around == len(self.members) else 2)

    def purpose(self, what: bytes, *clients: int) -> bytes:
        """Domain separation: bytes that name a use, this round and some devices."""
        return b"".join([what, b" ", self.context, *(each.to_bytes(8, "big") for each in clients)])


@dataclass(frozen=True)
class PublishedKeys:
    """Public keys of a device for one round. The signature prevents the server from substituting its own keys."""

    sealing: bytes  # X25519: to encrypt shares for this device
    masking: bytes  # X25519: to agree on masks
    commitment: bytes  # to the seed of the self-mask
    signature: bytes = b""

    LENGTHS = (32, 32, 32, 64)

    @property
    def row(self) -> bytes:
        return self.sealing + self.masking + self.commitment + self.signature

    @classmethod
    def of_row(cls, row: bytes) -> PublishedKeys:
        ends = np.cumsum((0, *cls.LENGTHS)).tolist()
        return cls(*(row[start:end] for start, end in pairwise(ends)))

    def signed(self, agreement: Agreement, client: int, identity: Identity) -> PublishedKeys:
        message = self._message(agreement, client)
        return PublishedKeys(self.sealing, self.masking, self.commitment, identity.sign(message))

    def check(self, agreement: Agreement, client: int, roster: IdentityRoster) -> None:
        """Raises MalformedError, naming the client, unless its identity signed these keys for this round."""
        roster.check(client, self._message(agreement, client), self.signature)

    def _message(self, agreement: Agreement, client: int) -> bytes:
        return agreement.purpose(b"keys", client) + self.sealing + self.masking + self.commitment


ROW_BYTES = sum(PublishedKeys.LENGTHS)


def rows_payload(rows: Sequence[bytes], width: int) -> Payload:
    """Rows of `width` bytes as one tensor: (rows, width) uint8."""
    return (torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, width) if rows else _none(width),)


def payload_rows(payload: Payload, count: int, width: int, sender: str) -> list[bytes]:
    """The rows of a payload. Raises MalformedError, naming the sender, for another shape."""
    shapes = [(tuple(each.shape), each.dtype) for each in payload]
    if shapes != [((count, width), torch.uint8)]:
        raise MalformedError(f"{sender} sent {shapes[:4]}, expected {count} rows of {width} bytes")
    whole = payload[0].contiguous().numpy().tobytes()
    return [whole[start : start + width] for start in range(0, count * width, width)]


def _none(width: int) -> Tensor:
    return torch.empty((0, width), dtype=torch.uint8)
