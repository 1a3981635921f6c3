"""Federated run: holds what came of a simulated federation: its model, rounds, bytes, virtual seconds and metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gossamer.federated.round_record import RoundRecord, record_of


@dataclass(kw_only=True)
class FederatedRun:
    """A federation that has ended, or goes on."""

    recipe: str
    clients: int
    model: nn.Module  # with the parameters of the last version
    training: str = ""  # how devices were trained
    rounds: list[RoundRecord] = field(default_factory=list)
    ended: str = "running"  # finished, reached (until), exhausted (a privacy budget), interrupted
    why: str = ""  # it ended, where that was before all rounds were made and nobody interrupted it
    failures: dict[int, str] = field(default_factory=dict)  # by client: why it gave up for good

    @property
    def seconds(self) -> float:
        """Real ones."""
        return sum(each.seconds for each in self.rounds)

    @property
    def virtual_seconds(self) -> float:
        return (self.rounds[-1].virtual_seconds or 0.0) if self.rounds else 0.0

    @property
    def up_bytes(self) -> int:
        return sum(each.up_bytes for each in self.rounds)

    @property
    def down_bytes(self) -> int:
        return sum(each.down_bytes for each in self.rounds)

    @property
    def metrics(self) -> dict[str, list[float | None]]:
        """By name, over the rounds."""
        names = {name: None for each in self.rounds for name in each.metrics}
        return {name: [each.metrics.get(name) for each in self.rounds] for name in names}

    def bytes_by_client(self) -> dict[int, tuple[int, int]]:
        """Up and down of every device that was ever chosen."""
        up: Counter[int] = Counter()
        down: Counter[int] = Counter()
        for each in self.rounds:
            up.update(each.up_bytes_by_client)
            down.update(each.down_bytes_by_client)
        return {client: (up[client], down[client]) for client in sorted(up | down)}

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return record_of(
            self.rounds,
            recipe=self.recipe,
            clients=self.clients,
            ended=self.ended,
            why=self.why,
            training=self.training,
            seconds_per_round=self.seconds / max(len(self.rounds), 1),
            virtual_seconds=self.virtual_seconds,
            by_client={
                str(client): {"up_bytes": up, "down_bytes": down}
                for client, (up, down) in self.bytes_by_client().items()
            },
            failures={str(client): why for client, why in self.failures.items()},
        )
