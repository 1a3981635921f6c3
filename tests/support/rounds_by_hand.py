"""Rounds by hand: every event is said in a test, and every answer is seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.base.peer_ops import Arrived, Elapsed, Peer, PeerEvent, PeerJoined, PeerLeft, Pull, Push, Stamp
from gossamer.federated.messages import CLIENT, REPORT, TASK, THE_SERVER, Report, Task, decode, encode
from gossamer.federated.model_state import ModelState
from gossamer.federated.server.from_strategy import RoundPlan, rounds_for
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.rounds import Rounds

SIZE = 3  # of the model


def rounds_of(strategy: FederatedStrategy, clients: int, rounds: int = 100, **options: Any) -> Rounds:
    """For a model of three numbers, zero at first."""
    state = ModelState.of(nn.Linear(SIZE - 1, 1, dtype=torch.float64))
    model = GlobalModel(strategy, Dense(), None, state, torch.zeros(SIZE, dtype=torch.float64))
    return rounds_made(model, clients=clients, rounds=rounds, **options)


def rounds_made(model: GlobalModel, **options: Any) -> Rounds:
    """The rounds of `rounds_for`, with settings and other arguments in one list."""
    named = {item.name for item in fields(RoundPlan)}
    settings = RoundPlan(**{name: value for name, value in options.items() if name in named})
    return rounds_for(model, settings, **{name: value for name, value in options.items() if name not in named})


@dataclass
class ByHand:
    """Tasks and receipts that came, by client; the last of each."""

    rounds: Rounds
    moment: float = 0.0
    tasks: dict[int, Task] = field(default_factory=dict)
    receipts: dict[int, int] = field(default_factory=dict)
    _tokens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounds.begin(self.moment)

    def ask(self, *clients: int, at_least: int | None = None) -> None:
        """Ask for a task, as a device that knows what became of its last one."""
        for client in clients:
            first = self.tasks[client].round + 1 if client in self.tasks and at_least is None else at_least or 0
            self._arrive(client, Pull(of=THE_SERVER, key=TASK, at_least=first))

    def report(self, client: int, value: float = 1.0, samples: int = 1, **fields: Any) -> None:
        """Report a pseudo-gradient of equal numbers."""
        task, layout = self.tasks[client], self.rounds.model.state.fingerprint
        report = Report(samples=samples, steps=1, counts=(1,), layout=layout, **fields)
        payload = (torch.full((SIZE,), value, dtype=torch.float64),)
        stamp = Stamp(client, task.round, task.version)
        self._arrive(client, Push(to=THE_SERVER, key=REPORT, stamp=stamp, payload=payload, about=encode(report)))

    def leave(self, client: int) -> None:
        self._react(PeerLeft(moment=self.moment, peer=Peer(CLIENT, client)))

    def join(self, client: int) -> None:
        self._react(PeerJoined(moment=self.moment, peer=Peer(CLIENT, client)))

    def wait_until(self, moment: float) -> None:
        self.moment = moment
        self._react(Elapsed(moment=moment))

    @property
    def training(self) -> list[int]:
        return sorted(self.rounds.roster.training)

    @property
    def parameter(self) -> float:
        """The first of the model's."""
        parameters: Tensor = self.rounds.model.parameters
        return float(parameters[0])

    def taken_tasks(self, clients: Iterable[int]) -> list[int]:
        """The rounds of their last tasks."""
        return [self.tasks[client].round for client in clients]

    def _arrive(self, client: int, op: Any) -> None:
        token = len(self._tokens)
        self._tokens[token] = client
        self._react(Arrived(moment=self.moment, token=token, sender=Peer(CLIENT, client), op=op))

    def _react(self, event: PeerEvent) -> None:
        for reply in self.rounds.react(event):
            client, answer = self._tokens[reply.token], reply.answer
            if hasattr(answer, "payload") and type(answer).__name__ == "Pulled":
                self.tasks[client] = decode(answer.about, Task, THE_SERVER)
            else:
                self.receipts[client] = answer.version
