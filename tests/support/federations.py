"""Small federations over simulated peers: linear regression, one optimizer step or several on each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support.rounds_by_hand import rounds_made
from torch import Tensor, nn

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.base.peer_ops import Peer
from gossamer.comm.simulation import Trace, simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.federated.client.functions import Round, Update
from gossamer.federated.client.local_training import Trainer, answered
from gossamer.federated.client.script import ClientRecipe, participate
from gossamer.federated.client.store import ClientStore, MemoryStore
from gossamer.federated.messages import CLIENT, THE_SERVER
from gossamer.federated.model_state import ModelState
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.rounds import Committed, Rounds, serve
from gossamer.federated.server.selection import Uniform

RATE = 0.125


def model_of(features: int = 4, seed: int = 0) -> nn.Module:
    model = nn.Linear(features, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-3, 4, (1, features), generator=torch.Generator().manual_seed(seed)))
        model.bias.zero_()
    return model


def data_of(client: int, samples: int = 8, features: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 + client)
    inputs = torch.randint(-2, 3, (samples, features), generator=random).double()
    return inputs, inputs.sum(1, keepdim=True) + client % 3


def one_pass(model: nn.Module, told: Round) -> Update:
    """Plain gradient descent on the device's own whole batch, as often as the recipe says."""
    inputs, targets = data_of(told.client)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch, wanted in told.batches([(inputs, targets)]):
        optimizer.zero_grad()
        loss = ((model(batch) - wanted) ** 2).mean()
        loss.backward()
        optimizer.step()
    return Update(samples=len(inputs), metrics={"loss": loss.item()})


@dataclass
class Federation:
    """A federation that has run."""

    rounds: Rounds
    stores: Sequence[ClientStore]
    trace: Trace
    commits: list[Committed] = field(default_factory=list)

    @property
    def parameters(self) -> Tensor:
        return self.rounds.model.parameters


def federate(
    recipe: str,
    *,
    clients: int = 4,
    rounds: int = 3,
    function: Callable[[nn.Module, Round], Update] = one_pass,
    net: VirtualNetwork | None = None,
    seed: int = 0,
    part_bytes: int = 1 << 20,
    policy: Callable[..., Rounds] = rounds_made,
    **options: Any,
) -> Federation:
    """Run it over simulated peers, and check that nobody wrote to what travels."""
    resolved = resolve(recipe)
    strategy = resolved.strategy
    assert isinstance(strategy, FederatedStrategy)
    pull = strategy.pull_compressor
    model = model_of()
    state = ModelState.of(model)
    everyone = ClientRecipe(
        strategy=strategy, compressor=resolved.compressor, pull=pull, state=state, seed=seed, part_bytes=part_bytes
    )
    stores = [MemoryStore() for _ in range(clients)]
    commits: list[Committed] = []
    held = policy(
        GlobalModel(strategy, resolved.compressor, pull, state, state.read(model).flat, seed),
        clients=clients, rounds=rounds, selection=Uniform(seed), on_commit=commits.append, **options,
    )  # fmt: skip
    scripts: dict[Peer, Any] = {THE_SERVER: lambda: serve(held)}
    for number in range(clients):
        trainer = Trainer(model_of(), state, strategy, function)
        scripts[Peer(CLIENT, number)] = lambda number=number, trainer=trainer: answered(
            participate(number, everyone, stores[number]), trainer
        )
    trace = simulate_peers(scripts, net or VirtualNetwork(), seed, checks=True)
    return Federation(held, stores, trace, commits)
