"""Round report: a line for every round while a federation runs, and the record of all of them as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from gossamer.core.json_text import read_json
from gossamer.federated.deployment.files import replace_file
from gossamer.federated.messages import Report
from gossamer.observe.units import bytes_text

Line = Callable[[str], None]


class RoundReport:
    """Collects rounds. path: of their lines on disk, one a round, which a restarted server goes on with."""

    def __init__(self, about: Mapping[str, Any], say: Line, path: Path | None = None) -> None:
        self._about, self._say, self._path = dict(about), say, path
        self.rounds: list[dict[str, Any]] = _read(path) if path is not None and path.is_file() else []
        self._bytes_before, self._began = (0, 0), monotonic()

    def round_made(
        self, version: int, reports: Mapping[int, Report], present: int, traffic: tuple[int, int]
    ) -> dict[str, Any]:
        """A round's entry. traffic: bytes up and down so far. Its evaluation may follow."""
        now = monotonic()
        up, down = (here - before for here, before in zip(traffic, self._bytes_before, strict=True))
        entry = {
            "round": version - 1,
            "version": version,
            "seconds": round(now - self._began, 3),
            "clients": sorted(reports),
            "present": present,
            "bytes_up": up,
            "bytes_down": down,
            "samples": sum(each.samples for each in reports.values()),
            "training": weighted_metrics(reports),
        }
        self._bytes_before, self._began = traffic, now
        return entry

    def write(self, entry: dict[str, Any], metrics: Mapping[str, float] | None) -> None:
        """Say a round's line and keep it."""
        if metrics:
            entry["evaluation"] = dict(metrics)
        self.rounds = [each for each in self.rounds if each["version"] < entry["version"]] + [entry]
        self._say(line(entry, int(self._about["rounds"])))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write("\n" + json.dumps(entry))  # a line of before may be torn

    def record(self, path: Path, ended: str) -> None:
        """Raises CheckpointError where it cannot be written."""
        replace_file(path, json.dumps({**self._about, "ended": ended, "history": self.rounds}, indent=1) + "\n")


def weighted_metrics(reports: Mapping[int, Report]) -> dict[str, float]:
    """What devices say of their training, by their numbers of samples."""
    sums: dict[str, tuple[float, float]] = {}
    for report in reports.values():
        for key, value in report.metrics.items():
            total, weight = sums.get(key, (0.0, 0.0))
            sums[key] = total + value * report.samples, weight + report.samples
    return {key: total / weight for key, (total, weight) in sums.items()}


def line(entry: Mapping[str, Any], rounds: int) -> str:
    """One round in a line."""
    shown = entry.get("evaluation") or entry["training"]
    parts = [
        f"round {entry['version']}/{rounds}",
        f"{entry['seconds']:.1f} s",
        f"{len(entry['clients'])} of {entry['present']} devices",
        f"up {bytes_text(entry['bytes_up'])}",
        f"down {bytes_text(entry['bytes_down'])}",
        *(f"{key} {value:.4g}" for key, value in shown.items()),
    ]
    return "  ".join(parts)


def _read(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last may be torn; of two of one version the later counts."""
    found: dict[int, dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        try:
            entry = read_json(text)
            found[int(entry["version"])] = entry
        except (ValueError, KeyError, TypeError):
            continue
    return [found[version] for version in sorted(found)]
