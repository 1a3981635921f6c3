"""Synchronous rounds: one step on every device is one step on their joined batch, whatever the network does."""

from __future__ import annotations

import pytest
import torch
from support.federations import RATE, data_of, federate, model_of

from gossamer.core.peer_ops import Peer
from gossamer.federated.messages import CLIENT, THE_SERVER
from gossamer.simulation.faulty_network import Kill, VirtualNetwork


def joined_batch(rounds: int, clients: int) -> torch.Tensor:
    """Parameters after so many steps of gradient descent on all devices' data."""
    model = model_of()
    parts = [data_of(client) for client in range(clients)]
    inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(rounds):
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@pytest.mark.parametrize("recipe", ["FedAvg(fraction=1.0, local_steps=1)", "FedAvg(fraction=1.0)"])
def test_one_step_on_every_device_is_one_step_on_the_joined_batch(recipe: str) -> None:
    run = federate(recipe, clients=4, rounds=3)
    assert torch.allclose(run.parameters, joined_batch(3, 4), rtol=0, atol=1e-12)
    assert not torch.allclose(run.parameters, joined_batch(2, 4), rtol=0, atol=1e-3)  # the twin: a round less
    assert [each.version for each in run.commits] == [1, 2, 3]


@pytest.mark.parametrize("recipe", ["FedAvg(fraction=0.5) + TopK(0.5)", "FedAvg(fraction=0.5, pull=Int8()) + Int8()"])
def test_rounds_end_where_messages_are_lost_doubled_and_late(recipe: str) -> None:
    bad = VirtualNetwork(round_trip_seconds=0.1, jitter_seconds=0.2, loss=0.2, duplicate=0.2, dead_after_seconds=1e9)
    for seed in range(3):
        run = federate(recipe, clients=6, rounds=4, part_bytes=8, net=bad, seed=seed)
        assert [len(each.reports) for each in run.commits] == [3] * 4


def test_a_round_goes_on_without_a_device_that_was_killed() -> None:
    net = VirtualNetwork(round_trip_seconds=1.0, dead_after_seconds=5.0, faults=(Kill(Peer(CLIENT, 1), at=1.5),))
    run = federate("FedAvg(fraction=1.0)", clients=3, rounds=1, net=net)
    assert sorted(run.commits[0].reports) == [0, 2]
    assert run.rounds.model.public.version == 1
    assert run.trace.sent_bytes[Peer(CLIENT, 0), THE_SERVER] > 0
