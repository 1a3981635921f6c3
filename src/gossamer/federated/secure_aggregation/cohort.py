"""Secure cohort: the server's side of one masked round: the phases, their devices, and the sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import combinations
from math import comb
from random import Random

import numpy as np
import torch

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Receipt
from gossamer.errors import MalformedError
from gossamer.federated.messages import GO_ON, encode
from gossamer.federated.secure_aggregation.agreement import (
    ROW_BYTES,
    SEALED_BYTES,
    Agreement,
    Listed,
    PublishedKeys,
    Survivors,
    payload_rows,
    rows_payload,
)
from gossamer.federated.secure_aggregation.device import NO_SHARE, mask_key
from gossamer.federated.secure_aggregation.identities import SIGNATURE_BYTES, IdentityRoster
from gossamer.federated.secure_aggregation.masking import (
    SHARE_BYTES,
    AgreementKey,
    Integers,
    add_mask,
    commitment,
    join,
    pairwise_sign,
    share_at,
)

MOST_TRIES = 64  # sets of holders to try if shares are inconsistent


class Phase(Enum):
    """The kind of message that the server waits for."""

    KEYS = "keys"
    SHARES = "shares"
    MASKED = "masked vectors"
    CONSENT = "signatures of the list of vectors"
    REVEAL = "shares to unmask their sum"


class SecureCohort:
    """One masked round. Identical repeated messages count once; contradictory or late messages raise MalformedError.

    Args:
        agreement: the terms of the round.
        roster: identities of the devices.
        fewest: smallest number of devices in a sum, in addition to the quorum.
    """

    def __init__(self, agreement: Agreement, roster: IdentityRoster, fewest: int = 0) -> None:
        self.agreement, self._roster = agreement, roster
        self.phase = Phase.KEYS
        self.live: set[int] = set(agreement.members)  # devices still in the round
        self.hopeless = ""  # reason why the round cannot end
        self.liars: dict[int, str] = {}  # devices with inconsistent shares, and the reason
        self._published: dict[int, PublishedKeys] = {}
        self._needed: dict[int, int] = {}  # shares needed per owner, from its neighbors that published keys
        self.fewest = max(fewest, agreement.quorum)  # devices that must stay until shares are revealed
        self._sealed: dict[int, dict[int, bytes]] = {}  # by sender and receiver
        self._active: set[int] = set()
        self._vector = np.zeros(agreement.count, agreement.ring.dtype)
        self._consents: dict[int, bytes] = {}
        self._mute: set[int] = set()  # active devices that lost their shares in a restart
        self._shares: dict[int, dict[int, bytes]] = {}  # by owner and holder
        self._revealed: set[int] = set()
        self._secrets: dict[int, bytes] = {}

    # Pushes of devices. All raise MalformedError and then change nothing.

    def take_keys(self, client: int, payload: Payload) -> None:
        (row,) = payload_rows(payload, 1, ROW_BYTES, f"client {client}")
        published = PublishedKeys.of_row(row)
        if client in self._published and self._published[client] != published:
            raise MalformedError(f"client {client} restarted round {self.agreement.index}, and is too late for it")
        if client not in self._published:
            self._expect(client, Phase.KEYS)
            published.check(self.agreement, client, self._roster)
            self._published[client] = published

    def take_shares(self, client: int, payload: Payload) -> None:
        if client in self._sealed:
            return
        self._expect(client, Phase.SHARES)
        receivers = self._around(client, self.live)
        rows = payload_rows(payload, len(receivers), SEALED_BYTES, f"client {client}")
        self._sealed[client] = dict(zip(receivers, rows, strict=True))

    def take_masked(self, client: int, payload: Payload) -> None:
        self._expect(client, Phase.MASKED)
        if len(payload) != 1 or payload[0].dtype != torch.uint8 or payload[0].dim() != 1:
            raise MalformedError(f"client {client} sent no masked vector")
        vector = self.agreement.ring.unpacked(payload[0].numpy(), self.agreement.count)
        np.add(self._vector, vector, out=self._vector)
        self._active.add(client)

    def take_consent(self, client: int, payload: Payload) -> None:
        """Keep a device's signature, which may arrive late."""
        if self.phase not in (Phase.CONSENT, Phase.REVEAL) or client not in self._active:
            raise MalformedError(f"client {client} was not asked to sign the list of vectors")
        (row,) = payload_rows(payload, 1, SIGNATURE_BYTES, f"client {client}")
        self._roster.check(client, self.agreement.consent(self.survivors), row, "lists of vectors")
        self._consents[client] = row

    def take_reveal(self, client: int, payload: Payload) -> None:
        """Keep a device's shares, and recover the secrets that they complete. An empty payload: the device has none."""
        if client in self._revealed:
            return
        if client in self._active and not payload and self.phase in (Phase.CONSENT, Phase.REVEAL):
            self._mute.add(client)
            return
        if self.phase is not Phase.REVEAL or client not in self._active:
            raise MalformedError(f"client {client} was not asked for shares")
        owners = sorted({client, *self._around(client, self.live)})
        rows = payload_rows(payload, len(owners), SHARE_BYTES, f"client {client}")
        self._revealed.add(client)
        for owner, row in zip(owners, rows, strict=True):
            if row != NO_SHARE:
                self._shares.setdefault(owner, {})[client] = row
                self._recover(owner)

    def _expect(self, client: int, phase: Phase) -> None:
        if self.phase is not phase or client not in self.live:
            raise MalformedError(
                f"client {client} was too slow: round {self.agreement.index} waits for {self.phase.value}"
            )

    # Phases.

    def waits_for(self) -> set[int]:
        """Devices that have not yet sent the message of this phase."""
        count_received: dict[Phase, Iterable[int]] = {
            Phase.KEYS: self._published, Phase.SHARES: self._sealed,
            Phase.MASKED: self._active, Phase.CONSENT: self._consents, Phase.REVEAL: self._revealed,
        }  # fmt: skip
        asked = self._active - self._mute if self.phase in (Phase.CONSENT, Phase.REVEAL) else self.live
        return asked.difference(count_received[self.phase])

    def count_received(self) -> int:
        return len(self.live) - len(self.waits_for())

    def go_on(self) -> None:
        """End the phase with the devices that answered; `hopeless` has the reason if they are too few."""
        late = self.waits_for()
        match self.phase:
            case Phase.KEYS:
                self._go_on_with(self.live - late, Phase.SHARES)
                for client in self.live:
                    self._needed[client] = self.agreement.shares_needed(len(self._around(client, self.live)) + 1)
            case Phase.SHARES:
                self._go_on_with(self.live - late, Phase.MASKED)
            case Phase.MASKED:
                self.phase = Phase.CONSENT
                self._expect_fewest(len(self._active))
                unknown = [owner for owner in self._secret_owners() if not self._has_holders(owner, self._active)]
                if unknown:
                    self.hopeless = f"too few are left around clients {unknown[:10]} to unmask the sum"
            case Phase.CONSENT:
                self.phase = Phase.REVEAL
                if len(self._consents) < self.agreement.quorum:
                    self.hopeless = (
                        f"{len(self._consents)} devices signed the list of vectors in the sum, but "
                        f"{self.agreement.quorum} signatures are needed"
                    )
            case Phase.REVEAL:
                self.hopeless = f"too few devices sent their shares to unmask the sum: {sorted(late)[:10]} did not"

    def _go_on_with(self, live: set[int], phase: Phase) -> None:
        alone: set[int] = {-1}
        while alone:  # a device with too few neighbors leaves, which can leave others with too few
            alone = {client for client in live if not self._has_holders(client, live)}
            live = live - alone
        self.live, self.phase = live, phase
        self._expect_fewest(len(live))

    def _expect_fewest(self, devices: int) -> None:
        if devices < self.fewest:
            self.hopeless = (
                f"{devices} of {len(self.agreement.members)} devices are left, but {self.fewest} are needed to hide "
                "each other"
            )

    def _has_holders(self, owner: int, among: set[int]) -> bool:
        holders = len(self._around(owner, among)) + (owner in among)
        return holders >= max(self._needed.get(owner, 0), self.agreement.fewest_around(owner))

    def _around(self, client: int, among: Iterable[int]) -> list[int]:
        """The device's neighbors in `among`, ascending."""
        found = set(among)
        return [other for other in self.agreement.graph[client] if other in found]

    # Receipts at the end of a phase.

    def keys_around(self, client: int) -> Receipt:
        listed = self._around(client, self.live if self.phase is Phase.SHARES else self._sealed_to(client))
        return _rows(listed, [self._published[other].row for other in listed], ROW_BYTES)

    def shares_for(self, client: int) -> Receipt:
        listed = self._around(client, self.live)
        return _rows(listed, [self._sealed[other][client] for other in listed], SEALED_BYTES)

    @property
    def survivors(self) -> tuple[int, ...]:
        """Devices with a vector in the sum, ascending."""
        return tuple(sorted(self._active))

    def survivors_receipt(self) -> Receipt:
        return Receipt(version=GO_ON, about=encode(Survivors(active=self.survivors)))

    def consents(self) -> Receipt:
        listed = sorted(self._consents)
        return _rows(listed, [self._consents[each] for each in listed], SIGNATURE_BYTES)

    def _sealed_to(self, client: int) -> set[int]:
        """Devices that it received keys of when the first phase ended."""
        return set(self._sealed.get(client, self._published))

    # The sum.

    def _secret_owners(self) -> list[int]:
        """Devices with a secret to recover: the seed of active ones, the key of others if an active one used it."""
        return [each for each in sorted(self.live) if each in self._active or self._around(each, self._active)]

    @property
    def is_unmasked(self) -> bool:
        return self.phase is Phase.REVEAL and all(owner in self._secrets for owner in self._secret_owners())

    def _recover(self, owner: int) -> None:
        needed, shares = self._needed[owner], self._shares[owner]
        if owner in self._secrets or len(shares) < needed:
            return
        for tries, holders in enumerate(self._holder_sets(shares, needed)):
            placed = {self.agreement.place(holder): shares[holder] for holder in holders}
            secret = _joined(placed)
            if secret is not None and self._is_secret_of(owner, secret):
                self._secrets[owner] = secret
                if tries:
                    self._name_liars(owner, placed)
                return

    def _holder_sets(self, holders: Iterable[int], needed: int) -> Iterator[tuple[int, ...]]:
        """Sets of `needed` holders, of which one may have only true shares. Holders of invalid shares come last.

        Of more than MOST_TRIES sets, some are drawn: in order, the first holders would be in all of them.
        """
        ordered = sorted(holders, key=lambda holder: (holder in self.liars, holder))
        if comb(len(ordered), needed) <= MOST_TRIES:
            yield from combinations(ordered, needed)
            return
        yield tuple(ordered[:needed])
        draw = Random(repr(ordered))  # the same for all owners, so that the weights of a set are computed once
        for _ in range(MOST_TRIES - 1):
            yield tuple(draw.sample(ordered, needed))

    def _is_secret_of(self, owner: int, secret: bytes) -> bool:
        published = self._published[owner]
        if owner in self._active:
            return commitment(secret) == published.commitment
        return AgreementKey(secret).public == published.masking

    def _name_liars(self, owner: int, placed: dict[int, bytes]) -> None:
        for holder, share in self._shares[owner].items():
            if share != share_at(placed, self.agreement.place(holder)):
                self.liars[holder] = f"client {holder} sent an invalid share of client {owner}; it was not used"

    def total(self) -> Integers:
        """(d,) the unmasked sum of the active devices' vectors."""
        vector = self._vector.copy()
        for owner in self._secret_owners():
            secret = self._secrets[owner]
            if owner in self._active:
                add_mask(vector, secret, -1)
                continue
            private = AgreementKey(secret)
            for other in self._around(owner, self._active):
                key = mask_key(self.agreement, private, self._published[other].masking, owner, other)
                add_mask(vector, key, -pairwise_sign(other, owner))
        return self.agreement.ring.centered(vector)

    @property
    def active(self) -> frozenset[int]:
        return frozenset(self._active)


def _joined(placed: dict[int, bytes]) -> bytes | None:
    try:
        return join(placed)
    except MalformedError:
        return None


def _rows(clients: list[int], rows: list[bytes], width: int) -> Receipt:
    return Receipt(version=GO_ON, payload=rows_payload(rows, width), about=encode(Listed(clients=tuple(clients))))
