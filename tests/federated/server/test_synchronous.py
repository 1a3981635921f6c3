"""Synchronous rounds: one step on every device is one step on their joined batch, whatever the network does."""

from __future__ import annotations

import sys
from math import sqrt
from typing import Any

import pytest
import torch
from support.federations import RATE, data_of, federate, model_of
from support.rounds_by_hand import ByHand, rounds_of

from gossamer.algorithms.strategies.federated_rules import SCAFFOLD, CentralPrivacy, FedAvg, FedBuff, FederatedStrategy
from gossamer.base.peer_ops import Peer
from gossamer.comm.simulation.faulty_network import Kill, VirtualNetwork
from gossamer.errors import RecipeError
from gossamer.federated.messages import CLIENT, NOT_COUNTED, THE_SERVER
from gossamer.federated.privacy.accountant import PoissonSelection
from gossamer.federated.server.rounds import Rounds


def joined_batch(rounds: int, clients: int) -> torch.Tensor:
    """Parameters after so many steps of gradient descent on all devices' data."""
    model = model_of()
    parts = [data_of(client) for client in range(clients)]
    inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(rounds):
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@pytest.mark.parametrize("recipe", ["FedAvg(fraction=1.0, local_steps=1)", "FedAvg(fraction=1.0)"])
def test_one_step_on_every_device_is_one_step_on_the_joined_batch(recipe: str) -> None:
    run = federate(recipe, clients=4, rounds=3)
    assert torch.allclose(run.parameters, joined_batch(3, 4), rtol=0, atol=1e-12)
    assert not torch.allclose(run.parameters, joined_batch(2, 4), rtol=0, atol=1e-3)  # the twin: a round less
    assert [each.version for each in run.commits] == [1, 2, 3]


@pytest.mark.parametrize("recipe", ["FedAvg(fraction=0.5) + TopK(0.5)", "FedAvg(fraction=0.5, pull=Int8()) + Int8()"])
def test_rounds_end_where_messages_are_lost_doubled_and_late(recipe: str) -> None:
    bad = VirtualNetwork(round_trip_seconds=0.1, jitter_seconds=0.2, loss=0.2, duplicate=0.2, dead_after_seconds=1e9)
    for seed in range(3):
        run = federate(recipe, clients=6, rounds=4, part_bytes=8, net=bad, seed=seed)
        assert [len(each.reports) for each in run.commits] == [3] * 4


def test_a_round_continues_without_a_device_that_was_killed() -> None:
    net = VirtualNetwork(round_trip_seconds=1.0, dead_after_seconds=5.0, faults=(Kill(Peer(CLIENT, 1), at=1.5),))
    run = federate("FedAvg(fraction=1.0)", clients=3, rounds=1, net=net)
    assert sorted(run.commits[0].reports) == [0, 2]
    assert run.rounds.model.public.version == 1
    assert run.trace.sent_bytes[Peer(CLIENT, 0), THE_SERVER] > 0


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_round_ends_with_its_cohort_and_the_slowest_are_not_waited_for() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=0.5), 4, over_selection=0.5))
    hand.ask(0, 1)
    assert not hand.tasks, "it waits for as many as are chosen"
    hand.ask(2, 3)
    chosen = hand.training
    assert len(chosen) == 3
    hand.report(chosen[0], 1.0)
    assert not hand.receipts
    hand.report(chosen[1], 3.0)
    assert hand.receipts == {chosen[0]: 1, chosen[1]: 1}
    assert hand.parameter == -2.0
    hand.report(chosen[2], 100.0)
    assert hand.receipts[chosen[2]] == NOT_COUNTED
    assert hand.parameter == -2.0


def test_at_the_deadline_a_round_is_made_of_what_is_there_or_given_up() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 3, round_seconds=10.0, fewest=2))
    hand.ask(0, 1, 2)
    hand.report(0)
    assert hand.rounds.due == 10.0
    hand.wait_until(10.0)
    assert hand.receipts == {0: NOT_COUNTED}, "one is too few"
    hand.report(1)
    assert hand.receipts == {0: NOT_COUNTED, 1: NOT_COUNTED}
    assert hand.rounds.model.version == 0
    hand.ask(0, 1, 2)
    assert hand.taken_tasks((0, 1, 2)) == [1, 1, 1]
    hand.report(2)
    hand.report(1)
    hand.wait_until(20.0)
    assert hand.receipts == {0: NOT_COUNTED, 1: 1, 2: 1}


def test_a_late_report_is_a_part_of_the_next_version() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 3, round_seconds=10.0, late="count"))
    hand.ask(0, 1, 2)
    hand.report(0, 0.0)
    hand.report(1, 0.0)
    hand.wait_until(10.0)
    assert hand.receipts == {0: 1, 1: 1}
    hand.ask(0, 1)
    assert hand.taken_tasks((0, 1, 2)) == [1, 1, 0]
    hand.report(2, 4.0)
    hand.report(0, 1.0)
    assert 2 not in hand.receipts
    hand.report(1, 1.0)
    assert hand.receipts == {0: 2, 1: 2, 2: 2}
    late = 1 / sqrt(2)
    assert hand.parameter == pytest.approx(-(4.0 * late + 2.0) / (2 + late), rel=1e-15)


def test_what_devices_remember_is_not_counted_in_part() -> None:
    """Or the server's variate would no longer be the mean of theirs."""
    with pytest.raises(RecipeError, match=r'SCAFFOLD.* Write late="drop"'):
        rounds_of(SCAFFOLD(fraction=1.0), 3, round_seconds=10.0, late="count")
    rounds_of(SCAFFOLD(fraction=1.0), 3, round_seconds=10.0)


def test_a_report_that_is_too_late_does_not_count() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 3, round_seconds=10.0, late="count", late_versions=1))
    hand.ask(0, 1, 2)
    for version in (1, 2):
        hand.report(0)
        hand.report(1)
        hand.wait_until(10.0 * version)
        assert hand.receipts[0] == version
        hand.ask(0, 1)
    hand.report(2)
    assert hand.receipts[2] == NOT_COUNTED


def test_a_device_that_left_is_not_waited_for_and_counts_if_it_is_back_in_time() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 3))
    hand.ask(0, 1, 2)
    hand.leave(2)
    hand.report(0)
    hand.join(2)
    hand.report(1)
    assert not hand.receipts, "it is back, and expected"
    hand.report(2)
    assert hand.receipts == {0: 1, 1: 1, 2: 1}
    hand.ask(0, 1)
    assert hand.taken_tasks((0, 1)) == [0, 0], "the third has not left"
    hand.leave(2)
    assert hand.taken_tasks((0, 1)) == [1, 1], "two are all there are"


def test_a_round_begins_with_fewer_once_it_has_waited_long_enough() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 4, gather_seconds=5.0, fewest=2))
    hand.ask(0)
    hand.wait_until(5.0)
    assert not hand.tasks
    assert hand.rounds.due == float("inf"), "nothing is to be done before somebody comes"
    hand.ask(1)
    assert hand.training == [0, 1]


def test_a_device_that_was_refused_takes_part_in_the_next_round() -> None:
    """It is told a later round than the one that it was refused in, though all others were refused as well."""
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 2))
    hand.ask(0, 1)
    hand.report(0, samples=0)
    hand.ask(0)
    assert hand.tasks[0].round == 0
    hand.report(1, samples=0)
    hand.ask(1)
    assert hand.taken_tasks((0, 1)) == [1, 1]
    assert hand.receipts == {0: NOT_COUNTED, 1: NOT_COUNTED}


def test_after_a_restart_devices_that_stay_silent_are_not_waited_for() -> None:
    before = ByHand(rounds_of(FedAvg(fraction=1.0), 3))
    before.ask(0, 1, 2)
    rounds = rounds_of(FedAvg(fraction=1.0), 3, return_seconds=7.0)
    rounds.load_state_dict(before.rounds.state_dict())
    after = ByHand(rounds, moment=100.0, tasks=before.tasks)
    after.report(0)
    after.join(1)
    assert rounds.due == 107.0
    after.wait_until(107.0)
    assert after.training == [1]
    after.report(1)
    assert after.receipts == {0: 1, 1: 1}


RESTARTED: dict[str, tuple[FederatedStrategy, dict[str, Any]]] = {
    "synchronous": (FedAvg(fraction=1.0), {}),
    "buffered": (FedBuff(fraction=1.0, buffer=3), {}),
    "drawn": (
        FedAvg(fraction=1.0, privacy=CentralPrivacy(noise=1.0, clip=1.0, delta=0.01)),
        {"selection": PoissonSelection(1.0)},
    ),
}


@pytest.mark.parametrize("name", RESTARTED)
def test_after_a_restart_between_rounds_a_device_that_stays_silent_is_not_waited_for(name: str) -> None:
    """Nobody had a task, and one of three devices never comes back."""
    strategy, options = RESTARTED[name]
    before = ByHand(rounds_of(strategy, 3, **options))
    before.ask(0, 1, 2)
    for client in range(3):
        before.report(client)
    rounds = rounds_of(strategy, 3, return_seconds=7.0, **options)
    rounds.load_state_dict(before.rounds.state_dict())
    assert not rounds.assigned
    assert rounds.model.version == 1
    after = ByHand(rounds, moment=100.0, tasks=before.tasks)
    after.ask(0, 1)
    for client in after.training:
        after.report(client)
    assert after.rounds.model.version == 1, "the third may come"
    assert rounds.due == 107.0
    after.wait_until(107.0)
    for client in after.training:
        after.report(client)
    assert after.receipts == {0: 2, 1: 2}
    after.ask(2, 0, 1)
    assert after.tasks[2].round == 2, "it is back, and takes part"


def test_a_new_server_waits_for_devices_that_it_never_knew() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 3, return_seconds=7.0))
    hand.ask(0, 1)
    assert hand.rounds.due == float("inf")
    hand.wait_until(1000.0)
    assert not hand.tasks


@pytest.mark.parametrize("claimed", [2, 41, 1 << 40])
def test_a_device_that_remembers_rounds_which_never_were_moves_no_round(claimed: int) -> None:
    """It may be one of another past, so it is told which past this is."""
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 2))
    hand.ask(0, at_least=claimed)
    assert "another federation" in hand.tasks[0].refused
    assert hand.tasks[0].lineage == hand.rounds.model.lineage
    hand.tasks.clear()
    hand.ask(0, 1, at_least=0)
    assert hand.taken_tasks((0, 1)) == [0, 0]


def test_devices_that_wait_cost_nothing() -> None:
    """What a round calls is the same beside a hundred devices that wait and beside ten thousand."""

    def calls(clients: int) -> int:
        hand = ByHand(rounds_of(FedAvg(fraction=10 / clients), clients))
        hand.ask(*range(clients))
        one_round(hand)
        count = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(counted)
        try:
            one_round(hand)
        finally:
            sys.setprofile(None)
        return count

    def one_round(hand: ByHand) -> None:
        chosen = hand.training
        for client in chosen:
            hand.report(client)
        hand.ask(*chosen)
        assert len(chosen) == 10

    few, many = calls(100), calls(10_000)
    assert abs(many - few) < few / 20


def test_nothing_is_kept_of_devices_that_know_their_fate() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 4))
    for _ in range(5):
        hand.ask(*range(4))
        for client in range(4):
            hand.report(client)
    rounds: Rounds = hand.rounds
    assert sorted(rounds.roster.counted) == [0, 1, 2, 3]
    hand.ask(*range(4))
    assert rounds.roster.counted == {}
    assert rounds.uploads.nbytes == 0
    assert not rounds.roster.waiting
