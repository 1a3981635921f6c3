"""Device states: the same on disk as in memory, and one replica for all devices of a version."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gossamer.federated.client.functions import Round, Update
from gossamer.federated.client.store import ClientState
from gossamer.federated.virtual.device_states import DeviceStates
from gossamer.federated.virtual.simulate import Simulation, SimulationSettings


def learning(model: nn.Module, told: Round) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 64)
    (model(inputs) - inputs[:, :32]).square().mean().backward()
    optimizer.step()
    return Update(samples=8)


def make_model() -> nn.Module:
    return nn.Linear(64, 32)


def simulation(folder: Path | None, recipe: str = "FedAvg(fraction=0.5) + TopK(0.01)") -> Simulation:
    return Simulation(learning, make_model, recipe, SimulationSettings(clients=8, rounds=6, states=folder))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def test_what_feedback_owes_lies_on_disk_and_changes_nothing(tmp_path: Path) -> None:
    memory, disk = simulation(None), simulation(tmp_path)
    found, same = memory.run(), disk.run()
    assert torch.equal(flat(found.model), flat(same.model))
    chosen = found.bytes_by_client()
    assert {file.name for file in tmp_path.iterdir()} == {f"client-{client}.safetensors" for client in chosen}
    for client in chosen:
        one, other = memory.states.load(client), disk.states.load(client)
        assert [each.keys() for each in one.residuals] == [each.keys() for each in other.residuals] != []
        for mine, read in zip(one.residuals, other.residuals, strict=True):
            assert all(torch.equal(mine[key], read[key]) and bool(mine[key].any()) for key in mine)
    without = simulation(None, "FedAvg(fraction=0.5) + TopK(0.01, feedback=False)").run()  # the twin: owes nothing
    assert not torch.equal(flat(found.model), flat(without.model))


def test_devices_that_owe_nothing_write_nothing(tmp_path: Path) -> None:
    simulation(tmp_path, "FedAvg(fraction=0.5)").run()
    assert list(tmp_path.iterdir()) == []


def test_a_version_is_held_once_and_let_go_with_its_last_device() -> None:
    states = DeviceStates()
    for client in range(3):
        states.of(client).save(ClientState(round=0, version=1, replica=(torch.ones(4),)))
    assert states.load(0).replica[0] is states.load(2).replica[0]
    assert states.replicas == 1
    for client in range(3):
        states.of(client).save(ClientState(round=1, version=2 + client // 2, replica=(torch.ones(4) * client,)))
    assert torch.equal(states.load(1).replica[0], torch.ones(4))  # not what another holds under the same number
    assert torch.equal(states.load(0).replica[0], torch.zeros(4))
    assert states.replicas == 2
