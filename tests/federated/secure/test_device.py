"""Device under masks: what it sends tells nothing of its vector, and it never gives shares of both secrets of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chi_square import byte_z
from support.secure_cohorts import MaskedRound, agreement_of, masked_round, rows_of
from support.simulated_peers import expect_noticed

from gossamer.errors import MalformedError
from gossamer.federated.messages import GO_ON, REPORT
from gossamer.federated.secure import device
from gossamer.federated.secure.agreement import ROW_BYTES, SEALED_BYTES, PublishedKeys, Survivors
from gossamer.federated.secure.masking.masks import add_mask
from gossamer.federated.secure.masking.shamir import SHARE_BYTES

COUNT = 20_000


def view_of(vectors: Callable[[int], Any]) -> tuple[MaskedRound, dict[int, Any]]:
    """What the server sees of three devices with such vectors."""
    agreement = agreement_of(range(3), count=COUNT)
    run = MaskedRound(agreement, {client: vectors(client) for client in range(3)})
    run.run()
    ring = agreement.ring
    return run, {client: ring.unpacked(payload[0].numpy(), COUNT) for client, (*payload,) in run.masked.items()}


def check_view() -> None:
    """Masked vectors, and what is between any two of them, are uniform; together they are the sum exactly.

    So the server's view of updates with one sum is the same, whichever updates they are.
    """
    for vectors in (lambda client: np.zeros(COUNT, np.int64), lambda client: np.full(COUNT, 1000 * client)):
        run, seen = view_of(vectors)
        assert run.cohort.total().tolist() == run.plain_sum().tolist()
        low = [each.astype(np.uint16) for each in (*seen.values(), seen[0] - seen[1], seen[1] - seen[2])]
        assert max(byte_z(each) for each in low) < 4.5


def test_the_view_is_independent_of_the_updates_given_their_sum() -> None:
    check_view()


def test_one_mask_for_all_devices_is_noticed() -> None:
    def shared(vector: Any, key: bytes, sign: int) -> None:
        add_mask(vector, bytes(32), 1)

    expect_noticed(device, "add_mask", shared, check_view)


def test_a_mask_without_signs_is_noticed() -> None:
    expect_noticed(device, "pairwise_sign", lambda own, other: 1, check_view)


def test_two_rounds_have_nothing_in_common() -> None:
    _, first = view_of(lambda client: np.zeros(COUNT, np.int64))
    _, second = view_of(lambda client: np.zeros(COUNT, np.int64))
    assert byte_z((first[0] - second[0]).astype(np.uint16)) < 4.5


def told(active: tuple[int, ...], dropped: tuple[int, ...] = ()) -> Survivors:
    return Survivors(active=active, dropped=dropped)


def ready(leaving: dict[int, str] | None = None) -> MaskedRound:
    run = masked_round(leaving)
    run.keys()
    run.shares()
    run.mask()
    return run


@pytest.mark.parametrize(
    ("lists", "why"),
    [
        (told((0, 1, 2, 3, 4), (4,)), "client 4 that it sent its vector and that it did not"),
        (told((0, 1, 2, 3, 3, 4)), "two shares of one client"),
        (told((0, 1, 2, 3)), r"wrong about clients \[4\]"),
        (told((0, 1, 2, 3, 4, 7)), r"wrong about clients \[7\]"),
        (told((1, 2, 3, 4), (0,)), "client 0 left, which has just sent"),
        (told((0, 1), (2, 3, 4)), "2 of the devices around client 0, and 3 are needed"),
    ],
)
def test_a_server_that_lies_is_told_nothing_and_named(lists: Survivors, why: str) -> None:
    own = ready().devices[0]
    with pytest.raises(MalformedError, match=f"server 0 .*{why}.*nothing was told"):
        own.reveal(lists)
    assert len(own.reveal(told((0, 1, 2, 3, 4)))) == 5  # a true list afterwards is answered


def test_shares_are_told_once() -> None:
    own = ready({3: REPORT}).devices[0]
    own.reveal(told((0, 1, 2, 4), (3,)))
    for lists in (told((0, 1, 2, 4), (3,)), told((0, 1, 2, 3, 4))):
        with pytest.raises(MalformedError, match="a second time"):
            own.reveal(lists)


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(st.tuples(*[st.lists(st.integers(0, 5), max_size=6)] * 2), max_size=4))
def test_two_shares_of_one_client_are_never_given(asked: list[tuple[list[int], list[int]]]) -> None:
    """Whatever lists a server makes up, in whatever order, and an honest one at the end."""
    own = PREPARED.devices[0]
    own._revealed = False
    given_shares = set()
    for active, dropped in [*asked, ([0, 1, 2, 3], [4]), ([0, 1, 2, 3, 4], [])]:
        try:
            given_shares |= set(own.reveal(told(tuple(active), tuple(dropped))))
        except MalformedError:
            continue
    both = [client for client, held in own._held.items() if held is not None and set(held) <= given_shares]
    assert both == []
    assert len(given_shares) == 5


PREPARED = ready()


def test_a_device_that_would_answer_twice_is_noticed() -> None:
    """The twin of the test before: asked for both in turn, it gives both."""
    own = ready().devices[0]
    shares = set(own.reveal(told((0, 1, 2, 3, 4))))
    own._revealed = False
    shares |= set(own.reveal(told((0, 1, 2, 3), (4,))))
    held = own._held[4]
    assert held is not None
    assert set(held) <= shares


# Neighbors' keys and shares.


def keys_for(run: MaskedRound, client: int) -> dict[int, PublishedKeys]:
    run.keys()
    return {
        other: PublishedKeys.of_row(row) for other, row in rows_of(run.cohort.keys_around(client), ROW_BYTES).items()
    }


def test_keys_that_the_server_put_in_anothers_place_are_refused() -> None:
    run = masked_round()
    keys = keys_for(run, 0)
    other = masked_round().devices[3].published  # of another run: the server's own device 3 would sign likewise
    forged = PublishedKeys(other.sealing, other.masking, other.commitment, keys[3].signature)
    with pytest.raises(MalformedError, match="client 3 are not signed by its identity"):
        run.devices[0].seal_shares(keys | {3: forged})
    swapped = keys | {3: keys[4]}
    with pytest.raises(MalformedError, match="client 3 are not signed"):
        run.devices[0].seal_shares(swapped)


def test_keys_of_an_earlier_round_or_of_other_terms_are_refused() -> None:
    for earlier in (agreement_of(index=1), agreement_of(range(6)), agreement_of(bits=8)):
        run, before = masked_round(), masked_round(agreement=earlier)
        keys = keys_for(run, 0) | {2: before.devices[2].published}
        with pytest.raises(MalformedError, match=r"client 2 .*of another round"):
            run.devices[0].seal_shares(keys)


def test_a_cohort_that_hides_nobody_is_refused() -> None:
    run = masked_round()
    keys = keys_for(run, 0)
    with pytest.raises(MalformedError, match="2 of the devices around client 0, and 3 are needed"):
        run.devices[0].seal_shares({1: keys[1]})
    with pytest.raises(MalformedError, match="at least 3"):
        agreement_of(range(2))
    with pytest.raises(MalformedError, match="named once"):
        agreement_of((0, 0, 1, 2))
    with pytest.raises(MalformedError, match="other neighbors"):
        masked_round().devices[0].seal_shares(keys | {9: keys[1]})
    with pytest.raises(MalformedError, match="cohort it is not in"):
        device.DeviceSecrets(agreement_of(), 9, run.roster.identity(9), run.roster)


def test_changed_shares_are_missing_and_the_round_goes_on() -> None:
    run = masked_round({3: REPORT})
    run.keys()
    run.shares()
    sealed = run.cohort._sealed[3]
    sealed[0] = bytes([sealed[0][0] ^ 1]) + sealed[0][1:]
    sealed[1] = sealed[2]  # of the same sender, to another
    run.mask()
    own = run.devices[0]
    assert own._held[3] is None
    assert run.devices[1]._held[3] is None
    assert own.reveal(run.survivors(0))[3] == b"\xff" * SHARE_BYTES
    run.cohort.take_reveal(0, device.rows_payload([b"\xff" * SHARE_BYTES] * 5, SHARE_BYTES))
    assert not run.cohort.is_unmasked


def test_strange_answers_of_a_server_are_refused() -> None:
    run = masked_round()
    keys_for(run, 0)
    twice = run.cohort.keys_around(0)
    answers = [
        (device.Receipt(version=GO_ON, payload=twice.payload, about='{"clients":[1,1,2,3]}'), "names a client twice"),
        (device.Receipt(version=GO_ON, about='{"clients":[1]}'), "1 rows of 160 bytes were due"),
        (device.Receipt(version=GO_ON, about="no"), "sent what is no listed"),
        (device.Receipt(version=-9), "no fate"),
    ]
    for answer, why in answers:
        script = device.upload_masked(
            run.devices[0], device.Stamp(0, 0), device.masked_report("a model"), run.vectors[0]
        )
        next(script)
        with pytest.raises(MalformedError, match=why):
            script.send(answer)
    assert SEALED_BYTES == 82
