"""Federations under masks over simulated peers, whose devices leave at any point of a round."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import (
    FedAvg,
    FederatedStrategy,
    LocalWork,
    Privacy,
    SecureAggregation,
)
from gossamer.base.peer_ops import Peer, Push
from gossamer.comm.simulation import Trace, simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.federated.client.script import ClientRecipe, Train, Trained, participate
from gossamer.federated.client.store import MemoryStore
from gossamer.federated.messages import CLIENT, REPORT, THE_SERVER
from gossamer.federated.model_state import ModelState
from gossamer.federated.secure_aggregation.agreement import CONSENT, KEYS, REVEAL, SHARES
from gossamer.federated.secure_aggregation.identities import SimulatedRoster
from gossamer.federated.secure_aggregation.rounds import SecureRounds
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.journal import RoundsJournal
from gossamer.federated.server.roster import RosterChange
from gossamer.federated.server.rounds import Committed, serve
from gossamer.federated.server.selection import Uniform

LEAVES_BEFORE = (KEYS, SHARES, REPORT, CONSENT, REVEAL)  # None stays
Leaving = Mapping[int, str]


class Line(torch.nn.Module):
    """rows: of a matrix; 1: a vector."""

    def __init__(self, size: int = 6, rows: int = 1) -> None:
        super().__init__()
        shape = (rows, size // rows) if rows > 1 else (size,)
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))


def learned(client: int, index: int, size: int) -> Tensor:
    """A pseudo-gradient of multiples of 1/64 between -1/8 and 1/8: exact in fixed point of a range of 2^k levels."""
    random = torch.Generator().manual_seed(1000 * index + client)
    return torch.randint(-8, 9, (size,), generator=random).double() / 64


def samples_of(client: int) -> int:
    return client % 3 + 1


class InMemory(RoundsJournal):
    """What a journal on a disk has."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None
        self._changes: list[RosterChange] = []

    def changed(self, change: RosterChange) -> None:
        self._changes.append(deepcopy(change))

    def committed(self, rounds: Any) -> None:
        self._state, self._changes = deepcopy(rounds.state_dict()), []

    def restore(self, rounds: SecureRounds) -> None:
        if self._state is not None:
            rounds.load_state_dict(self._state)
        for change in self._changes:
            rounds.change(change)


@dataclass
class SecureFederation:
    """A federation that has run."""

    rounds: SecureRounds
    stores: list[MemoryStore]
    trace: Trace
    commits: list[Committed] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # rounds of the commits

    @property
    def parameters(self) -> Tensor:
        return self.rounds.model.parameters


def secure_recipe(
    secure: SecureAggregation,
    compressor: str = "",
    *,
    size: int = 6,
    rows: int = 1,
    fraction: float = 1.0,
    privacy: Privacy | None = None,
) -> ClientRecipe:
    resolved = resolve(FedAvg(fraction=fraction))
    strategy = FedAvg(fraction=fraction, secure=secure, privacy=privacy)
    assert isinstance(resolved.strategy, FederatedStrategy)
    if compressor:
        resolved = resolve(f"FedAvg() + {compressor}")
    return ClientRecipe(
        strategy=strategy, compressor=resolved.compressor, pull=None, state=ModelState.of(Line(size, rows)),
        roster=SimulatedRoster(),
    )  # fmt: skip


def answered_by(script: Any, client: int, leaves_before: str | None, size: int) -> Generator[Any, Any, int]:
    """Trains by `learned`, and ends where the push would be that it leaves before."""
    answer: Any = None
    try:
        while True:
            op = script.send(answer)
            if isinstance(op, Train):
                work = LocalWork(samples=samples_of(client), steps=client + 1)
                answer = Trained(flat=op.anchor - learned(client, op.task.round, size + 2), work=work, metrics={})
            elif isinstance(op, Push) and op.key == leaves_before:
                script.close()
                return -1
            else:
                answer = yield op
    except StopIteration as stop:
        return int(stop.value)


def federate_securely(
    everyone: ClientRecipe,
    *,
    clients: int = 5,
    rounds: int = 1,
    leaving: Leaving | None = None,
    net: VirtualNetwork | None = None,
    seed: int = 0,
    size: int = 6,
    scripts_too: Mapping[int, Any] | None = None,
    **options: Any,
) -> SecureFederation:
    stores = [MemoryStore() for _ in range(clients)]
    run = SecureFederation(None, stores, None)  # type: ignore[arg-type]
    assert everyone.roster is not None
    zeros = torch.zeros(everyone.state.layout.numel, dtype=torch.float64)
    journal = InMemory()

    def committed(done: Committed) -> None:
        run.commits.append(done)
        run.indices.append(run.rounds.next_round - 1)

    def start() -> Any:
        """Again after each kill, from what the journal has."""
        run.rounds = SecureRounds(
            GlobalModel(everyone.strategy, everyone.compressor, None, everyone.state, zeros, everyone.seed),
            clients=clients, rounds=rounds, selection=Uniform(seed), on_commit=committed,
            roster=everyone.roster, **options,
        )  # fmt: skip
        run.rounds.journal = journal
        journal.restore(run.rounds)
        return serve(run.rounds)

    scripts: dict[Peer, Any] = {THE_SERVER: start}
    for number in range(clients):
        scripts[Peer(CLIENT, number)] = lambda number=number: answered_by(
            participate(number, everyone, stores[number]), number, (leaving or {}).get(number), size
        )
    run.trace = simulate_peers(scripts, net or VirtualNetwork(), seed, checks=True)
    return run
