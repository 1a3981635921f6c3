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
from gossamer.federated.secure import cohort as cohorts
from gossamer.federated.secure.agreement import KEYS, REVEAL, ROW_BYTES, SHARES, rows_payload
from gossamer.federated.secure.cohort import Phase
from gossamer.federated.secure.masking.shamir import SHARE_BYTES
from gossamer.federated.secure.roster import Identity


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
    for leaving in ({}, {3: REPORT}, {3: KEYS}, {3: SHARES}, {3: REVEAL}):
        run = masked_round(leaving, agreement)
        cohort = run.run()
        assert cohort.is_unmasked
        assert cohort.total().tolist() == run.plain_sum().tolist()


def test_too_few_give_no_sum() -> None:
    """Three of five leave at any point: there is a sum only of three at least, told by most of those with keys."""
    agreement = agreement_of()
    vectors = vectors_of(agreement)
    sums = 0
    for fates in product((KEYS, SHARES, REPORT, REVEAL), repeat=3):
        run = MaskedRound(agreement, vectors, dict(enumerate(fates)))
        cohort = run.run()
        published, sent = 5 - fates.count(KEYS), 2 + fates.count(REVEAL)
        assert cohort.is_unmasked == (sent >= 3 and agreement.shares_needed(published) <= 2), fates
        sums += cohort.is_unmasked
        if not cohort.is_unmasked and not cohort.hopeless:
            cohort.go_on()
        assert cohort.is_unmasked or "needed" in cohort.hopeless or "too few" in cohort.hopeless
    assert sums == 3  # two never came, and the third had sent its vector


def swapped(run: MaskedRound, liar: int, owner: int) -> None:
    """The liar's share of one owner becomes another number."""
    shares = run.devices[liar].reveal(run.survivors(liar))
    shares[owner] = bytes(SHARE_BYTES - 1) + b"\x07"
    run.cohort.take_reveal(liar, rows_payload(shares, SHARE_BYTES))


def lied_to(leaving: dict[int, str], owner: int) -> MaskedRound:
    run = masked_round(leaving)
    run.keys()
    run.shares()
    run.mask()
    swapped(run, 0, owner)
    for client in run.there(REVEAL)[1:]:
        if client in run.cohort.active:
            shares = run.devices[client].reveal(run.survivors(client))
            run.cohort.take_reveal(client, rows_payload(shares, SHARE_BYTES))
    return run


def check_liar() -> None:
    for leaving, owner in (({}, 2), ({2: REPORT}, 2)):
        run = lied_to(leaving, owner)
        assert run.cohort.is_unmasked
        assert run.cohort.total().tolist() == run.plain_sum().tolist()
        assert list(run.cohort.liars) == [0]
        assert "client 0 told a share of client 2 that is none" in run.cohort.liars[0]


def test_a_changed_share_is_not_used_and_its_teller_named() -> None:
    check_liar()


def test_a_server_that_believes_every_share_is_noticed() -> None:
    expect_noticed(cohorts.SecureCohort, "_is_secret_of", lambda *_: True, check_liar)


def test_with_too_few_true_shares_there_is_no_sum() -> None:
    run = masked_round({3: REVEAL, 4: REVEAL})
    run.keys()
    run.shares()
    run.mask()
    swapped(run, 0, 2)
    for client in (1, 2):
        shares = run.devices[client].reveal(run.survivors(client))
        run.cohort.take_reveal(client, rows_payload(shares, SHARE_BYTES))
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
    assert run.cohort.heard() == 1
    anew = masked_round().devices[1].published
    with pytest.raises(MalformedError, match="client 1 began round 0 anew"):
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
    assert run.cohort.phase is Phase.REVEAL
    with pytest.raises(MalformedError, match="client 4 was not asked"):
        run.cohort.take_reveal(4, payload)
    with pytest.raises(MalformedError, match="rows of 33 bytes"):
        run.cohort.take_reveal(0, payload)
    run.reveal()
    before = run.cohort.total().tolist()
    run.cohort.take_reveal(0, payload)
    assert run.cohort.total().tolist() == before == run.plain_sum().tolist()
