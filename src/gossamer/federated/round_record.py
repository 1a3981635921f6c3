"""Round record: statistics of a version, in simulated and deployed federations alike."""

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
    """Statistics of a version.

    Bytes are of all devices since the previous version, including those that were not counted. In a simulation they are
    bytes of payloads that arrived or were lost, otherwise bytes of frames.
    """

    version: int  # from 1
    seconds: float  # wall-clock, since the previous version
    virtual_seconds: float | None = None  # since the beginning, in a simulation
    present: int | None = None  # connected devices that have joined, in a deployment
    counted: int  # contributions in the version
    samples: int  # training samples of these contributions
    clients: tuple[int, ...] = ()  # contributing clients; empty if privacy requires it
    refused_count: int = 0  # contributions refused since the previous version
    refused: Mapping[int, str] = field(default_factory=dict)  # reasons by client; empty if privacy requires it
    up_bytes: int
    down_bytes: int
    up_bytes_by_client: Mapping[int, int] = field(default_factory=dict)  # in a simulation
    down_bytes_by_client: Mapping[int, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the evaluation function
    train_metrics: Mapping[str, float] = field(default_factory=dict)  # mean over the counted, by their samples
    epsilon: float | None = None  # spent so far, with privacy

    @classmethod
    def of(cls, committed: Committed, *, names_clients: bool = True, **measured: Any) -> RoundRecord:
        """Make the record. names_clients: whether clients may be named. measured: seconds, bytes, metrics."""
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
        """Parse the result of `as_json`. Raises msgspec.ValidationError."""
        return msgspec.convert(found, cls, str_keys=True, strict=False)

    def as_json(self) -> dict[str, Any]:
        """All fields by name. Numbers that are not finite are text, such as "nan", since JSON has no number for
        them."""
        found: dict[str, Any] = _json_numbers(msgspec.to_builtins(self, str_keys=True))
        return found

    @property
    def all_metrics(self) -> dict[str, float]:
        """Training metrics, overridden by evaluation metrics of the same name."""
        return {**self.train_metrics, **self.metrics}


def record_of(rounds: Sequence[RoundRecord], **about: Any) -> dict[str, Any]:
    """The record of a federation as JSON-compatible data. about: fields in addition to the rounds."""
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
    """Means of the reported training metrics, weighted by the samples of the devices that report them."""
    values_by_name: dict[str, list[tuple[float, int]]] = {}
    for _, report in sorted(reports.items()):
        for name, value in report.metrics.items():
            if report.samples:
                values_by_name.setdefault(name, []).append((value, report.samples))
    return {name: weighted_mean(*zip(*pairs, strict=True)) for name, pairs in values_by_name.items()}
