"""Agreement: what a server and the devices of one masked round have in common, and the keys that they publish.

Phases, each a push of every device whose receipt comes when the phase ends: KEYS (public keys, signed), SHARES (shares
of its two secrets for each neighbor, sealed), the report with the masked vector, CONSENT (its signature under the list
of devices that sent one), REVEAL (one share a neighbor, once a quorum has signed the same list)."""

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

from gossamer.algorithms.strategies.federated.secure_aggregation import SecureAggregation
from gossamer.base import rng
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError
from gossamer.federated.messages import Count, SecureTask
from gossamer.federated.secure_aggregation.fixed_point import FixedPoint
from gossamer.federated.secure_aggregation.identities import Identity, IdentityRoster
from gossamer.federated.secure_aggregation.masking import SHARE_BYTES, TAG_BYTES, SumRing

Neighbors = dict[int, tuple[int, ...]]  # by device, ascending


def mask_graph(members: Sequence[int], neighbors: int | None, key: int) -> Neighbors:
    """All others, or `neighbors` of them (one more where that is odd): the nearest on a ring in random order.

    members: ascending. The same for the same key, so that devices can see that the server follows it.
    source: Bell et al. 2020, CCS (a Harary graph over a random order)
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
    """How many of so many holders give a secret back: above a half, so that no two disjoint groups can."""
    return max(2, holders // 2 + 1, ceil(threshold * holders - 1e-9))


KEYS, SHARES, CONSENT, REVEAL = "secure keys", "secure shares", "secure consent", "secure reveal"  # keys of pushes
FEWEST_MEMBERS = 3  # of fewer, one could subtract its own part from the sum and see the other's
SEALED_BYTES = 2 * SHARE_BYTES + TAG_BYTES


class Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose rows a payload has, in its order."""

    clients: tuple[Count, ...]


class Survivors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of whose vectors the sum is made: all of the cohort that sent one, ascending.

    Of these, a share of the seed of their own mask is asked for; of others, one of the key of the masks they share.
    """

    active: tuple[Count, ...]


@dataclass(frozen=True)
class Agreement:
    """One round's terms. Their hash goes into all signatures and keys: who was told others agrees with nobody."""

    secure: SecureAggregation
    index: int  # of the round
    version: int
    members: tuple[int, ...]
    ranges: tuple[float, ...]
    count: int  # numbers of a message
    federation: str  # fingerprint of the model, the seed, and how contributions become whole numbers

    def __post_init__(self) -> None:
        """Raises MalformedError."""
        if len(self.members) < FEWEST_MEMBERS or any(a >= b for a, b in pairwise(self.members)):
            raise MalformedError(
                f"round {self.index} has the cohort {list(self.members[:10])}: masks hide a device among others, "
                f"at least {FEWEST_MEMBERS} together and each named once, ascending"
            )
        if not self.ranges or not all(0 < each < 1e300 for each in self.ranges):
            raise MalformedError(f"round {self.index} has the ranges {list(self.ranges[:10])}, which are above 0")

    @classmethod
    def of(cls, form: FixedPoint, task: SecureTask, index: int, version: int, layout: str) -> Agreement:
        """Of a round. layout: fingerprint of the model's state. Raises MalformedError."""
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
        """Of its shares: 1 and above."""
        return self._places[client]

    def shares_needed(self, holders: int) -> int:
        """Of a secret that so many devices hold shares of."""
        return shares_needed(self.secure.threshold, holders)

    @property
    def quorum(self) -> int:
        """Devices that sign who sent a vector before anyone gives shares away: so many of the cohort that two quorums
        have honest devices in common, which sign one list."""
        return max(self.shares_needed(len(self.members)), FEWEST_MEMBERS)

    def consent(self, active: Sequence[int]) -> bytes:
        """What a device signs of whose vectors the sum is made."""
        return self.purpose(b"consent", *active)

    @property
    def survivors(self) -> int:
        """Devices that every sum has at least, where they share the noise of its privacy."""
        return max(int(self.secure.threshold * len(self.members)), FEWEST_MEMBERS)

    def fewest_around(self, client: int) -> int:
        """Devices, itself among them, without which none gives anything away: half of its neighbors, and of a whole
        cohort at least FEWEST_MEMBERS."""
        around = len(self.graph[client]) + 1
        return max(ceil(around / 2), FEWEST_MEMBERS if around == len(self.members) else 2)

    def purpose(self, what: bytes, *clients: int) -> bytes:
        """Of a key of so many devices in this round."""
        return b"".join([what, b" ", self.context, *(each.to_bytes(8, "big") for each in clients)])


@dataclass(frozen=True)
class PublishedKeys:
    """What a device publishes for one round. Signed, so that the server cannot put keys of its own in their place."""

    sealing: bytes  # X25519: shares for this device are sealed with it
    masking: bytes  # X25519: masks are agreed on with it
    commitment: bytes  # to the seed of its own mask
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
        """Raises MalformedError, naming the client, unless its identity signed them for this round."""
        roster.check(client, self._message(agreement, client), self.signature)

    def _message(self, agreement: Agreement, client: int) -> bytes:
        return agreement.purpose(b"keys", client) + self.sealing + self.masking + self.commitment


ROW_BYTES = sum(PublishedKeys.LENGTHS)


def rows_payload(rows: Sequence[bytes], width: int) -> Payload:
    """Rows of so many bytes as one tensor: (rows, width) uint8."""
    return (torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, width) if rows else _none(width),)


def payload_rows(payload: Payload, count: int, width: int, sender: str) -> list[bytes]:
    """The rows of a payload. Raises MalformedError, naming the sender, where it has others."""
    shapes = [(tuple(each.shape), each.dtype) for each in payload]
    if shapes != [((count, width), torch.uint8)]:
        raise MalformedError(f"{sender} sent {shapes[:4]}, and {count} rows of {width} bytes were due")
    whole = payload[0].contiguous().numpy().tobytes()
    return [whole[start : start + width] for start in range(0, count * width, width)]


def _none(width: int) -> Tensor:
    return torch.empty((0, width), dtype=torch.uint8)
