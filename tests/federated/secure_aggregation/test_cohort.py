"""Secure cohort: the sum is exact whoever leaves when; what does not fit is named, and never added."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from support.secure_cohorts import MaskedRound, agreement_of, masked_round, vectors_of
from support.simulated_peers import expect_noticed

from gossamer.errors import MalformedError
from gossamer.federated.messages import REPORT
from gossamer.federated.secure_aggregation import cohort as cohorts
from gossamer.federated.secure_aggregation.agreement import CONSENT, KEYS, REVEAL, ROW_BYTES, SHARES, rows_payload
from gossamer.federated.secure_aggregation.cohort import Phase
from gossamer.federated.secure_aggregation.identities import SIGNATURE_BYTES, Identity
from gossamer.federated.secure_aggregation.masking import SHARE_BYTES


@pytest.mark.parametrize("bits", [2, 9, 32])
def test_numbers_at_the_limit_add_up(bits: int) -> None:
    """All devices send the largest number there is, or the smallest, and one leaves."""
    agreement = agreement_of(range(7), bits=bits)
    most = agreement.ring.largest
    for each in (most, -most):
        vectors = {client: np.full(agreement.count, each) for client in range(7)}
        for leaving in ({}, {2: REPORT}, {6: SHARES}):
            run = MaskedRound(agreement, vectors, leaving)
            assert run.run().total().tolist() == [each * (7 - len(leaving))] * agreement.count


@pytest.mark.parametrize("neighbors", [2, 4, 8])
def test_sums_over_a_sparse_graph(neighbors: int) -> None:
    agreement = agreement_of(range(20), neighbors=neighbors, threshold=0.51)
    for leaving in ({}, {3: REPORT}, {3: KEYS}, {3: SHARES}, {3: CONSENT}, {3: REVEAL}):
        run = masked_round(leaving, agreement)
        cohort = run.run()
        assert cohort.is_unmasked
        assert cohort.total().tolist() == run.plain_sum().tolist()


def test_too_few_give_no_sum() -> None:
    """Three of five leave at any point: there is a sum only where three signed, told by most of those with keys."""
    agreement = agreement_of()
    vectors = vectors_of(agreement)
    sums = 0
    for fates in product((KEYS, SHARES, REPORT, CONSENT, REVEAL), repeat=3):
        run = MaskedRound(agreement, vectors, dict(enumerate(fates)))
        cohort = run.run()
        published, signed = 5 - fates.count(KEYS), 2 + fates.count(REVEAL)
        assert cohort.is_unmasked == (signed >= 3 and agreement.shares_needed(published) <= 2), fates
        sums += cohort.is_unmasked
        if not cohort.is_unmasked and not cohort.hopeless:
            cohort.go_on()
        assert (
            cohort.is_unmasked
            or "needed" in cohort.hopeless
            or "too few" in cohort.hopeless
            or "have to" in cohort.hopeless
        )
    assert sums == 3  # two never came, and the third had signed


def swapped(run: MaskedRound, liar: int, owner: int) -> None:
    """The liar's share of one owner becomes another number."""
    shares = run.revealed(liar)
    shares[owner] = bytes(SHARE_BYTES - 1) + b"\x07"
    run.cohort.take_reveal(liar, rows_payload(shares, SHARE_BYTES))


def lied_to(leaving: dict[int, str], owner: int) -> MaskedRound:
    run = masked_round(leaving)
    run.keys()
    run.shares()
    run.mask()
    run.consent()
    swapped(run, 0, owner)
    for client in run.there(REVEAL)[1:]:
        if client in run.cohort.active:
            run.cohort.take_reveal(client, rows_payload(run.revealed(client), SHARE_BYTES))
    return run


def check_liar() -> None:
    for leaving, owner in (({}, 2), ({2: REPORT}, 2)):
        run = lied_to(leaving, owner)
        assert run.cohort.is_unmasked
        assert run.cohort.total().tolist() == run.plain_sum().tolist()
        assert list(run.cohort.liars) == [0]
        assert "client 0 sent an invalid share of client 2" in run.cohort.liars[0]


def test_a_changed_share_is_not_used_and_its_teller_named() -> None:
    check_liar()


def test_a_server_that_believes_every_share_is_noticed() -> None:
    expect_noticed(cohorts.SecureCohort, "_is_secret_of", lambda *_: True, check_liar)


@pytest.mark.parametrize("liars", [(0,), (0, 1), (3, 17)])
@pytest.mark.parametrize("reverse", [False, True])
def test_some_liars_among_many_holders_are_found_wherever_they_are(liars: tuple[int, ...], reverse: bool) -> None:
    run = masked_round({}, agreement_of(range(20)))
    run.keys()
    run.shares()
    run.mask()
    run.consent()
    for client in sorted(run.cohort.active, reverse=reverse):
        shares = run.revealed(client)
        if client in liars:
            shares = [bytes(SHARE_BYTES - 1) + b"\x07"] * len(shares)
        run.cohort.take_reveal(client, rows_payload(shares, SHARE_BYTES))
    assert run.cohort.is_unmasked
    assert run.cohort.total().tolist() == run.plain_sum().tolist()
    assert set(run.cohort.liars) <= set(liars)


def test_with_too_few_true_shares_there_is_no_sum() -> None:
    run = masked_round({3: REVEAL, 4: REVEAL})
    run.keys()
    run.shares()
    run.mask()
    run.consent()
    swapped(run, 0, 2)
    for client in (1, 2):
        run.cohort.take_reveal(client, rows_payload(run.revealed(client), SHARE_BYTES))
    assert not run.cohort.is_unmasked


def test_wrong_identities_are_refused() -> None:
    run = masked_round()
    published = run.devices[1].published
    stranger = published.signed(run.agreement, 1, Identity.new())
    with pytest.raises(MalformedError, match="client 1 are not signed by its identity in the roster"):
        run.cohort.take_keys(1, rows_payload([stranger.row], ROW_BYTES))
    with pytest.raises(MalformedError, match="client 2 are not signed"):
        run.cohort.take_keys(2, rows_payload([published.row], ROW_BYTES))  # client 1's, said by client 2
    replayed = masked_round(agreement=agreement_of(index=4)).devices[1].published
    with pytest.raises(MalformedError, match="of another round"):
        run.cohort.take_keys(1, rows_payload([replayed.row], ROW_BYTES))
    run.cohort.take_keys(1, rows_payload([published.row], ROW_BYTES))
    run.cohort.take_keys(1, rows_payload([published.row], ROW_BYTES))  # said twice
    assert run.cohort.count_received() == 1
    anew = masked_round().devices[1].published
    with pytest.raises(MalformedError, match="client 1 restarted round 0"):
        run.cohort.take_keys(1, rows_payload([anew.row], ROW_BYTES))


def test_what_comes_too_early_late_or_twice_is_not_added() -> None:
    run = masked_round({4: SHARES})
    payload = (torch.zeros(run.agreement.ring.wire_bytes(run.agreement.count), dtype=torch.uint8),)
    with pytest.raises(MalformedError, match="waits for keys"):
        run.cohort.take_masked(0, payload)
    run.keys()
    run.shares()
    with pytest.raises(MalformedError, match="client 4 was too slow"):
        run.cohort.take_masked(4, payload)
    for wrong in ((), payload * 2, (payload[0].float(),), (payload[0][1:],), (payload[0].view(1, -1),)):
        with pytest.raises(MalformedError, match=r"client 0 sent no masked|masked numbers of"):
            run.cohort.take_masked(0, wrong)
    run.mask()
    with pytest.raises(MalformedError, match="was not asked for shares"):
        run.cohort.take_reveal(0, payload)
    run.consent()
    assert run.cohort.phase is Phase.REVEAL
    with pytest.raises(MalformedError, match="client 4 was not asked"):
        run.cohort.take_reveal(4, payload)
    with pytest.raises(MalformedError, match="rows of 33 bytes"):
        run.cohort.take_reveal(0, payload)
    run.reveal()
    before = run.cohort.total().tolist()
    run.cohort.take_reveal(0, payload)
    assert run.cohort.total().tolist() == before == run.plain_sum().tolist()


def test_a_signature_under_another_list_is_refused_and_a_late_one_is_as_good() -> None:
    run = masked_round({3: REPORT})
    run.keys()
    run.shares()
    run.mask()
    everyone = run.devices[0]._identity.sign(run.agreement.consent(range(5)))
    with pytest.raises(MalformedError, match="lists of vectors of client 0 are not signed"):
        run.cohort.take_consent(0, rows_payload([everyone], SIGNATURE_BYTES))
    with pytest.raises(MalformedError, match="client 3 was not asked to sign"):
        run.cohort.take_consent(3, rows_payload([everyone], SIGNATURE_BYTES))
    for client in (0, 1, 2):
        run.cohort.take_consent(client, rows_payload([run.devices[client].consent((0, 1, 2, 4))], SIGNATURE_BYTES))
    run.cohort.go_on()
    assert run.cohort.phase is Phase.REVEAL
    run.cohort.take_consent(4, rows_payload([run.devices[4].consent((0, 1, 2, 4))], SIGNATURE_BYTES))
    run.reveal()
    assert run.cohort.total().tolist() == run.plain_sum().tolist()


def test_a_restarted_device_without_shares_is_not_waited_for() -> None:
    run = masked_round()
    run.keys()
    run.shares()
    run.mask()
    run.cohort.take_reveal(2, ())
    assert run.cohort.waits_for() == {0, 1, 3, 4}
    run.leaving = {2: CONSENT}
    run.consent()
    run.reveal()
    assert run.cohort.is_unmasked
