"""Round report: lines say what a round was, and the record survives a restart, also with a torn last line."""

from __future__ import annotations

import json
from pathlib import Path

from gossamer.federated.deployment.round_report import RoundReport, weighted_metrics
from gossamer.federated.messages import Report

REPORTS = {
    2: Report(samples=1, steps=1, metrics={"loss": 4.0}),
    0: Report(samples=3, steps=1, metrics={"loss": 0.0, "other": 1.0}),
}


def test_a_round_is_a_line_and_an_entry(tmp_path: Path) -> None:
    said: list[str] = []
    report = RoundReport({"rounds": 9}, said.append, tmp_path / "rounds.jsonl")
    report.write(report.round_made(1, REPORTS, 5, (2000, 1_000_000)), {"accuracy": 0.5})
    report.write(report.round_made(2, REPORTS, 4, (5000, 1_000_000)), None)
    assert said[0].endswith("2 of 5 devices  up 2.0 kB  down 1.0 MB  accuracy 0.5")
    assert said[1].startswith("round 2/9")
    assert said[1].endswith("up 3.0 kB  down 0 B  loss 1  other 1")
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('\n{"round": 2, "vers')
    again = RoundReport({"rounds": 9}, said.append, tmp_path / "rounds.jsonl")
    assert again.rounds == report.rounds
    again.record(tmp_path / "record.json", "stopped")
    found = json.loads((tmp_path / "record.json").read_text())
    assert found["ended"] == "stopped"
    assert [each["clients"] for each in found["history"]] == [[0, 2], [0, 2]]


def test_metrics_are_weighted_by_samples() -> None:
    assert weighted_metrics(REPORTS) == {"loss": 1.0, "other": 1.0}
