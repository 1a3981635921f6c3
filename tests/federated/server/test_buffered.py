"""Buffered rounds: as many devices train as a cohort has, from whatever version there is, and each report is one."""

from __future__ import annotations

import pytest
from support.federated_faults import SAMPLES, Buffered, WholeNumbers, check_conserved, some_seconds
from support.rounds_by_hand import ByHand, rounds_of

from gossamer.algorithms.strategies.federated_rules import LocalWork
from gossamer.errors import RecipeError
from gossamer.federated.messages import NOT_COUNTED
from gossamer.federated.server.selection import WithinDeadline


class Alike(Buffered):
    """Every report weighs the same, however late."""

    def weight(self, work: LocalWork, staleness: int) -> float:
        return 1.0


def test_averages_are_of_updates_not_of_versions() -> None:
    """A device from version 0 and two from version 1: a third of each, and not a half of the first."""
    hand = ByHand(rounds_of(Alike(fraction=1.0, buffer=3), 4))
    hand.ask(0, 1, 2, 3)
    assert hand.training == [0, 1, 2, 3]
    for client in (0, 1, 2):
        hand.report(client, 0.0)
    assert hand.receipts == {0: 1, 1: 1, 2: 1}
    hand.ask(0, 1)
    hand.report(3, 9.0)
    hand.report(0, 3.0)
    assert 3 not in hand.receipts
    hand.report(1, 3.0)
    assert hand.parameter == -(9.0 + 3.0 + 3.0) / 3
    assert hand.parameter != -(9.0 + (3.0 + 3.0) / 2) / 2  # the twin: of versions
    assert hand.rounds.model.version == 2


def test_a_report_weighs_by_how_many_versions_were_made_since() -> None:
    hand = ByHand(rounds_of(Buffered(fraction=1.0, buffer=1), 3))
    hand.ask(0, 1, 2)
    hand.report(0, 0.0)
    hand.report(1, 0.0)
    hand.rounds.buffer = 2  # type: ignore[attr-defined]
    hand.ask(0)
    hand.report(2, 8.0)  # two versions late: a third
    hand.report(0, 4.0)
    assert hand.parameter == -(8.0 / 3 + 4.0) / (4 / 3)


def test_what_began_too_long_ago_does_not_count() -> None:
    hand = ByHand(rounds_of(Buffered(fraction=1.0, buffer=1, staleness=1), 3))
    hand.ask(0, 1, 2)
    hand.report(0, 1.0)
    hand.report(1, 1.0)
    hand.report(2, 100.0)
    assert hand.receipts == {0: 1, 1: 2, 2: NOT_COUNTED}
    assert hand.rounds.model.version == 2
    hand.ask(2)
    hand.report(2, 1.0)
    assert hand.receipts[2] == 3


def test_a_device_that_was_away_reports_from_the_oldest_version_that_counts() -> None:
    hand = ByHand(rounds_of(Buffered(fraction=1.0, buffer=1, staleness=1), 3))
    hand.ask(0, 1, 2)
    hand.leave(2)
    hand.report(0, 1.0)
    hand.join(2)
    hand.report(2, 1.0)
    assert hand.receipts == {0: 1, 2: 2}


def test_there_are_always_as_many_in_training_as_a_cohort_has() -> None:
    hand = ByHand(rounds_of(Buffered(fraction=0.5, buffer=4), 8))
    hand.ask(*range(8))
    for _ in range(3):
        assert len(hand.training) == 4
        hand.report(hand.training[0])
    assert len(hand.training) == 4
    gone = hand.training[0]
    hand.leave(gone)
    assert len(hand.training) == 4, "who left was not replaced"
    assert gone not in hand.training
    hand.join(gone)
    assert gone in hand.training


def test_where_all_have_reported_a_version_is_made_of_fewer() -> None:
    """Two of four devices have left for good: the others do not wait for a buffer that will never be full."""
    hand = ByHand(rounds_of(Buffered(fraction=1.0, buffer=4), 4))
    hand.ask(0, 1)
    hand.report(0)
    hand.report(1)
    assert hand.receipts == {}, "the two others may come yet"
    hand.ask(2, 3)
    hand.leave(2)
    hand.leave(3)
    assert hand.receipts == {0: 1, 1: 1}


def gathering(**options: float) -> ByHand:
    """Six devices, of which two are here and have reported to a buffer of four."""
    hand = ByHand(rounds_of(Buffered(fraction=1.0, buffer=4), 6, **options))
    hand.ask(0, 1)
    hand.report(0, 4.0)
    hand.wait_until(3.0)
    assert hand.rounds.due == float("inf"), "one still trains"
    hand.report(1, 2.0)
    return hand


def test_a_version_is_made_of_fewer_once_it_has_waited_long_enough() -> None:
    hand = gathering(gather_seconds=5.0, fewest=2)
    assert hand.rounds.due == 8.0
    hand.wait_until(7.9)
    assert hand.receipts == {}
    hand.wait_until(8.0)
    assert hand.receipts == {0: 1, 1: 1}
    assert hand.parameter == -3.0
    assert hand.rounds.due == float("inf")
    forever = gathering()  # the twin
    forever.wait_until(1e9)
    assert forever.receipts == {}


def test_fewer_than_the_fewest_wait_on_and_then_no_longer_than_for_them() -> None:
    hand = gathering(gather_seconds=5.0, fewest=3)
    hand.wait_until(8.0)
    assert hand.receipts == {}
    assert hand.rounds.due == float("inf"), "nothing is to be done before somebody comes"
    hand.ask(2)
    assert hand.training == [2]
    hand.report(2)
    assert hand.receipts == {0: 1, 1: 1, 2: 1}


def test_a_device_that_comes_meanwhile_is_waited_for() -> None:
    hand = gathering(gather_seconds=5.0)
    hand.wait_until(7.0)
    hand.ask(2)
    hand.wait_until(20.0)
    assert hand.receipts == {}
    hand.report(2)
    assert hand.rounds.due == 25.0, "from when all that are here have reported"
    hand.wait_until(25.0)
    assert hand.receipts == {0: 1, 1: 1, 2: 1}
    hand.ask(0)
    hand.report(0)
    assert hand.rounds.due == 30.0, "anew for each version"


def test_the_fewest_are_not_enough_while_a_device_trains() -> None:
    hand = gathering(gather_seconds=5.0, fewest=3)
    hand.wait_until(8.0)
    hand.ask(2, 3)
    hand.report(2)
    assert hand.receipts == {}
    hand.report(3)
    assert hand.receipts == {0: 1, 1: 1, 2: 1, 3: 1}


def test_a_few_devices_of_a_large_federation_come_to_an_end() -> None:
    """Four take part of ten thousand; nothing is lost or counted twice, and the clock of the last waits goes on."""
    done = WholeNumbers(
        Buffered(fraction=1.0, buffer=64), rounds=5, train_seconds=some_seconds, clients=10_000,
        options={"gather_seconds": 3.0},
    )  # fmt: skip
    done.run()
    check_conserved(done)
    assert {len(made_of) for made_of in done.ledger.versions.values()} == {len(SAMPLES)}


@pytest.mark.parametrize("fewest", [0, 5])
def test_the_fewest_are_of_a_buffer(fewest: int) -> None:
    with pytest.raises(ValueError, match="fewest must be 1 to the buffer's 4"):
        rounds_of(Buffered(buffer=4), 6, fewest=fewest)


def test_a_device_that_says_nothing_gives_its_place_up() -> None:
    policy = WithinDeadline(10.0)
    hand = ByHand(rounds_of(Buffered(fraction=0.25, buffer=1), 4, round_seconds=10.0, selection=policy))
    hand.ask(0)
    hand.ask(1)
    assert hand.training == [0]
    assert hand.rounds.due == 10.0
    hand.wait_until(10.0)
    assert hand.training == [1]
    assert policy.seconds == {0: 10.0}
    hand.report(0)  # late, and it counts
    assert hand.receipts == {0: 1}


def test_a_device_that_asks_again_begins_from_the_newest_version() -> None:
    hand = ByHand(rounds_of(Buffered(fraction=1.0, buffer=1), 2))
    hand.ask(0, 1)
    hand.report(0)
    assert hand.tasks[1].version == 0
    hand.ask(1, at_least=0)
    assert (hand.tasks[1].round, hand.tasks[1].version) == (0, 1)
    hand.report(1)
    assert hand.receipts == {0: 1, 1: 2}


def test_a_device_that_was_refused_waits_for_a_version_unless_all_others_wait_for_it() -> None:
    hand = ByHand(rounds_of(Buffered(fraction=1.0, buffer=2), 3))
    hand.ask(0, 1, 2)
    hand.leave(2)
    hand.report(0)
    hand.report(1, samples=0)
    assert hand.receipts == {1: NOT_COUNTED}
    hand.ask(1)
    assert hand.tasks[1].round == 1
    hand.report(1)
    assert hand.receipts == {0: 1, 1: 1}


@pytest.mark.parametrize("buffer", [1, 3])
def test_it_comes_to_an_end(buffer: int) -> None:
    done = WholeNumbers(Buffered(fraction=1.0, buffer=buffer), rounds=8, train_seconds=some_seconds)
    done.run()
    check_conserved(done)
    assert {len(made_of) for made_of in done.ledger.versions.values()} == {buffer}
    assert any(stale for each in done.ledger.commits for stale in each.staleness.values())


def test_a_buffer_that_is_never_full_is_refused() -> None:
    with pytest.raises(RecipeError, match="FedBuff\\(buffer=4\\)"):
        rounds_of(Buffered(buffer=5), 4)


def test_the_deadline_of_an_old_task_does_not_end_the_devices_new_task() -> None:
    policy = WithinDeadline(10.0)
    hand = ByHand(rounds_of(Buffered(fraction=1.0, buffer=1), 2, round_seconds=10.0, selection=policy))
    hand.ask(0, 1)
    hand.wait_until(8.0)
    hand.report(0)
    hand.ask(0)
    assert hand.training == [0, 1]
    hand.wait_until(10.0)
    assert 0 in hand.training, "its new task began at 8 s"
    assert 0 not in policy.seconds or policy.seconds[0] < 10.0
    hand.wait_until(18.0)
    assert policy.seconds.get(0) == 10.0 or 0 in policy.seconds
