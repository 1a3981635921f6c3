"""Device under masks: publishes keys, shares its secrets with neighbors, masks its vector, reveals one share of each.

It reveals a share of another device's seed or of its key, never both, and only after a quorum of the cohort has signed
the same list of devices with vectors. A server that sends different lists therefore learns nothing from any of them.
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

NO_SHARE = b"\xff" * SHARE_BYTES  # replaces a share that could not be decrypted; not an element of the field
Shares = tuple[bytes, bytes]  # of a device's seed, and of its masking key


class DeviceSecrets:
    """One device's secrets of one round. They are in memory only, so a restarted device cannot reveal shares.

    Args:
        agreement: the terms of the round.
        number: of the device.
        identity: its private key.
        roster: identities of all devices.
        fewest: smallest number of devices in a sum, in addition to the quorum.

    Raises:
        MalformedError: the device is not in the cohort.
    """

    def __init__(
        self, agreement: Agreement, number: int, identity: Identity, roster: IdentityRoster, fewest: int = 0
    ) -> None:
        if number not in agreement.graph:
            raise _violation(f"asks client {number} for a part in round {agreement.index}, but it is not in the cohort")
        self._agreement, self._number, self._identity, self._roster = agreement, number, identity, roster
        self._sealing, self._masking, self._seed = AgreementKey(), AgreementKey(), os.urandom(KEY_BYTES)
        self.published = PublishedKeys(self._sealing.public, self._masking.public, commitment(self._seed)).signed(
            agreement, number, identity
        )
        self._neighbors: dict[int, PublishedKeys] = {}
        self._held: dict[int, Shares | None] = {}  # by owner; None: could not be decrypted
        self._fewest = max(fewest, agreement.quorum)  # devices in a sum
        self._needed = 0  # shares needed to recover a secret of this device
        self._active: tuple[int, ...] = ()  # devices in the list that this device signed
        self._revealed = False

    def seal_shares(self, neighbors: Mapping[int, PublishedKeys]) -> list[bytes]:
        """Shares of both secrets, encrypted for each neighbor with published keys, in order. Raises MalformedError."""
        agreement, number = self._agreement, self._number
        if not set(neighbors) <= set(agreement.graph[number]):
            raise _violation(f"gives client {number} other neighbors than the round's")
        self._needed = agreement.shares_needed(len(neighbors) + 1)
        self._expect_enough(len(neighbors) + 1)
        for client, published in neighbors.items():
            published.check(agreement, client, self._roster)
        self._neighbors = dict(neighbors)
        places = [agreement.place(client) for client in (number, *neighbors)]
        of_seed = split(self._seed, self._needed, places)
        of_key = split(self._masking.private, self._needed, places)
        self._held[number] = of_seed[places[0]], of_key[places[0]]
        return [
            sealed(self._sealing_key(client, number, client), of_seed[place] + of_key[place], b"")
            for client, place in zip(neighbors, places[1:], strict=True)
        ]

    def open_shares(self, sealed_shares: Mapping[int, bytes]) -> None:
        """Keep the shares that neighbors encrypted for this device. These neighbors are in the round.

        A share that cannot be decrypted is treated as missing, and other holders may replace it. Raises MalformedError.
        """
        if not set(sealed_shares) <= set(self._neighbors) or self._number in sealed_shares:
            raise _violation(f"brings client {self._number} shares of clients without published keys")
        self._expect_enough(len(sealed_shares) + 1)
        for client, each in sealed_shares.items():
            plain = opened(self._sealing_key(client, client, self._number), each, b"")
            self._held[client] = None if plain is None else (plain[:SHARE_BYTES], plain[SHARE_BYTES:])

    def masked(self, integers: Integers) -> Payload:
        """The masked vector, packed for sending. integers: (d,)."""
        agreement, number = self._agreement, self._number
        vector = agreement.ring.wrapped(integers)
        add_mask(vector, self._seed, 1)
        for client in self._held:
            if client != number:
                key = mask_key(agreement, self._masking, self._neighbors[client].masking, number, client)
                add_mask(vector, key, pairwise_sign(number, client))
        return (torch.from_numpy(agreement.ring.packed(vector)),)

    def consent(self, active: Sequence[int]) -> bytes:
        """Sign the list of devices with vectors in the sum. A device signs only one list. Raises MalformedError."""
        receipt, number = tuple(active), self._number
        if any(a >= b for a, b in pairwise(receipt)):
            raise _violation("names a client twice")
        if number not in receipt:
            raise _violation(f"lists client {number} as missing although it has sent its vector")
        around = set(receipt).intersection(self._agreement.graph[number])
        if strange := sorted(set(receipt) - set(self._agreement.members) | around - set(self._held)):
            raise _violation(f"lists vectors of clients {strange[:10]}, but client {number} shares no masks with them")
        if self._active not in ((), receipt):
            raise _violation(f"asks client {number} to sign another list than before")
        self._expect_enough(len(around) + 1)
        if len(receipt) < self._fewest:
            raise _violation(f"makes a sum of {len(receipt)} vectors, but {self._fewest} are needed")
        self._active = receipt
        return self._identity.sign(self._agreement.consent(receipt))

    def reveal(self, consents: Mapping[int, bytes]) -> list[bytes]:
        """Reveal one share of each device that it shares masks with, and of itself, by ascending number.

        The share is of the seed for devices in the signed list, and of the key for all others.

        Args:
            consents: signatures of that list, by client.

        Raises:
            MalformedError: no quorum signed the list, or this is a repeated request. Nothing is revealed.
        """
        if self._revealed:
            raise _violation(f"asks client {self._number} for shares a second time")
        agreement, message = self._agreement, self._agreement.consent(self._active)
        signed = 0
        for client in sorted(set(consents).intersection(self._active)):
            signed += self._roster.signed(client, message, consents[client])
            if signed == agreement.quorum:
                break
        else:
            raise _violation(
                f"shows {signed} signatures of the list of vectors that client {self._number} received, and "
                f"{agreement.quorum} are needed: others may have received another list"
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
            raise _violation(
                f"continues with {devices} of the devices around client {self._number}, and {needed} are needed"
            )

    def _sealing_key(self, other: int, sender: int, receiver: int) -> bytes:
        purpose = self._agreement.purpose(b"seal", sender, receiver)
        return self._sealing.agreed(self._neighbors[other].sealing, purpose)


def mask_key(agreement: Agreement, private: AgreementKey, public: bytes, one: int, other: int) -> bytes:
    """The key of the pairwise mask of two devices."""
    return private.agreed(public, agreement.purpose(b"mask", min(one, other), max(one, other)))


def upload_masked(
    secrets: DeviceSecrets,
    stamp: Stamp,
    report: Report,
    integers: Integers,
    keep: Callable[[Payload], None] = lambda payload: None,
    part_bytes: int = PART_BYTES,
) -> Generator[Any, Any, int]:
    """Run a device's phases after training.

    Args:
        secrets: of this device and round.
        stamp: of the contribution.
        report: a `masked_report`.
        integers: (d,) the quantized contribution.
        keep: called with the masked vector before it is sent.
        part_bytes: size of the parts of an upload.

    Returns:
        The version that the contribution is counted in, or NOT_COUNTED.

    Raises:
        MalformedError: the server sent a message that could expose the update.
    """
    receipt = yield Push(to=THE_SERVER, key=KEYS, stamp=stamp, payload=rows_payload([secrets.published.row], ROW_BYTES))
    if receipt.version != GO_ON:
        return _fate(receipt)
    rows = _listed(receipt, ROW_BYTES)
    shares = secrets.seal_shares({client: PublishedKeys.of_row(row) for client, row in rows.items()})
    receipt = yield Push(to=THE_SERVER, key=SHARES, stamp=stamp, payload=rows_payload(shares, SEALED_BYTES))
    if receipt.version != GO_ON:
        return _fate(receipt)
    secrets.open_shares(_listed(receipt, SEALED_BYTES))
    masked = secrets.masked(integers)
    keep(masked)
    receipt = yield from deliver(stamp, report, masked, part_bytes)
    if receipt.version != GO_ON:
        return _fate(receipt)
    consent = secrets.consent(decode(receipt.about, Survivors, THE_SERVER).active)
    receipt = yield Push(to=THE_SERVER, key=CONSENT, stamp=stamp, payload=rows_payload([consent], SIGNATURE_BYTES))
    if receipt.version != GO_ON:
        return _fate(receipt)
    shares = secrets.reveal(_listed(receipt, SIGNATURE_BYTES))
    receipt = yield Push(to=THE_SERVER, key=REVEAL, stamp=stamp, payload=rows_payload(shares, SHARE_BYTES))
    return _fate(receipt)


def nothing_to_reveal(stamp: Stamp) -> Generator[Any, Any, int]:
    """For a device restarted after its vector was sent: report that it has no shares, and return the outcome."""
    receipt = yield Push(to=THE_SERVER, key=REVEAL, stamp=stamp)
    return _fate(receipt)


def _listed(receipt: Receipt, width: int) -> dict[int, bytes]:
    clients = decode(receipt.about, Listed, THE_SERVER).clients
    if len(set(clients)) < len(clients):
        raise _violation("names a client twice")
    rows = payload_rows(receipt.payload, len(clients), width, str(THE_SERVER))
    return dict(sorted(zip(clients, rows, strict=True)))


def _fate(receipt: Receipt) -> int:
    if receipt.version < NOT_COUNTED:
        raise _violation(f"answers with version {receipt.version}, which is invalid")
    return int(receipt.version)


def _violation(what: str) -> MalformedError:
    return MalformedError(f"{THE_SERVER} {what}; no secret was sent to it")


def masked_report(layout: str) -> Report:
    """The report sent with a masked vector. It carries no data of the device; the weight and steps are masked."""
    return Report(samples=1, steps=1, layout=layout)
