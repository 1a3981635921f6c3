"""Federation server: over real sockets it comes to what scripts without sockets come to, and goes on after a stop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.deployed_federations import alone, join, server
from support.federations import model_of, one_pass
from support.rpc_endpoints import wait_until
from torch import nn

from gossamer.errors import CheckpointError, MismatchError, RecipeError
from gossamer.federated.client.functions import Round, Update
from gossamer.federated.script_file import ScriptFile


def test_sockets_come_to_what_a_simulation_comes_to() -> None:
    recipe = "FedAvg(fraction=1.0, pull=Int8()) + TopK(0.5)"
    said: list[str] = []
    served = server(recipe, clients=3, rounds=3, say=said.append)
    devices = [join(served.address, number) for number in range(3)]
    assert served.run() == "finished"
    assert [each.ended() for each in devices] == [3, 3, 3]
    assert torch.allclose(served.rounds.model.parameters, alone(recipe, 3, 3), rtol=0, atol=1e-12)
    assert not torch.allclose(served.rounds.model.parameters, alone(recipe, 3, 2), rtol=0, atol=1e-6)  # the twin
    assert [entry["clients"] for entry in served.report.rounds] == [[0, 1, 2]] * 3
    assert [entry["evaluation"].keys() for entry in served.report.rounds] == [{"weight"}] * 3
    assert all(entry["bytes_up"] > 0 and entry["bytes_down"] > 0 for entry in served.report.rounds)
    assert len(said) == 3
    assert said[0].startswith("round 1/3")
    assert "weight" in said[0]


def test_devices_without_numbers_get_different_ones() -> None:
    served = server(clients=3, rounds=1)
    devices = [join(served.address) for _ in range(3)]
    served.run()
    assert [each.ended() for each in devices] == [1, 1, 1]
    assert served.report.rounds[0]["clients"] == [0, 1, 2]


def test_a_server_that_was_stopped_goes_on(tmp_path: Path) -> None:
    recipe = "FedAvg(fraction=1.0) + TopK(0.5)"
    first = server(recipe, clients=2, rounds=6, journal=tmp_path)
    address = first.address
    first.rounds.on_commit = lambda committed, said=first.rounds.on_commit: (
        said(committed), first.stop() if committed.version == 2 else None
    )  # fmt: skip
    devices = [join(address, number) for number in range(2)]
    assert first.run() == "stopped"
    second = server(recipe, clients=2, rounds=6, journal=tmp_path, address=address)
    assert second.resumed
    assert second.rounds.model.version == 2
    assert second.run() == "finished"
    assert sum(each.ended() for each in devices) == 12
    assert torch.allclose(second.rounds.model.parameters, alone(recipe, 2, 6), rtol=0, atol=1e-12)
    assert [entry["version"] for entry in second.report.rounds] == [1, 2, 3, 4, 5, 6]


def test_devices_begin_anew_with_a_server_that_lost_its_rounds(tmp_path: Path) -> None:
    """Its name and their numbers are the same, and nothing of the rounds that are gone gets into those that follow."""
    recipe = "FedAvg(fraction=1.0, pull=Int8()) + TopK(0.5)"
    first = server(recipe, clients=2, rounds=6, journal=tmp_path)
    address = first.address
    first.rounds.on_commit = lambda committed, said=first.rounds.on_commit: (
        said(committed), first.stop() if committed.version == 3 else None
    )  # fmt: skip
    devices = [join(address, number) for number in range(2)]
    assert first.run() == "stopped"
    shutil.rmtree(tmp_path / "rounds")
    second = server(recipe, clients=2, rounds=6, journal=tmp_path, address=address)
    assert not second.resumed
    assert second.run() == "finished"
    assert all(isinstance(each.ended(), int) for each in devices)
    assert torch.allclose(second.rounds.model.parameters, alone(recipe, 2, 6), rtol=0, atol=1e-12)


def test_a_journal_of_another_federation_is_refused(tmp_path: Path) -> None:
    server("FedAvg(fraction=1.0)", journal=tmp_path).close()
    with pytest.raises(CheckpointError, match=r"recipe .*fraction=1.0.* and not .*fraction=0.5"):
        server("FedAvg(fraction=0.5)", journal=tmp_path)
    with pytest.raises(CheckpointError, match="clients 3 and not 4"):
        server("FedAvg(fraction=1.0)", clients=4, journal=tmp_path)


def test_a_recipe_of_workers_in_step_is_refused() -> None:
    with pytest.raises(RecipeError, match="Begin its recipe"):
        server("EveryStep()")


def test_another_model_is_refused_with_both_values() -> None:
    served = server(clients=1)
    other = ScriptFile(train=lambda model, told: Update(samples=1), model=lambda: nn.Linear(5, 1))
    refusal = join(served.address, script=other).ended()
    assert isinstance(refusal, MismatchError)
    fingerprint = served.rounds.model.state.fingerprint()
    assert fingerprint in str(refusal)
    assert "build the same model everywhere" in str(refusal)
    served.close()


def test_a_device_that_leaves_is_not_waited_for() -> None:
    served = server(clients=2, rounds=1)
    serving = served.start()

    def slow(model: nn.Module, told: Round) -> Update:
        wait_until(lambda: len(served.reception.joined) == 1)
        return one_pass(model, told)

    stays = join(served.address, 0, script=ScriptFile(train=slow, model=model_of))
    leaves = join(served.address, 1, script=ScriptFile(train=slow, model=model_of))
    wait_until(lambda: len(served.rounds.assigned) == 2)
    leaves.device.leave()
    assert stays.ended() == 1
    serving.wait(10)
    assert served.report.rounds or served.rounds.model.version == 1
    served.close()


def test_an_evaluation_that_fails_stops_nothing() -> None:
    def fails(model: nn.Module, told: Round) -> Update:
        raise ValueError("no data here")

    script = ScriptFile(train=one_pass, model=model_of, evaluate=fails)
    served = server(clients=1, rounds=2, script=script)
    device = join(served.address)
    assert served.run() == "finished"
    assert device.ended() == 2
    assert all("evaluation" not in entry for entry in served.report.rounds)
