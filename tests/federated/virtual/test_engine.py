"""Virtual federation: the bits of simulated peers, whoever else is there; hours, failures and what a round costs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.federations import Federation, federate, model_of, one_pass

from gossamer.base.peer_ops import Peer
from gossamer.comm.simulation.faulty_network import Link, VirtualNetwork
from gossamer.errors import LoopError, PeerLost
from gossamer.federated.client.functions import Round, Update, client
from gossamer.federated.messages import CLIENT, THE_SERVER
from gossamer.federated.population import DeviceProfile
from gossamer.federated.virtual.simulate import FederatedRun, Simulation, SimulationSettings, simulate

DAY = 86_400.0
RECIPES = [
    "FedAvg(fraction=0.5)",
    "FedAvg(fraction=0.5, local_steps=3) + TopK(0.5)",
    "FedAvg(fraction=0.5, pull=Int8()) + Int8()",
]


def run(recipe: str, clients: int = 6, rounds: int = 4, **options: Any) -> FederatedRun:
    return simulate(options.pop("train", one_pass), model_of, recipe, clients=clients, rounds=rounds, **options)


def slow_lines(clients: int) -> list[DeviceProfile]:
    return [DeviceProfile(round_trip_seconds=0.1 + client, up_bits_per_second=64 + client) for client in range(clients)]


def as_peers(recipe: str, profiles: list[DeviceProfile] | None) -> Federation:
    """The same over simulated peers."""
    links = {}
    for number, each in enumerate(profiles or []):
        latency, rate = each.round_trip_seconds, each.up_bits_per_second
        links[Peer(CLIENT, number), THE_SERVER] = Link(round_trip_seconds=latency, bits_per_second=rate)
        links[THE_SERVER, Peer(CLIENT, number)] = Link(round_trip_seconds=latency)
    return federate(recipe, clients=6, rounds=4, net=VirtualNetwork(links=links))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("profiles", [None, slow_lines(6)], ids=["instant", "slow"])
def test_it_is_what_simulated_peers_do_bit_for_bit(recipe: str, profiles: list[DeviceProfile] | None) -> None:
    there, here = as_peers(recipe, profiles), run(recipe, profiles=profiles)
    parameters = torch.cat([each.detach().reshape(-1) for each in here.model.parameters()])
    assert torch.equal(parameters, there.parameters)
    assert [each.virtual_seconds for each in here.rounds] == [each.moment for each in there.commits]
    assert [each.clients for each in here.rounds] == [tuple(sorted(each.reports)) for each in there.commits]
    sent = sum(nbytes for (_, to), nbytes in there.trace.sent_bytes.items() if to == THE_SERVER)
    assert here.up_bytes == sent
    other = run(recipe, profiles=profiles, rounds=3)  # the twin: a round less
    assert not torch.equal(parameters, torch.cat([each.detach().reshape(-1) for each in other.model.parameters()]))


def noisy(model: torch.nn.Module, told: Round) -> Update:
    """A loop that draws from the global generator."""
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each))
    return Update(samples=1)


def test_the_same_seed_gives_the_same_bits_and_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (run("FedAvg(fraction=0.5)", train=noisy, seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert torch.equal(before, torch.get_rng_state())


def test_a_device_draws_alike_whoever_is_trained_before_it() -> None:
    alone = run("FedAvg(fraction=1.0)", train=noisy, clients=1, rounds=1)
    told: dict[int, torch.Tensor] = {}

    def watched(model: torch.nn.Module, round_: Round) -> Update:
        found = noisy(model, round_)
        told[round_.client or 0] = model.weight.detach().clone()
        return found

    run("FedAvg(fraction=1.0)", train=watched, clients=3, rounds=1, profiles=slow_lines(3)[::-1])
    assert torch.equal(told[0], alone.model.weight)
    assert not torch.equal(told[1], told[0])


def test_a_round_costs_the_same_however_many_wait() -> None:
    def cost(clients: int) -> tuple[int, int, int]:
        """Events of rounds after the first, and the most live devices and states there."""
        events: list[int] = []

        def seen(record: object) -> None:
            events.append(simulation.engine.events)

        recipe = f"FedAvg(fraction={4 / clients})"
        settings = SimulationSettings(clients=clients, rounds=6, seed=3, on_round=seen)
        simulation = Simulation(one_pass, model_of, recipe, settings)
        simulation.run()
        return events[-1] - events[0], len(simulation.states) <= 24, simulation.states.replicas <= 6

    assert cost(50) == cost(500)


def test_a_device_that_goes_offline_in_a_task_has_left_and_comes_back_the_next_day() -> None:
    profiles = [DeviceProfile(seconds_per_step=10.0) for _ in range(3)]
    profiles[1] = DeviceProfile(seconds_per_step=4000.0, present_from=0.0, present_seconds=3600.0)
    profiles[0] = DeviceProfile(seconds_per_step=43_201.0)
    found = run("FedAvg(fraction=1.0, local_steps=1)", clients=3, rounds=3, profiles=profiles)
    assert [each.clients for each in found.rounds] == [(0, 2)] * 3
    assert [each.virtual_seconds for each in found.rounds] == [43_201.0, 86_402.0, 129_603.0]
    down = [sorted(each.down_bytes_by_client) for each in found.rounds]
    assert down == [[0, 1, 2], [0, 2], [0, 1, 2]]  # at hours 0 and 24


def test_what_was_being_sent_is_sent_again_the_next_day() -> None:
    trained: list[int | None] = []

    def counted(model: torch.nn.Module, told: Round) -> Update:
        trained.append(told.client)
        return one_pass(model, told)

    slow = DeviceProfile(up_bits_per_second=0.1, present_seconds=3600.0)  # 40 bytes take 3200 s
    other = DeviceProfile(seconds_per_step=1000.0, up_bits_per_second=0.1, present_seconds=3600.0)  # from 1000 s on
    for profile, moment, sent in ((slow, 3200.0, 40), (other, DAY + 3200.0, 80)):
        trained.clear()
        found = run("FedBuff(buffer=1, fraction=1.0)", clients=1, rounds=1, profiles=[profile], train=counted)
        assert trained == [0]  # never again, for the same task
        assert found.virtual_seconds == pytest.approx(moment)
        assert found.up_bytes == sent


def test_bytes_are_counted_when_they_were_sent_though_devices_are_trained_together() -> None:
    profiles = [DeviceProfile(seconds_per_step=1.0 + client) for client in range(6)]
    found = run("FedBuff(buffer=2, fraction=1.0, local_steps=9)", rounds=1, profiles=profiles)
    assert found.rounds[0].up_bytes_by_client == {0: 40, 1: 40}
    assert sorted(found.rounds[0].down_bytes_by_client) == list(range(6))


def test_masked_contributions_add_up() -> None:
    plain, masked = (
        run(f"FedAvg(fraction=1.0{also})", clients=4) for also in ("", ", secure=SecureAggregation(clip=8.0)")
    )
    assert torch.allclose(plain.model.weight, masked.model.weight, atol=1e-3)
    assert masked.up_bytes > plain.up_bytes


def test_devices_that_are_never_there_together_end_the_run() -> None:
    profiles = [DeviceProfile(present_from=3600.0 * hour, present_seconds=3600.0) for hour in (1, 5)]
    with pytest.raises(PeerLost, match=r"Version 1 cannot be made\. . of 2 devices are available"):
        run("FedAvg(fraction=1.0)", clients=2, profiles=profiles, fewest=2)
    hours = [round_.virtual_seconds for round_ in run("FedAvg(fraction=0.5)", clients=2, profiles=profiles).rounds]
    assert hours[0] == 3600.0


def test_devices_fail_as_often_as_they_say() -> None:
    tried: list[int] = []

    def counted(model: torch.nn.Module, told: Round) -> Update:
        tried.append(told.index)
        return one_pass(model, told)

    profiles = [DeviceProfile(failure=0.5)] * 200
    found = run("FedAvg(fraction=1.0, local_steps=1)", clients=200, rounds=2, profiles=profiles, train=counted)
    counts = len(found.rounds[0].clients)
    assert abs(counts - 100) < 4 * 50**0.5
    assert len(tried) == sum(len(each.clients) for each in found.rounds)  # who fails is not trained for nothing


def test_an_error_of_the_function_names_the_device(caplog: pytest.LogCaptureFixture) -> None:
    def broken(model: torch.nn.Module, told: Round) -> Any:
        return None if told.client == 2 else one_pass(model, told)

    with pytest.raises(LoopError, match="client 2") as caught:
        run("FedAvg(fraction=1.0)", train=broken)
    assert caught.value.__notes__ == ["It was client 2 in round 0, in virtual time."]
    assert "The client function raised LoopError for client 2 in round 0, and the simulation ends" in caplog.text


@pytest.mark.parametrize("recipe", ["FedAvg(fraction=1.0)", "FedBuff(buffer=2)"])
@pytest.mark.parametrize("vectorized", [False, True])
def test_an_exception_of_the_function_names_the_device(
    recipe: str, vectorized: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(model: torch.nn.Module, told: Round) -> Any:
        raise RuntimeError("no data here")

    function = client(vectorized=True)(broken) if vectorized else broken
    with pytest.raises(RuntimeError, match="no data here") as caught:
        run(recipe, train=function)
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"It was client . in round 0, in virtual time\.", note)
    assert "RuntimeError for client" in caplog.text


def test_an_exception_of_the_evaluation_names_the_version() -> None:
    def broken(model: torch.nn.Module, told: Round) -> Any:
        raise RuntimeError("no test set")

    with pytest.raises(RuntimeError) as caught:
        simulate(one_pass, model_of, "FedAvg(fraction=1.0)", clients=2, rounds=1, evaluate=broken)
    assert caught.value.__notes__ == ["It was the evaluation of version 1, in virtual time."]


def test_who_diverges_is_refused_and_the_others_continue() -> None:
    def diverging(model: torch.nn.Module, told: Round) -> Update:
        found = one_pass(model, told)
        if told.client == 2:
            with torch.no_grad():
                model.weight.fill_(float("nan"))
        return found

    found = run("FedAvg(fraction=1.0)", train=diverging, clients=4, rounds=1)
    assert found.rounds[0].clients == (0, 1, 3)
    assert "client 2 was refused" in found.rounds[0].refused[2]
