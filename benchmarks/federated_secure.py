"""What masks cost a federated round: bytes and seconds of a device and of the server, beside the same round without.

All devices of one cohort and the server, one after another in this process, through all phases of one round; the sum
is compared with the plain one. Seconds are of processor time, in one thread.

    python benchmarks/federated_secure.py [--clients 100] [--parameters 1000000] [--neighbors 20] [--leave 5]
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import provenance  # found only after the line above

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.strategies.federated_rules import SecureAggregation
from gossamer.base.layout import Layout
from gossamer.base.ops import Payload, payload_bytes
from gossamer.base.peer_ops import Receipt
from gossamer.federated.messages import THE_SERVER, SecureTask, decode
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
from gossamer.federated.secure_aggregation.cohort import SecureCohort
from gossamer.federated.secure_aggregation.device import DeviceSecrets
from gossamer.federated.secure_aggregation.fixed_point import FixedPoint
from gossamer.federated.secure_aggregation.identities import SIGNATURE_BYTES, SimulatedRoster
from gossamer.federated.secure_aggregation.masking import SHARE_BYTES, add_mask

SECONDS: dict[str, float] = defaultdict(float)
BYTES: dict[str, int] = defaultdict(int)


@contextmanager
def timed(what: str) -> Iterator[None]:
    before = time.process_time()
    yield
    SECONDS[what] += time.process_time() - before


def counted(what: str, payload: Payload) -> Payload:
    BYTES[what] += payload_bytes(payload)
    return payload


def rows_of(told: Receipt, width: int, what: str) -> dict[int, bytes]:
    clients = decode(told.about, Listed, THE_SERVER).clients
    BYTES[what] += payload_bytes(told.payload) + len(told.about)
    return dict(zip(clients, payload_rows(told.payload, len(clients), width, "the server"), strict=True))


def secure_round(args: argparse.Namespace) -> Agreement:
    secure = SecureAggregation(neighbors=args.neighbors, bits=args.bits, clip=1.0)
    form = FixedPoint(secure, Dense(), Layout.of({"w": (args.parameters,)}), torch.float32, 1)
    members = tuple(range(args.clients))
    agreement = Agreement.of(form, SecureTask(members=members, ranges=form.first_ranges), 0, 0, "benchmark")
    roster = SimulatedRoster()
    cohort = SecureCohort(agreement, roster)
    with timed("device: keys and shares"):
        devices = [DeviceSecrets(agreement, each, roster.identity(each), roster) for each in members]
    for each in members:
        payload = counted("up: keys", rows_payload([devices[each].published.row], ROW_BYTES))
        with timed("server: keys and shares"):
            cohort.take_keys(each, payload)
    cohort.go_on()
    for each in members:
        rows = rows_of(cohort.keys_around(each), ROW_BYTES, "down: keys")
        with timed("device: keys and shares"):
            sealed = devices[each].seal_shares({other: PublishedKeys.of_row(row) for other, row in rows.items()})
        cohort.take_shares(each, counted("up: shares", rows_payload(sealed, SEALED_BYTES)))
    cohort.go_on()
    plain = np.zeros(form.count, np.int64)
    staying = members[: len(members) - args.leave]
    for each in staying:
        sealed_for = rows_of(cohort.shares_for(each), SEALED_BYTES, "down: shares")
        with timed("device: keys and shares"):
            devices[each].open_shares(sealed_for)
        update = torch.randn(args.parameters, generator=torch.Generator().manual_seed(each)) / 8
        with timed("device: whole numbers"):
            integers = form.encode([update], 1.0, 1, agreement.ranges, client=each, index=0).integers
        with timed("device: masks and bytes"):
            masked = devices[each].masked(integers)
        with timed("plain: bytes"):
            agreement.ring.packed(agreement.ring.wrapped(integers))
        plain += integers
        with timed("server: sum"):
            cohort.take_masked(each, counted("up: masked vector", masked))
    cohort.go_on()
    active = decode(cohort.survivors_receipt().about, Survivors, THE_SERVER).active
    for each in staying:
        with timed("device: signatures"):
            signed = devices[each].consent(active)
        cohort.take_consent(each, counted("up: signatures", rows_payload([signed], SIGNATURE_BYTES)))
    cohort.go_on()
    for each in staying:
        consents = rows_of(cohort.consents(), SIGNATURE_BYTES, "down: signatures")
        with timed("device: signatures"):
            shares = devices[each].reveal(consents)
        with timed("server: unmask"):
            cohort.take_reveal(each, counted("up: shares told", rows_payload(shares, SHARE_BYTES)))
    with timed("server: unmask"):
        total = cohort.total()
    print(f"sum of {len(staying)} equals the plain sum: {bool((total == plain).all())}")
    return agreement


def mask_milliseconds(agreement: Agreement) -> float:
    vector = np.zeros(agreement.count, agreement.ring.dtype)
    found = []
    for key in range(7):
        before = time.process_time()
        add_mask(vector, bytes([key] * 32), 1)
        found.append(time.process_time() - before)
    return 1e3 * min(found)


def report(args: argparse.Namespace, agreement: Agreement) -> None:
    staying, ring = args.clients - args.leave, agreement.ring
    shares = {what: total / (args.clients if "keys" in what else staying) for what, total in BYTES.items()}
    for what, each in sorted(shares.items()):
        print(f"{what:20} {each:12,.0f} bytes a device")
    up = sum(each for what, each in shares.items() if what.startswith("up"))
    both = up + sum(each for what, each in shares.items() if what.startswith("down"))
    same, narrow = ring.wire_bytes(agreement.count), args.parameters * args.bits / 8
    print(f"ring of {ring.width} bits: {args.bits} of a number, {ring.width - args.bits} for the sum of {args.clients}")
    print(f"up {up:,.0f} bytes: {up / same:.4f} x the same integers of {ring.width} bits without masks")
    print(f"  {both / same:.4f} x with what comes down; {up / 4 / args.parameters:.3f} x float32")
    print(f"  {up / narrow:.3f} x integers of {args.bits} bits, which leave no room for a sum")
    for what, seconds in sorted(SECONDS.items()):
        each = "" if what.startswith("server") else f", {1e3 * seconds / staying:.1f} ms a device"
        print(f"{what:24} {seconds:8.2f} s{each}")
    print(f"one mask: {mask_milliseconds(agreement):.2f} ms, of {len(agreement.graph[0]) + 1} a device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--neighbors", type=int, default=None)
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--leave", type=int, default=5, help="devices that leave after they shared their keys")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(provenance())
    agreement = secure_round(args)
    report(args, agreement)


if __name__ == "__main__":
    main()
