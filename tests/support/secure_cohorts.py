"""One round under masks without a network: devices' secrets and the server's cohort, driven phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from gossamer.algorithms.strategies.federated_rules import SecureAggregation
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Receipt
from gossamer.federated.messages import REPORT, THE_SERVER, decode
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
from gossamer.federated.secure_aggregation.cohort import SecureCohort
from gossamer.federated.secure_aggregation.device import DeviceSecrets
from gossamer.federated.secure_aggregation.identities import SIGNATURE_BYTES, SimulatedRoster
from gossamer.federated.secure_aggregation.masking import SHARE_BYTES, Integers


def agreement_of(
    members: Iterable[int] = range(5), *, index: int = 0, count: int = 8, **fields: float | int | None
) -> Agreement:
    secure = SecureAggregation(**fields)  # type: ignore[arg-type]
    return Agreement(secure, index, index, tuple(members), (1.0,), count, "a model")


def rows_of(told: Receipt, width: int) -> dict[int, bytes]:
    clients = decode(told.about, Listed, THE_SERVER).clients
    return dict(zip(clients, payload_rows(told.payload, len(clients), width, "the server"), strict=True))


@dataclass
class MaskedRound:
    """Phase by phase, over those that are still there."""

    agreement: Agreement
    vectors: Mapping[int, Integers]
    leaving: Mapping[int, str] = field(default_factory=dict)  # before which push a device leaves

    def __post_init__(self) -> None:
        self.roster = SimulatedRoster()
        self.cohort = SecureCohort(self.agreement, self.roster)
        self.devices = {
            client: DeviceSecrets(self.agreement, client, self.roster.identity(client), self.roster)
            for client in self.agreement.members
        }
        self.masked: dict[int, Payload] = {}

    def there(self, phase: str) -> list[int]:
        order = (KEYS, SHARES, REPORT, CONSENT, REVEAL)
        gone = {client for client, before in self.leaving.items() if order.index(before) <= order.index(phase)}
        return [client for client in self.agreement.members if client in self.cohort.live - gone]

    def keys(self) -> None:
        for client in self.there(KEYS):
            self.cohort.take_keys(client, rows_payload([self.devices[client].published.row], ROW_BYTES))
        self.cohort.go_on()

    def shares(self) -> None:
        for client in self.there(SHARES):
            rows = rows_of(self.cohort.keys_around(client), ROW_BYTES)
            keys = {other: PublishedKeys.of_row(row) for other, row in rows.items()}
            self.cohort.take_shares(client, rows_payload(self.devices[client].seal_shares(keys), SEALED_BYTES))
        self.cohort.go_on()

    def mask(self) -> None:
        for client in self.there(REPORT):
            self.devices[client].open_shares(rows_of(self.cohort.shares_for(client), SEALED_BYTES))
            self.masked[client] = self.devices[client].masked(self.vectors[client])
            self.cohort.take_masked(client, self.masked[client])
        self.cohort.go_on()

    def consent(self) -> None:
        active = decode(self.cohort.survivors_receipt().about, Survivors, THE_SERVER).active
        for client in self.there(CONSENT):
            if client in self.cohort.active:
                signed = self.devices[client].consent(active)
                self.cohort.take_consent(client, rows_payload([signed], SIGNATURE_BYTES))
        self.cohort.go_on()

    def revealed(self, client: int) -> list[bytes]:
        return self.devices[client].reveal(rows_of(self.cohort.consents(), SIGNATURE_BYTES))

    def reveal(self) -> None:
        for client in self.there(REVEAL):
            if client in self.cohort.active:
                self.cohort.take_reveal(client, rows_payload(self.revealed(client), SHARE_BYTES))

    def run(self) -> SecureCohort:
        for phase in (self.keys, self.shares, self.mask, self.consent, self.reveal):
            if not self.cohort.hopeless:
                phase()
        return self.cohort

    def plain_sum(self) -> Integers:
        return np.sum([self.vectors[client] for client in self.masked], axis=0)


def vectors_of(agreement: Agreement, seed: int = 0) -> dict[int, Integers]:
    """Numbers of the whole range."""
    random, most = np.random.default_rng(seed), agreement.ring.largest
    return {client: random.integers(-most, most + 1, agreement.count) for client in agreement.members}


def masked_round(leaving: Mapping[int, str] | None = None, agreement: Agreement | None = None) -> MaskedRound:
    agreed = agreement or agreement_of()
    return MaskedRound(agreed, vectors_of(agreed), leaving or {})
