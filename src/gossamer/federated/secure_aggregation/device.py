"""Device under masks: publishes keys, shares its secrets among neighbors, masks its vector, reveals one share of each.

It gives the share of a device's seed or of its key, never both, and only once a quorum of the cohort has signed the
same list of who sent a vector: a server that tells devices different lists learns nothing from any of them.
source: Bonawitz et al. 2017, CCS, figure 4 (with the consistency check)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Push, Receipt, Stamp
from gossamer.errors import MalformedError
from gossamer.federated.messages import GO_ON, NOT_COUNTED, PART_BYTES, THE_SERVER, Report, decode, deliver
from gossamer.federated.secure_aggregation.agreement import (
    CONSENT,
    KEYS,
    REVEAL,
    ROW_BYTES,
    SEALED_BYTES,
    SHARES,
    Agreement,
    Listed,
    PublishedKeys,
    Survivors,
    payload_rows,
    rows_payload,
)
from gossamer.federated.secure_aggregation.identities import SIGNATURE_BYTES, Identity, IdentityRoster
from gossamer.federated.secure_aggregation.masking import (
    KEY_BYTES,
    SHARE_BYTES,
    AgreementKey,
    Integers,
    add_mask,
    commitment,
    opened,
    pairwise_sign,
    sealed,
    split,
)

NO_SHARE = b"\xff" * SHARE_BYTES  # in the place of one that could not be opened: no number of the field
Shares = tuple[bytes, bytes]  # of a device's seed, and of its masking key


class DeviceSecrets:
    """One device's secrets of one round, in memory only: after a restart it can tell nothing of them."""

    def __init__(
        self, agreement: Agreement, number: int, identity: Identity, roster: IdentityRoster, fewest: int = 0
    ) -> None:
        """fewest: devices that a sum must have, beside a quorum.

        Raises MalformedError where the device is none of the cohort."""
        if number not in agreement.graph:
            raise _lie(f"asks client {number} for a part in round {agreement.index}, whose cohort it is not in")
        self._agreement, self._number, self._identity, self._roster = agreement, number, identity, roster
        self._sealing, self._masking, self._seed = AgreementKey(), AgreementKey(), os.urandom(KEY_BYTES)
        self.published = PublishedKeys(self._sealing.public, self._masking.public, commitment(self._seed)).signed(
            agreement, number, identity
        )
        self._neighbors: dict[int, PublishedKeys] = {}
        self._held: dict[int, Shares | None] = {}  # by owner; None: they could not be opened
        self._fewest = max(fewest, agreement.quorum)  # devices that a sum is made of
        self._needed = 0  # shares, for a secret of its own
        self._active: tuple[int, ...] = ()  # whose vectors make the sum, once it has signed that
        self._revealed = False

    def seal_shares(self, neighbors: Mapping[int, PublishedKeys]) -> list[bytes]:
        """Shares of both secrets for each neighbor that published keys, in their order. Raises MalformedError."""
        agreement, own = self._agreement, self._number
        if not set(neighbors) <= set(agreement.graph[own]):
            raise _lie(f"gives client {own} other neighbors than the round's")
        self._needed = agreement.shares_needed(len(neighbors) + 1)
        self._expect_enough(len(neighbors) + 1)
        for client, published in neighbors.items():
            published.check(agreement, client, self._roster)
        self._neighbors = dict(neighbors)
        places = [agreement.place(client) for client in (own, *neighbors)]
        of_seed = split(self._seed, self._needed, places)
        of_key = split(self._masking.private, self._needed, places)
        self._held[own] = of_seed[places[0]], of_key[places[0]]
        return [
            sealed(self._sealing_key(client, own, client), of_seed[place] + of_key[place], b"")
            for client, place in zip(neighbors, places[1:], strict=True)
        ]

    def open_shares(self, sealed_shares: Mapping[int, bytes]) -> None:
        """Keep the shares that neighbors sealed for this device, who thereby take part. Raises MalformedError.

        One that cannot be opened was changed on its way, or made so: it is missing, and others may do without it.
        """
        if not set(sealed_shares) <= set(self._neighbors) or self._number in sealed_shares:
            raise _lie(f"brings client {self._number} shares of clients that published no keys to it")
        self._expect_enough(len(sealed_shares) + 1)
        for client, each in sealed_shares.items():
            plain = opened(self._sealing_key(client, client, self._number), each, b"")
            self._held[client] = None if plain is None else (plain[:SHARE_BYTES], plain[SHARE_BYTES:])

    def masked(self, integers: Integers) -> Payload:
        """The vector that travels, packed. integers: (d,)."""
        agreement, own = self._agreement, self._number
        vector = agreement.ring.wrapped(integers)
        add_mask(vector, self._seed, 1)
        for client in self._held:
            if client != own:
                key = mask_key(agreement, self._masking, self._neighbors[client].masking, own, client)
                add_mask(vector, key, pairwise_sign(own, client))
        return (torch.from_numpy(agreement.ring.packed(vector)),)

    def consent(self, active: Sequence[int]) -> bytes:
        """Its signature under whose vectors make the sum; it signs one list. Raises MalformedError."""
        told, own = tuple(active), self._number
        if any(a >= b for a, b in pairwise(told)):
            raise _lie("names a client twice")
        if own not in told:
            raise _lie(f"says that client {own} left, which has just sent its vector")
        around = set(told).intersection(self._agreement.graph[own])
        if strange := sorted(set(told) - set(self._agreement.members) | around - set(self._held)):
            raise _lie(f"has vectors of clients {strange[:10]}, which client {own} shares no masks with")
        if self._active not in ((), told):
            raise _lie(f"asks client {own} to sign another list than before")
        self._expect_enough(len(around) + 1)
        if len(told) < self._fewest:
            raise _lie(f"makes a sum of {len(told)} vectors, and {self._fewest} are needed")
        self._active = told
        return self._identity.sign(self._agreement.consent(told))

    def reveal(self, consents: Mapping[int, bytes]) -> list[bytes]:
        """One share of each device that it shares masks with, and of itself, by ascending number: of the seed of those
        that are in the list that it signed, of the key of others.

        consents: signatures under that list, by client. Raises MalformedError, and tells nothing, unless a quorum
        signed it, or where the server asks once more.
        """
        if self._revealed:
            raise _lie(f"asks client {self._number} for shares a second time")
        agreement, message = self._agreement, self._agreement.consent(self._active)
        signed = 0
        for client in sorted(set(consents).intersection(self._active)):
            signed += self._roster.signed(client, message, consents[client])
            if signed == agreement.quorum:
                break
        else:
            raise _lie(
                f"shows {signed} signatures under the list of vectors that client {self._number} was told, and "
                f"{agreement.quorum} are needed: others may have been told another list"
            )
        self._revealed = True
        found = []
        for client in sorted(self._held):
            held = self._held[client]
            found.append(NO_SHARE if held is None else held[0] if client in self._active else held[1])
        return found

    def _expect_enough(self, devices: int) -> None:
        needed = max(self._needed, self._agreement.fewest_around(self._number))
        if devices < needed:
            raise _lie(f"goes on with {devices} of the devices around client {self._number}, and {needed} are needed")

    def _sealing_key(self, other: int, sender: int, receiver: int) -> bytes:
        purpose = self._agreement.purpose(b"seal", sender, receiver)
        return self._sealing.agreed(self._neighbors[other].sealing, purpose)


def mask_key(agreement: Agreement, private: AgreementKey, public: bytes, one: int, other: int) -> bytes:
    """Of the mask that two devices share."""
    return private.agreed(public, agreement.purpose(b"mask", min(one, other), max(one, other)))


def upload_masked(
    secrets: DeviceSecrets,
    stamp: Stamp,
    report: Report,
    integers: Integers,
    keep: Callable[[Payload], None] = lambda payload: None,
    part_bytes: int = PART_BYTES,
) -> Generator[Any, Any, int]:
    """A device's part after training: all phases; returns the version that it was counted in, or NOT_COUNTED.

    keep: called with the masked vector before it leaves. Raises MalformedError, naming what the server said, where
    that would lay an update open.
    """
    told = yield Push(to=THE_SERVER, key=KEYS, stamp=stamp, payload=rows_payload([secrets.published.row], ROW_BYTES))
    if told.version != GO_ON:
        return _fate(told)
    rows = _listed(told, ROW_BYTES)
    own = secrets.seal_shares({client: PublishedKeys.of_row(row) for client, row in rows.items()})
    told = yield Push(to=THE_SERVER, key=SHARES, stamp=stamp, payload=rows_payload(own, SEALED_BYTES))
    if told.version != GO_ON:
        return _fate(told)
    secrets.open_shares(_listed(told, SEALED_BYTES))
    masked = secrets.masked(integers)
    keep(masked)
    told = yield from deliver(stamp, report, masked, part_bytes)
    if told.version != GO_ON:
        return _fate(told)
    consent = secrets.consent(decode(told.about, Survivors, THE_SERVER).active)
    told = yield Push(to=THE_SERVER, key=CONSENT, stamp=stamp, payload=rows_payload([consent], SIGNATURE_BYTES))
    if told.version != GO_ON:
        return _fate(told)
    shares = secrets.reveal(_listed(told, SIGNATURE_BYTES))
    told = yield Push(to=THE_SERVER, key=REVEAL, stamp=stamp, payload=rows_payload(shares, SHARE_BYTES))
    return _fate(told)


def nothing_to_reveal(stamp: Stamp) -> Generator[Any, Any, int]:
    """Of a device that was restarted after its vector left: it has no shares any more, and asks for the fate."""
    told = yield Push(to=THE_SERVER, key=REVEAL, stamp=stamp)
    return _fate(told)


def _listed(told: Receipt, width: int) -> dict[int, bytes]:
    clients = decode(told.about, Listed, THE_SERVER).clients
    if len(set(clients)) < len(clients):
        raise _lie("names a client twice")
    rows = payload_rows(told.payload, len(clients), width, str(THE_SERVER))
    return dict(sorted(zip(clients, rows, strict=True)))


def _fate(told: Receipt) -> int:
    if told.version < NOT_COUNTED:
        raise _lie(f"answers {told.version}, which is no fate of a contribution")
    return int(told.version)


def _lie(what: str) -> MalformedError:
    return MalformedError(f"{THE_SERVER} {what}; nothing was told to it")


def masked_report(layout: str) -> Report:
    """A report beside a masked vector, which says nothing of its device: what does is under the mask."""
    return Report(samples=1, steps=1, layout=layout)
