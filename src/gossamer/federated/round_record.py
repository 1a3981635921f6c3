"""Round record: what is known of a version that was made, in simulated and in served federations alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import msgspec

from gossamer.federated.client.functions import weighted_mean
from gossamer.federated.messages import Report
from gossamer.federated.server.rounds import Committed


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """A version that was made. Bytes are of all devices since the version before, also of those that were not counted:
    of payloads that arrived or were lost where the federation is simulated, else of frames."""

    version: int  # from 1
    seconds: float  # real ones, since the version before
    virtual_seconds: float | None = None  # since the beginning, where time is virtual
    present: int | None = None  # devices that had joined and were connected, where they are real
    counted: int  # contributions that the version is made of
    samples: int  # that these were trained on
    clients: tuple[int, ...] = ()  # whose they are; nobody's where that must not be known
    refused_count: int = 0  # contributions that were not counted since the version before
    refused: Mapping[int, str] = field(default_factory=dict)  # why, by client; empty where that must not be known
    up_bytes: int
    down_bytes: int
    up_bytes_by_client: Mapping[int, int] = field(default_factory=dict)  # where the federation is simulated
    down_bytes_by_client: Mapping[int, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the function marked evaluate
    train_metrics: Mapping[str, float] = field(default_factory=dict)  # mean over the counted, by their samples
    epsilon: float | None = None  # spent so far, where privacy is accounted

    @classmethod
    def of(cls, committed: Committed, *, names_clients: bool = True, **measured: Any) -> RoundRecord:
        """names_clients: whether it may be known who took part. measured: seconds, bytes, metrics."""
        reports = committed.reports
        names: dict[str, Any] = {}
        if names_clients:
            names = {"clients": tuple(sorted(reports)), "refused": dict(committed.refused)}
        return cls(
            version=committed.version,
            counted=len(reports),
            samples=sum(each.samples for each in reports.values()),
            refused_count=len(committed.refused),
            train_metrics=mean_metrics(reports),
            epsilon=committed.epsilon,
            **names,
            **measured,
        )

    @classmethod
    def read(cls, found: Any) -> RoundRecord:
        """Of what `as_json` gave. Raises msgspec.ValidationError."""
        return msgspec.convert(found, cls, str_keys=True, strict=False)

    def as_json(self) -> dict[str, Any]:
        """All that is known, by the names it has here. Numbers that are not finite are text, such as "nan", because
        JSON has no number for them."""
        found: dict[str, Any] = _json_numbers(msgspec.to_builtins(self, str_keys=True))
        return found

    @property
    def all_metrics(self) -> dict[str, float]:
        """Those of training, and over them those of evaluation."""
        return {**self.train_metrics, **self.metrics}


def record_of(rounds: Sequence[RoundRecord], **about: Any) -> dict[str, Any]:
    """A federation as JSON has it. about: what is known of it beside its rounds."""
    return {
        **about,
        "rounds": len(rounds),
        "seconds": sum(each.seconds for each in rounds),
        "up_bytes": sum(each.up_bytes for each in rounds),
        "down_bytes": sum(each.down_bytes for each in rounds),
        "history": [each.as_json() for each in rounds],
    }


def _json_numbers(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _json_numbers(each) for name, each in found.items()}
    return str(found) if isinstance(found, float) and not isfinite(found) else found


def mean_metrics(reports: Mapping[int, Report]) -> dict[str, float]:
    """What devices say of their training: of those that tell a metric, weighted by their samples."""
    told: dict[str, list[tuple[float, int]]] = {}
    for _, report in sorted(reports.items()):
        for name, value in report.metrics.items():
            if report.samples:
                told.setdefault(name, []).append((value, report.samples))
    return {name: weighted_mean(*zip(*pairs, strict=True)) for name, pairs in told.items()}
