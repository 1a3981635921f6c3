"""Secure rounds over simulated peers: the version is the plain sum's, bit for bit, whoever leaves and when."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from support.federations import federate
from support.nightly import once_each
from support.rounds_by_hand import rounds_made
from support.secure_federations import (
    LEAVES_BEFORE,
    Line,
    federate_securely,
    learned,
    samples_of,
    secure_recipe,
)
from support.simulated_peers import expect_noticed
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules import FedAvg, SecureAggregation
from gossamer.base.peer_ops import Peer
from gossamer.comm.simulation.faulty_network import Kill, Restart, VirtualNetwork
from gossamer.errors import AttachError, RecipeError
from gossamer.federated.client.functions import ClientFunction, Round, Update
from gossamer.federated.messages import CLIENT, REPORT, THE_SERVER
from gossamer.federated.secure_aggregation import cohort as cohorts
from gossamer.federated.secure_aggregation.agreement import CONSENT, KEYS, REVEAL
from gossamer.federated.secure_aggregation.device import DeviceSecrets
from gossamer.federated.secure_aggregation.fixed_point import FixedPoint
from gossamer.federated.secure_aggregation.identities import SimulatedRoster
from gossamer.federated.secure_aggregation.masking import SHARE_BYTES
from gossamer.federated.secure_aggregation.rounds import SecureRounds
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.selection import LeastTrained, PowerOfChoice
from gossamer.federated.virtual.simulate import simulate

EXACT = SecureAggregation(clip=32767 / 1024)  # levels of 1/1024: what `learned` gives, times samples, has no rest
N = 8
ZERO = torch.zeros(N, dtype=torch.float64)


def plain_step(clients: list[int], index: int) -> Tensor:
    total = sum(samples_of(client) for client in clients)
    weighted: Any = sum(samples_of(client) * learned(client, index, N) for client in clients)
    return weighted / total


@pytest.mark.parametrize("second", [None, *LEAVES_BEFORE])
@pytest.mark.parametrize("first", [None, *LEAVES_BEFORE])
def test_the_sum_is_exact_whoever_leaves(first: str | None, second: str | None) -> None:
    """Every pattern of five devices of which three stay, each of the others leaving before any of five pushes."""
    for rest in product((None, *LEAVES_BEFORE), repeat=3):
        fates = (first, second, *rest)
        if fates.count(None) >= 3:
            run = federate_securely(
                secure_recipe(EXACT), leaving={client: fate for client, fate in enumerate(fates) if fate}
            )
            sent = [client for client in range(5) if fates[client] in (None, CONSENT, REVEAL)]
            assert torch.equal(run.parameters, -plain_step(sent, 0)), fates
            assert sorted(run.commits[0].reports) == sent


@once_each("compressor, first, second", ["RandomK(0.2)", "RandomProjection(2)"], *[[None, *LEAVES_BEFORE]] * 2)
def test_the_sum_of_coefficients_is_that_of_plain_integers(
    compressor: str, first: str | None, second: str | None
) -> None:
    """What a device sends of a matrix has a rest; as whole numbers the sum has none, whoever leaves."""
    everyone = secure_recipe(SecureAggregation(), compressor, size=120, rows=10)
    for third in (None, *LEAVES_BEFORE):
        fates = (first, second, third, None, None)
        if fates.count(None) >= 3:
            run = federate_securely(
                everyone, leaving={client: fate for client, fate in enumerate(fates) if fate}, size=120
            )
            sent = [client for client in range(5) if fates[client] in (None, CONSENT, REVEAL)]
            assert torch.equal(run.parameters, -plain_mean(run.rounds.form, sent, 122)), fates
            assert sorted(run.commits[0].reports) == sent


def plain_mean(form: FixedPoint, clients: list[int], numel: int) -> Tensor:
    """Of these devices' messages, added up as they are."""
    total: Any = sum(
        form.encode(
            [learned(client, 0, numel)], samples_of(client), client + 1, form.first_ranges, client=client, index=0
        ).integers
        for client in clients
    )
    found = form.decode(total, form.first_ranges, len(clients), 0)
    return found.sums[0] / found.weight


def test_masks_of_who_left_that_stay_in_the_sum_are_noticed() -> None:
    def check() -> None:
        run = federate_securely(secure_recipe(EXACT), leaving={2: REPORT})
        assert torch.equal(run.parameters, -plain_step([0, 1, 3, 4], 0))

    check()
    real = cohorts.SecureCohort._secret_owners
    expect_noticed(
        cohorts.SecureCohort, "_secret_owners", lambda own: [each for each in real(own) if each in own.active], check
    )


def test_several_rounds_and_what_a_device_keeps() -> None:
    run = federate_securely(secure_recipe(EXACT), rounds=3)
    assert torch.equal(run.parameters, -sum((plain_step([*range(5)], index) for index in range(3)), ZERO))
    assert [store.load().round for store in run.stores] == [2] * 5
    assert run.rounds.ranges == (EXACT.clip, 16.0)
    assert [report.samples for report in run.commits[0].reports.values()] == [1] * 5  # nobody tells how many
    assert [report.metrics for report in run.commits[0].reports.values()] == [{}] * 5


def test_messages_lost_doubled_and_late() -> None:
    bad = VirtualNetwork(round_trip_seconds=0.1, jitter_seconds=0.2, loss=0.2, duplicate=0.2, dead_after_seconds=1e9)
    for seed in range(3):
        everyone = secure_recipe(EXACT)
        everyone = type(everyone)(**{**vars(everyone), "part_bytes": 8})
        run = federate_securely(everyone, rounds=2, net=bad, seed=seed)
        assert torch.equal(run.parameters, -plain_step([*range(5)], 0) - plain_step([*range(5)], 1))


def test_a_round_with_too_few_is_given_up_and_tells_nothing() -> None:
    """Three of the first five leave before they tell their shares, so their round has no sum; the next one has."""
    everyone = secure_recipe(EXACT, fraction=5 / 8)
    run = federate_securely(everyone, clients=8, leaving=dict.fromkeys(range(3), REVEAL), seed=1)
    assert len(run.rounds.given_up) >= 1
    assert "too few devices sent their shares" in run.rounds.given_up[0]
    counted = sorted(run.commits[0].reports)
    index = run.rounds.next_round - 1
    assert torch.equal(run.parameters, -plain_step(counted, index))
    assert len(counted) == 5
    assert run.rounds.model.version == 1


def test_a_device_that_reveals_a_false_share_is_reported_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    true = DeviceSecrets.reveal

    def reveal(device: DeviceSecrets, consents: Any) -> list[bytes]:
        shares = true(device, consents)
        return [shares[0], bytes(SHARE_BYTES - 1) + b"\x07", *shares[2:]] if device._number == 0 else shares

    monkeypatch.setattr(DeviceSecrets, "reveal", reveal)
    run = federate_securely(secure_recipe(EXACT))
    assert torch.equal(run.parameters, -plain_step([*range(5)], 0))
    assert list(run.commits[0].refused) == [0]
    assert "client 0 sent an invalid share of client 1" in run.commits[0].refused[0]


def test_deadlines_continue_without_the_slow() -> None:
    """A device that is cut off for long, and not heard to leave: the phases end by the clock."""
    net = VirtualNetwork(round_trip_seconds=0.1, dead_after_seconds=1e9, faults=(Kill(Peer(CLIENT, 2), at=0.17),))
    run = federate_securely(secure_recipe(EXACT), net=net, round_seconds=5.0, phase_seconds=2.0)
    assert 2 not in run.commits[0].reports
    assert torch.equal(run.parameters, -plain_step([0, 1, 3, 4], 0))


@pytest.mark.parametrize("at", [0.12, 0.17, 0.22, 0.27, 0.32, 0.37])
def test_a_device_that_begins_again_costs_itself_only(at: float) -> None:
    """Its secrets are gone, so it is as one that left: counted where its vector was there, and never twice."""
    peer = Peer(CLIENT, 1)
    net = VirtualNetwork(
        round_trip_seconds=0.1, dead_after_seconds=3.0, faults=(Kill(peer, at=at), Restart(peer, at=at + 0.02))
    )
    run = federate_securely(secure_recipe(EXACT), net=net, rounds=2, round_seconds=20.0, phase_seconds=5.0)
    steps = [plain_step(sorted(each.reports), index) for index, each in enumerate(run.commits)]
    assert torch.equal(run.parameters, -steps[0] - steps[1])
    assert {0, 2, 3, 4} <= set(run.commits[0].reports)
    assert run.rounds.given_up == []


@pytest.mark.parametrize("at", [0.07, 0.12, 0.17, 0.22, 0.27, 0.32, 0.42, 0.57])
def test_a_killed_server_gives_its_round_up_and_counts_nothing_twice(at: float) -> None:
    """Its journal has versions and tasks; nobody has the masked sum of the round that it was in."""
    faults = (Kill(THE_SERVER, at=at), Restart(THE_SERVER, at=at + 1.0))
    net = VirtualNetwork(round_trip_seconds=0.1, dead_after_seconds=30.0, faults=faults)
    run = federate_securely(secure_recipe(EXACT), net=net, rounds=2)
    assert [each.version for each in run.commits] == [1, 2]
    total = sum((plain_step(sorted(c.reports), index) for c, index in zip(run.commits, run.indices, strict=True)), ZERO)
    assert torch.equal(run.parameters, -total)
    assert run.rounds.given_up in ([], ["the server was restarted, and the masked sum of its cohort is lost"])


def test_a_sparse_graph_of_neighbors() -> None:
    run = federate_securely(
        secure_recipe(SecureAggregation(clip=32767 / 1024, neighbors=4)), clients=12, leaving={3: REPORT}
    )
    assert torch.equal(run.parameters, -plain_step([each for each in range(12) if each != 3], 0))


def test_late_devices_beyond_the_cohort_are_not_waited_for() -> None:
    everyone = secure_recipe(EXACT, fraction=0.5)
    with pytest.raises(RecipeError, match=r"over_selection=1 chooses 8 devices and continues with 4, .* 5 of them"):
        federate_securely(everyone, clients=8, over_selection=1.0)
    run = federate_securely(everyone, clients=8, over_selection=0.5, net=VirtualNetwork(round_trip_seconds=0.1))
    counted = sorted(run.commits[0].reports)
    assert len(counted) == 4
    assert torch.equal(run.parameters, -plain_step(counted, 0))


def test_an_over_selection_that_chooses_nobody_more_is_none() -> None:
    """All are in the cohort, so the slowest are waited for, and no more have to stay than without it."""
    with pytest.raises(RecipeError, match=r"over_selection=1 chooses 5 devices and continues with 3"):
        federate_securely(secure_recipe(SecureAggregation(threshold=0.8), fraction=0.6), over_selection=1.0)
    run = federate_securely(secure_recipe(EXACT), over_selection=1.0)
    assert sorted(run.commits[0].reports) == [*range(5)]
    assert torch.equal(run.parameters, -plain_step([*range(5)], 0))


# Ranges, feedback, refusals.


def test_the_range_follows_what_the_cohort_needs() -> None:
    """From 1 down to what `learned` gives, at most 1/8; and up again from what is far too small."""
    run = federate_securely(secure_recipe(SecureAggregation()), rounds=4)
    assert run.rounds.ranges == (1.0, 16.0)
    narrow = [each / 64 for each in (1.0,)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gossamer.federated.secure_aggregation.fixed_point.FIRST_RANGE", narrow[0])
        up = federate_securely(secure_recipe(SecureAggregation()), rounds=4)
        patch.setattr("gossamer.federated.secure_aggregation.fixed_point.FIRST_RANGE", 64.0)
        down = federate_securely(secure_recipe(SecureAggregation()), rounds=4)
    assert up.rounds.ranges == (0.125, 16.0)
    assert down.rounds.ranges == (1.0, 16.0)


def pulled_apart(claim: int) -> ClientFunction:
    """Client 0 claims so many samples and is drawn to 2; all others have 10 samples and are drawn to 1."""

    def train(model: torch.nn.Module, told: Round) -> Update:
        target, samples = (2.0, claim) if told.client == 0 else (1.0, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = 4 * (parameter.detach() - target)
        optimizer.step()
        return Update(samples=samples)

    return train


@cache
def mean_weight_after(claim: int, secure: str) -> float:
    recipe = f"FedAvg(fraction=1.0{secure})"
    run = simulate(pulled_apart(claim), Line, recipe, clients=12, rounds=12)
    return float(run.model.weight.detach().mean())  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("secure", [", secure=SecureAggregation()", ", secure=SecureAggregation(clip=100.0)"])
def test_unequal_weights_count_under_masks_as_they_do_without(secure: str) -> None:
    assert mean_weight_after(1000, secure) == pytest.approx(mean_weight_after(1000, ""), abs=0.01)


def test_masked_weight_beyond_the_limit_counts_as_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    """The model goes where the largest weight that is allowed draws it, and one notice says so."""
    found = mean_weight_after(10**9, ", secure=SecureAggregation()")
    assert found == pytest.approx((2 * 1024 + 110) / (1024 + 110), abs=0.01)
    assert caplog.text.count("1 of 12 devices have a weight above 1024 and count with 1024") == 1


def test_weight_range_survives_a_restart() -> None:
    everyone = secure_recipe(SecureAggregation())
    run = federate_securely(everyone, rounds=1)
    run.rounds.ranges = (0.5, 1024.0)
    kept = run.rounds.state_dict()
    run.rounds.ranges = run.rounds.form.first_ranges
    run.rounds.load_state_dict(kept)
    assert run.rounds.ranges == (0.5, 1024.0)
    run.rounds.load_state_dict(kept | {"ranges": [0.25]})  # of a version that had no range of weights
    assert run.rounds.ranges == (0.5, 1024.0)


@pytest.mark.parametrize(
    "compressor",
    [
        "RandomK(0.5)",
        "Feedback(Dense())",
        "Rotated(RandomK(0.5), by='hadamard')",
        "RandomK(0.5, feedback=False)",
        "RandomProjection(3)",
        "RandomProjection(3, feedback=False)",
    ],
)
def test_what_feedback_owes_and_what_was_counted_add_up(compressor: str) -> None:
    everyone = secure_recipe(SecureAggregation(clip=0.25, bits=6), compressor, size=300, rows=12)
    rounds, clients = 3, 4
    run = federate_securely(everyone, clients=clients, rounds=rounds, size=300)
    counted = -run.parameters * sum(samples_of(client) for client in range(clients))
    given: Any = sum(samples_of(c) * learned(c, index, 302) for c in range(clients) for index in range(rounds))
    owed = torch.zeros(302, dtype=torch.float64)
    for client, store in enumerate(run.stores):
        for own in store.load().residuals:
            owed += samples_of(client) * own["residual"]
    off = (counted + owed - given).abs().max().item()
    if "feedback=False" in compressor:
        assert off > 0.01  # the twin: nothing is kept
    else:
        assert off < 1e-9


def test_an_update_never_leaves_without_the_masks_of_the_recipe() -> None:
    """The server runs the recipe without them, and asks for updates as they are."""
    from support import federations

    real = federations.ClientRecipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            federations, "ClientRecipe",
            lambda **fields: real(
                **{**fields, "strategy": FedAvg(fraction=1.0, secure=EXACT), "roster": SimulatedRoster()}
            ),
        )  # fmt: skip
        run = federate("FedAvg(fraction=1.0)", clients=3, rounds=1)
    assert "requested client 0's update unmasked" in str(run.trace.ended[Peer(CLIENT, 0)].error)
    assert run.commits == []
    assert run.trace.sent_bytes.get((Peer(CLIENT, 0), THE_SERVER), 0) == 0


def test_devices_without_identities_and_small_cohorts_are_refused() -> None:
    everyone = secure_recipe(EXACT)
    nobody = type(everyone)(**{**vars(everyone), "roster": None})
    with pytest.raises(AttachError, match="client 3 has no identity"):
        nobody.enrolled(3)
    with pytest.raises(RecipeError, match="cohorts of 2, too small"):
        federate_securely(everyone, clients=2)
    with pytest.raises(RecipeError, match="has no masks"):
        federate_securely(type(everyone)(**{**vars(everyone), "strategy": FedAvg(fraction=1.0)}))


def test_bytes_on_the_wire() -> None:
    """Of a device: 160 for its keys, 82 a neighbor's shares, the packed vector, 64 signed, 33 a share that it tells."""
    run = federate_securely(secure_recipe(EXACT, size=998), size=998)
    count = 1000 + 11  # entries, 2 + 4 digits of weight and steps, 2 flags of the block and 3 of the weight
    masked = -(-count // 8) * 3 + 2 * count  # 19 bits: two whole bytes and three planes
    assert run.trace.sent_bytes[Peer(CLIENT, 0), THE_SERVER] == 160 + 4 * 82 + masked + 64 + 5 * 33
    assert KEYS != REVEAL


def test_the_server_makes_these_rounds_where_the_strategy_masks() -> None:
    everyone = secure_recipe(EXACT)
    model = GlobalModel(everyone.strategy, everyone.compressor, None, everyone.state, ZERO)
    found = rounds_made(model, clients=5, rounds=1, identities=everyone.roster, phase_seconds=3.0)
    assert isinstance(found, SecureRounds)
    with pytest.raises(RecipeError, match="knows no identities"):
        rounds_made(model, clients=5, rounds=1)
    plain = GlobalModel(FedAvg(), everyone.compressor, None, everyone.state, ZERO)
    with pytest.raises(RecipeError, match="phase_seconds means nothing"):
        rounds_made(plain, clients=5, rounds=1, phase_seconds=3.0)
    with pytest.raises(RecipeError, match="late="):
        rounds_made(model, clients=5, rounds=1, identities=everyone.roster, late="count")
    with pytest.raises(RecipeError, match=r"PowerOfChoice chooses by the losses .* write LeastTrained"):
        rounds_made(model, clients=5, rounds=1, identities=everyone.roster, selection=PowerOfChoice())
    rounds_made(model, clients=5, rounds=1, identities=everyone.roster, selection=LeastTrained())
