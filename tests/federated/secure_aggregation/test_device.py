"""Device under masks: what it sends tells nothing of its vector, and it never gives shares of both secrets of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from gossamer.federated.secure_aggregation import device
from gossamer.federated.secure_aggregation.agreement import ROW_BYTES, SEALED_BYTES, Agreement, PublishedKeys
from gossamer.federated.secure_aggregation.masking import SHARE_BYTES, AgreementKey, add_mask, commitment, join

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
        assert np.array_equal(run.cohort.total(), run.plain_sum())  # a diff of two long lists takes minutes
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


def ready(leaving: dict[int, str] | None = None, agreement: Agreement | None = None) -> MaskedRound:
    run = masked_round(leaving, agreement)
    run.keys()
    run.shares()
    run.mask()
    return run


def signatures(run: MaskedRound, active: Sequence[int], by: Iterable[int] | None = None) -> dict[int, bytes]:
    """Of what devices sign whose identities are in the hands of whoever asks."""
    message = run.agreement.consent(active)
    return {client: run.roster.identity(client).sign(message) for client in (active if by is None else by)}


EVERYONE = (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("active", "why"),
    [
        ((0, 1, 2, 3, 3, 4), "names a client twice"),
        ((0, 1, 2, 3, 4, 7), r"vectors of clients \[7\], but client 0 shares no masks"),
        ((1, 2, 3, 4), "client 0 as missing"),
        ((0, 1), "2 of the devices around client 0, and 3 are needed"),
    ],
)
def test_a_server_that_lies_is_told_nothing_and_named(active: tuple[int, ...], why: str) -> None:
    run = ready()
    own = run.devices[0]
    with pytest.raises(MalformedError, match=f"server 0 .*{why}.*no secret was sent"):
        own.consent(active)
    own.consent(EVERYONE)  # a true list afterwards is signed
    assert len(own.reveal(signatures(run, EVERYONE))) == 5


def test_a_device_signs_one_list_and_tells_shares_once() -> None:
    run = ready({3: REPORT})
    own, sent = run.devices[0], (0, 1, 2, 4)
    with pytest.raises(MalformedError, match="shows 0 signatures"):
        own.reveal(signatures(run, EVERYONE))  # it was told of no list
    assert own.consent(sent) == own.consent(sent)
    with pytest.raises(MalformedError, match="another list than before"):
        own.consent(EVERYONE)
    own.reveal(signatures(run, sent))
    with pytest.raises(MalformedError, match="a second time"):
        own.reveal(signatures(run, sent))


def test_shares_are_told_to_a_quorum_only() -> None:
    """Signatures under another list, of another round, of others than are in it, or forged, do not count."""
    run = ready()
    own = run.devices[0]
    own.consent(EVERYONE)
    two = signatures(run, EVERYONE, by=(0, 1))
    other = signatures(run, (0, 1, 2, 3), by=(2, 3))
    later = signatures(MaskedRound(agreement_of(index=1), run.vectors), EVERYONE, by=(2, 3))
    for wrong in (two, two | other, two | later, two | {2: two[1], 3: bytes(64)}, two | {9: two[1]}):
        with pytest.raises(MalformedError, match=r"shows 2 signatures .* and 3 are needed: others may"):
            own.reveal(wrong)
    assert len(own.reveal(two | {3: bytes(64)} | signatures(run, EVERYONE, by=(4,)))) == 5


def lists_told_of(lists: Sequence[frozenset[int]]) -> set[tuple[int, ...]]:
    """Under which lists of vectors any device tells a share: each is asked to sign all of them, from another on, and
    shown whatever was signed."""
    run = PREPARED
    signed: dict[tuple[int, ...], dict[int, bytes]] = {}
    for client, own in run.devices.items():
        own._revealed, own._active = False, ()
        for turn in range(len(lists)):
            active = tuple(sorted(lists[(client + turn) % len(lists)]))
            try:
                signed.setdefault(active, {})[client] = own.consent(active)
            except MalformedError:
                continue
    found = set()
    for own in run.devices.values():
        for active in signed:
            try:
                shares = own.reveal(signed[active])
            except MalformedError:
                continue
            found.add(own._active)
            given_shares = set(shares)
            assert not any(held is not None and set(held) <= given_shares for held in own._held.values())
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 4), min_size=2), max_size=3))
def test_whatever_a_server_makes_up_all_tell_of_one_sum(lists: list[frozenset[int]]) -> None:
    assert len(lists_told_of([*lists, frozenset(EVERYONE)])) <= 1


def test_without_a_quorum_they_tell_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "quorum", property(lambda own: 1))
    assert len(lists_told_of([frozenset((0, 1, 2)), frozenset((0, 2, 3, 4)), frozenset(EVERYONE)])) > 1


PREPARED = ready()

# Of 13 devices on a ring with four neighbors each, by their distance to the one in the middle: what a server tells
# those around it of who left. Every list by itself leaves enough devices around everyone.
LEFT = {-1: (-2, 1), 1: (-1, 2), -3: (-1, -2), 3: (1, 2), -2: (-1,), 2: (1,), -4: (-2,), 4: (2,)}


def middle_is_laid_open() -> bool:
    """Whether those lists give a server all secrets whose masks are on one device's vector."""
    agreement = agreement_of(range(13), neighbors=4)
    run = ready(agreement=agreement)
    ring = ring_of(agreement)
    lists = {
        client: tuple(sorted(set(range(13)) - {ring[each] for each in LEFT.get(place, ())}))
        for place, client in ((place - 6, ring[place - 6]) for place in range(13))
    }
    seeds: dict[int, dict[int, bytes]] = {}
    keys: dict[int, dict[int, bytes]] = {}
    for client, active in lists.items():
        own = run.devices[client]
        try:
            own.consent(active)
            shares = own.reveal(signatures(run, active, by=[each for each in active if lists[each] == active]))
        except MalformedError:
            continue
        for owner, share in zip(sorted(own._held), shares, strict=True):
            (seeds if owner in active else keys).setdefault(owner, {})[agreement.place(client)] = share
    if len(seeds.get(ring[0], {})) < 3 or any(len(keys.get(each, {})) < 3 for each in agreement.graph[ring[0]]):
        return False
    found = {each: AgreementKey(joined(keys[each])).public for each in agreement.graph[ring[0]]}
    assert found == {each: run.devices[each].published.masking for each in found}
    return commitment(joined(seeds[ring[0]])) == run.devices[ring[0]].published.commitment


def joined(shares: dict[int, bytes]) -> bytes:
    return join(dict(list(shares.items())[:3]))


def ring_of(agreement: Agreement) -> list[int]:
    """Its devices in the order of the ring, from any one on."""
    found = [agreement.members[0]]
    while len(found) < len(agreement.members):
        near = set(agreement.graph[found[-1]])
        beside = [each for each in near - set(found) if len(near & set(agreement.graph[each])) == 2]
        found.append(min(beside))
    return found


def test_devices_that_are_told_different_lists_tell_nothing() -> None:
    assert not middle_is_laid_open()


def test_without_a_quorum_one_device_is_laid_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test before: devices that believe their own list, as long as it has enough around them."""
    monkeypatch.setattr(Agreement, "quorum", property(lambda own: 1))
    assert middle_is_laid_open()


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
    with pytest.raises(MalformedError, match="not in the cohort"):
        device.DeviceSecrets(agreement_of(), 9, run.roster.identity(9), run.roster)


def test_changed_shares_are_missing_and_the_round_continues() -> None:
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
    run.consent()
    assert run.revealed(0)[3] == b"\xff" * SHARE_BYTES
    run.cohort.take_reveal(0, device.rows_payload([b"\xff" * SHARE_BYTES] * 5, SHARE_BYTES))
    assert not run.cohort.is_unmasked


def test_strange_answers_of_a_server_are_refused() -> None:
    run = masked_round()
    keys_for(run, 0)
    twice = run.cohort.keys_around(0)
    answers = [
        (device.Receipt(version=GO_ON, payload=twice.payload, about='{"clients":[1,1,2,3]}'), "names a client twice"),
        (device.Receipt(version=GO_ON, about='{"clients":[1]}'), "expected 1 rows of 160 bytes"),
        (device.Receipt(version=GO_ON, about="no"), "invalid Listed message"),
        (device.Receipt(version=-9), "version -9"),
    ]
    for answer, why in answers:
        script = device.upload_masked(
            run.devices[0], device.Stamp(0, 0), device.masked_report("a model"), run.vectors[0]
        )
        next(script)
        with pytest.raises(MalformedError, match=why):
            script.send(answer)
    assert SEALED_BYTES == 82
