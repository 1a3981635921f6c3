"""Gathering: a round that waits for devices says so, once and then seldom; one that goes on says nothing."""

from __future__ import annotations

from math import inf

from support.rounds_by_hand import ByHand, rounds_of

from gossamer.algorithms.strategies.federated import FedAvg, FedBuff
from gossamer.federated.deployment.report import EVERY_SECONDS, FIRST_SECONDS, Gathering


def gathering(hand: ByHand, gather_seconds: float = inf) -> tuple[Gathering, list[str]]:
    said: list[str] = []
    return Gathering(hand.rounds, said.append, gather_seconds), said


def test_who_is_missing_is_said_now_and_then() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=0.5), 6))
    looking, said = gathering(hand, 600.0)
    hand.ask(0)
    looking.look(0.0)
    looking.look(FIRST_SECONDS - 1)
    assert said == []
    looking.look(FIRST_SECONDS)
    looking.look(FIRST_SECONDS + 1)
    assert said == ["1 of 3 devices that a round begins with are here; after 600 s it begins with those that are"]
    looking.look(FIRST_SECONDS + EVERY_SECONDS)
    assert len(said) == 2
    hand.ask(1)
    looking.look(FIRST_SECONDS + EVERY_SECONDS + 1)
    assert said[2].startswith("2 of 3 devices")
    hand.ask(2)
    looking.look(1000.0)
    looking.look(2000.0)
    assert len(said) == 3


def test_fewer_are_enough_after_a_while() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=0.5), 6, gather_seconds=60.0, fewest=2))
    looking, said = gathering(hand, 60.0)
    hand.ask(0)
    hand.wait_until(60.0)
    looking.look(0.0)
    looking.look(60.0)
    assert [text.partition(";")[0] for text in said] == ["1 of 2 devices that a round begins with are here"]
    hand.ask(1)
    assert hand.training == [0, 1]


def test_without_rounds_one_device_is_enough() -> None:
    hand = ByHand(rounds_of(FedBuff(buffer=2), 6))
    looking, said = gathering(hand)
    looking.look(0.0)
    looking.look(60.0)
    assert said == ["0 of 1 devices that a round begins with are here"]


def test_a_buffer_that_lacks_reports_says_so() -> None:
    hand = ByHand(rounds_of(FedBuff(fraction=1.0, buffer=4), 6, gather_seconds=60.0, fewest=2))
    looking, said = gathering(hand, 60.0)
    hand.ask(0)
    looking.look(0.0)
    looking.look(10.0)
    assert said == [], "it trains"
    hand.report(0)
    looking.look(20.0)
    looking.look(20.0 + FIRST_SECONDS)
    assert said == ["1 of 4 reports that a version is made of are here; after 60 s it is made of those that are"]
    hand.wait_until(60.0)
    looking.look(100.0)
    assert said[1].startswith("1 of 2 reports")
