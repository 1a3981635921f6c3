"""Federated run: holds what came of a federation: its model, rounds, bytes, virtual seconds and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """A version that was made. Bytes are of payloads that arrived or were lost since the version before, also of
    devices that were not counted."""

    version: int  # from 1
    virtual_seconds: float  # since the beginning
    seconds: float  # real ones, since the version before
    clients: tuple[int, ...]  # whose contributions were counted
    up_bytes: Mapping[int, int]  # by client
    down_bytes: Mapping[int, int]  # by client
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the function marked evaluate
    train_metrics: Mapping[str, float] = field(default_factory=dict)  # mean over the counted, by their samples
    refused: Mapping[int, str] = field(default_factory=dict)  # by client: why it was not counted
    epsilon: float | None = None  # spent so far, where privacy is accounted

    @property
    def up(self) -> int:
        return sum(self.up_bytes.values())

    @property
    def down(self) -> int:
        return sum(self.down_bytes.values())

    @property
    def all_metrics(self) -> dict[str, float]:
        """Those of training, and over them those of evaluation."""
        return {**self.train_metrics, **self.metrics}


@dataclass(kw_only=True)
class FederatedRun:
    """A federation that has ended, or goes on."""

    recipe: str
    clients: int
    model: nn.Module  # with the parameters of the last version
    training: str = ""  # how devices were trained
    rounds: list[RoundRecord] = field(default_factory=list)
    ended: str = "running"  # finished, reached (until), exhausted (a privacy budget), interrupted
    failures: dict[int, str] = field(default_factory=dict)  # by client: why it gave up for good

    @property
    def seconds(self) -> float:
        """Real ones."""
        return sum(each.seconds for each in self.rounds)

    @property
    def virtual_seconds(self) -> float:
        return self.rounds[-1].virtual_seconds if self.rounds else 0.0

    @property
    def up_bytes(self) -> int:
        return sum(each.up for each in self.rounds)

    @property
    def down_bytes(self) -> int:
        return sum(each.down for each in self.rounds)

    @property
    def metrics(self) -> dict[str, list[float | None]]:
        """By name, over the rounds."""
        return _curves([each.metrics for each in self.rounds])

    def bytes_by_client(self) -> dict[int, tuple[int, int]]:
        """Up and down of every device that was ever chosen."""
        up: Counter[int] = Counter()
        down: Counter[int] = Counter()
        for each in self.rounds:
            up.update(each.up_bytes)
            down.update(each.down_bytes)
        return {client: (up[client], down[client]) for client in sorted(up | down)}

    def record(self) -> dict[str, Any]:
        """As JSON has it: curves over rounds are lists alike in length."""
        by_client = self.bytes_by_client()
        return {
            "recipe": self.recipe,
            "clients": self.clients,
            "rounds": len(self.rounds),
            "ended": self.ended,
            "training": self.training,
            "seconds": self.seconds,
            "seconds_per_round": self.seconds / max(len(self.rounds), 1),
            "virtual_seconds": self.virtual_seconds,
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
            "by_client": {
                str(client): {"up_bytes": up, "down_bytes": down} for client, (up, down) in by_client.items()
            },
            "by_round": {
                "seconds": [each.seconds for each in self.rounds],
                "virtual_seconds": [each.virtual_seconds for each in self.rounds],
                "up_bytes": [each.up for each in self.rounds],
                "down_bytes": [each.down for each in self.rounds],
                "clients": [list(each.clients) for each in self.rounds],
                "up_bytes_by_client": [_texts(each.up_bytes) for each in self.rounds],
                "down_bytes_by_client": [_texts(each.down_bytes) for each in self.rounds],
                "refused": [{str(client): why for client, why in each.refused.items()} for each in self.rounds],
                "epsilon": [each.epsilon for each in self.rounds],
            },
            "metrics": self.metrics,
            "train_metrics": _curves([each.train_metrics for each in self.rounds]),
            "failures": {str(client): why for client, why in self.failures.items()},
        }


def _texts(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(client): nbytes for client, nbytes in counts.items()}


def _curves(points: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    names = {name: None for point in points for name in point}
    return {name: [point.get(name) for point in points] for name in names}
