"""Report: lines and records of rounds, and lines while a round waits."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

from support.rounds_by_hand import ByHand, rounds_of

from gossamer.algorithms.strategies.federated_rules import FedAvg, FedBuff
from gossamer.federated.deployment.report import EVERY_SECONDS, FIRST_SECONDS, Gathering, RoundReport
from gossamer.federated.messages import Report
from gossamer.federated.server.rounds import Committed

REPORTS = {
    2: Report(samples=1, steps=1, metrics={"loss": 4.0}),
    0: Report(samples=3, steps=1, metrics={"loss": 0.0, "other": 1.0}),
}


def made(version: int, **known: object) -> Committed:
    return replace(Committed(version, 0.0, REPORTS), **known)


def test_a_round_is_a_line_and_an_entry(tmp_path: Path) -> None:
    said: list[str] = []
    report = RoundReport(9, said.append, tmp_path / "rounds.jsonl")
    report.write(replace(report.round_made(made(1), 5, (2000, 1_000_000)), metrics={"accuracy": 0.5}))
    second = made(2, refused={1: "client 1 was refused"}, epsilon=0.125)
    report.write(report.round_made(second, 4, (5000, 1_000_000)))
    assert said[0].endswith("2 of 5 devices  up 2.0 kB  down 1.0 MB  accuracy 0.5")
    assert said[1].startswith("round 2/9")
    assert said[1].endswith("2 of 4 devices  1 refused  up 3.0 kB  down 0 B  epsilon 0.125  loss 1  other 1")
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('\n{"round": 2, "vers')
    again = RoundReport(9, said.append, tmp_path / "rounds.jsonl")
    assert again.rounds == report.rounds
    again.record(tmp_path / "record.json", ended="stopped")
    found = json.loads((tmp_path / "record.json").read_text())
    assert (found["ended"], found["up_bytes"]) == ("stopped", 5000)
    assert [each["clients"] for each in found["history"]] == [[0, 2], [0, 2]]
    assert [each["epsilon"] for each in found["history"]] == [None, 0.125]


def test_a_device_that_was_drawn_is_written_nowhere(tmp_path: Path) -> None:
    report = RoundReport(9, lambda text: None, tmp_path / "rounds.jsonl", names_clients=False)
    report.write(report.round_made(made(1, refused={5: "client 5 was refused"}), 6, (0, 0)))
    found = json.loads((tmp_path / "rounds.jsonl").read_text())
    assert (found["counted"], found["refused_count"]) == (2, 1)
    assert (found["clients"], found["refused"]) == ([], {})


def test_lines_of_numbers_that_are_not_finite_are_json(tmp_path: Path) -> None:
    report = RoundReport(9, lambda text: None, tmp_path / "rounds.jsonl")
    report.write(replace(report.round_made(made(1), 6, (0, 0)), metrics={"loss": inf}))
    report.record(tmp_path / "record.json", ended="stopped")
    for path in (tmp_path / "rounds.jsonl", tmp_path / "record.json"):
        assert "Infinity" not in path.read_text()
    assert RoundReport(9, lambda text: None, tmp_path / "rounds.jsonl").rounds == report.rounds


def test_rows_of_versions_that_no_journal_has_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    report = RoundReport(9, lambda text: None, path)
    for version in (1, 2, 3):
        report.keep(report.round_made(made(version), 6, (0, 0)))
    again = RoundReport(9, lambda text: None, path, made=2)
    assert [each.version for each in again.rounds] == [1, 2]
    evaluated = replace(again.rounds[0], metrics={"accuracy": 0.5})
    again.write(evaluated)  # later than version 2 was made
    again.write(evaluated)
    assert [each.version for each in again.rounds] == [1, 2]
    assert RoundReport(9, lambda text: None, path, made=1).rounds == [evaluated]
    assert len([text for text in path.read_text().splitlines() if text]) == 4


def gathering(hand: ByHand, gather_seconds: float = inf) -> tuple[Gathering, list[str]]:
    said: list[str] = []
    return Gathering(hand.rounds, said.append, gather_seconds), said


def test_a_device_that_is_missing_is_said_now_and_then() -> None:
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
