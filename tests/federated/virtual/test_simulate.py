"""Simulate: what a run records of each version, when it ends, and devices that have no data."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.federations import RATE, data_of, model_of, one_pass
from torch import nn

from gossamer.algorithms.strategies.federated_rules.privacy.epsilon import gaussian_epsilon
from gossamer.errors import PeerLost
from gossamer.federated import Round, SimulationSettings, Update, simulate
from gossamer.federated.round_record import RoundRecord
from gossamer.federated.server import admission as attempts
from gossamer.federated.server.admission import TRIES

PRIVATE = "FedAvg(fraction=1.0, local_steps=1, privacy=CentralPrivacy(noise=4.0, clip=1.0, delta=0.01))"


def test_settings_are_given_as_one_value_or_by_name() -> None:
    settings = SimulationSettings(clients=3, rounds=2, seed=5)
    named = simulate(one_pass, model_of, "FedAvg(fraction=1.0)", clients=3, rounds=2, seed=5)
    for found in (
        simulate(one_pass, model_of, "FedAvg(fraction=1.0)", settings),
        simulate(one_pass, model_of, "FedAvg(fraction=1.0)", replace(settings, rounds=9), rounds=2),
    ):
        assert len(found.rounds) == 2
        assert torch.equal(found.model.weight, named.model.weight)
    with pytest.raises(TypeError, match="'deadline'"):
        simulate(one_pass, model_of, "FedAvg(fraction=1.0)", settings, deadline=3.0)


def test_every_version_says_what_all_so_far_tell_of_a_device() -> None:
    run = simulate(one_pass, model_of, PRIVATE, clients=4, rounds=3)
    assert [each.epsilon for each in run.rounds] == [gaussian_epsilon(4.0, rounds, 0.01) for rounds in (1, 2, 3)]
    plain = simulate(one_pass, model_of, "FedAvg(fraction=1.0, local_steps=1)", clients=4, rounds=1)
    assert plain.rounds[0].epsilon is None


def now_and_then(model: nn.Module, told: Round) -> Update:
    """Evaluates every third version; the first time there is no number."""
    version = told.index + 1
    if version % 3:
        return Update(samples=1)
    return Update(samples=1, metrics={"accuracy": torch.tensor(float("nan") if version == 3 else version / 10)})


def test_a_metric_that_some_rounds_do_not_tell_ends_a_run_once_it_is_reported() -> None:
    found = simulate(
        one_pass, model_of, "FedAvg(fraction=1.0)", clients=2, rounds=9, evaluate=now_and_then, until="accuracy>0.5"
    )
    assert (len(found.rounds), found.ended) == (6, "reached")
    assert found.metrics["accuracy"][5] == pytest.approx(0.6)


def test_a_metric_that_nothing_told_is_noticed_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    found = simulate(one_pass, model_of, "FedAvg(fraction=1.0)", clients=2, rounds=3, until="acuracy>0.5")
    assert (len(found.rounds), found.ended) == (3, "finished")
    assert "No round reported 'acuracy', so the federation could not end by acuracy>0.5; there are: loss" in caplog.text


def with_data(model: nn.Module, told: Round) -> Update:
    assert told.client is not None
    batches = [data_of(told.client)] if told.client < 3 else []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, targets in told.batches(batches):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return Update(samples=8 * len(batches))


def test_devices_without_data_end_nothing_and_are_no_liars() -> None:
    found = simulate(with_data, model_of, "FedAvg(fraction=0.5, local_steps=2)", clients=6, rounds=5)
    assert (len(found.rounds), found.failures) == (5, {})
    assert {client for each in found.rounds for client in each.clients} == {0, 1, 2}
    assert not any(each.refused for each in found.rounds)
    assert all(not each.up_bytes_by_client.get(client, 0) for each in found.rounds for client in (3, 4, 5))


@pytest.mark.parametrize("recipe", ["FedAvg()", "FedBuff(buffer=2)"])
def test_a_federation_without_data_ends_with_the_reason(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    trained: Counter[int | None] = Counter()

    def nothing(model: nn.Module, told: Round) -> Update:
        trained[told.client] += 1
        return Update(samples=0)

    why = r"Version 1 cannot be made\. 4 of 4 devices had nothing to train on: .*Update\(samples=0\).* Give these"
    with pytest.raises(PeerLost, match=why):
        simulate(nothing, model_of, recipe, clients=4, rounds=2)
    assert min(trained.values()) == TRIES
    assert "No version can be made any more. 4 of 4 devices had nothing to train on" in caplog.text
    assert caplog.text.count("is given up") < 10


def test_a_federation_that_refuses_all_devices_ends_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    def diverge(model: nn.Module, told: Round) -> Update:
        update = one_pass(model, told)
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        return update

    why = (
        r"Version 1 cannot be made\. 3 of 3 devices were refused\. The last: client . was refused in round 99: it could"
    )
    with pytest.raises(PeerLost, match=why):
        simulate(diverge, model_of, "FedAvg(fraction=1.0)", clients=3, rounds=2)
    assert caplog.text.count("client 1 was refused") < 10 * 2


def test_devices_that_have_data_later_are_waited_for() -> None:
    def late(model: nn.Module, told: Round) -> Update:
        return Update(samples=0) if told.index < TRIES - 1 else one_pass(model, told)

    run = simulate(late, model_of, "FedAvg(fraction=1.0)", clients=2, rounds=2)
    assert [each.clients for each in run.rounds] == [(0, 1), (0, 1)]


def test_too_few_devices_with_data_end_a_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of six have data, and a version is made of four."""
    monkeypatch.setattr(attempts, "TRIES", 5)
    recipe = "FedAvg(fraction=1.0, local_steps=1)"
    with pytest.raises(PeerLost, match=r"3 of 6 devices had nothing to train on: .* Give these devices data\.$"):
        simulate(with_data, model_of, recipe, clients=6, rounds=2, fewest=4)
    assert len(simulate(with_data, model_of, recipe, clients=6, rounds=12, fewest=3).rounds) == 12


def test_a_run_gives_the_reason_it_ended() -> None:
    spent = simulate(one_pass, model_of, PRIVATE.replace("noise", "budget=0.7, noise"), clients=4, rounds=9)
    assert (spent.ended, len(spent.rounds)) == ("exhausted", 2)
    assert "the privacy budget is spent: epsilon is" in spent.why
    reached = simulate(one_pass, model_of, "FedAvg(fraction=1.0)", clients=2, rounds=9, until="loss>=0")
    assert (reached.ended, reached.why) == ("reached", "loss>=0 is reached")
    whole = simulate(one_pass, model_of, "FedAvg(fraction=1.0)", clients=2, rounds=1)
    assert (whole.ended, whole.why) == ("finished", "")


def test_devices_and_the_evaluation_are_told_the_round_and_its_config() -> None:
    told: list[tuple[int | None, int, object]] = []

    def seen(model: nn.Module, round_: Round) -> Update:
        told.append((round_.client, round_.index, round_.config["rate"]))
        return Update(samples=1) if round_.client is None else one_pass(model, round_)

    simulate(
        seen, model_of, "FedAvg(fraction=1.0)", clients=1, rounds=2, evaluate=seen,
        config=lambda index: {"rate": 0.5**index},
    )  # fmt: skip
    assert told == [(0, 0, 1.0), (None, 0, 1.0), (0, 1, 0.5), (None, 1, 0.5)]


def test_a_run_is_json() -> None:
    run = simulate(one_pass, model_of, "FedAvg(fraction=1.0)", clients=2, rounds=2)
    found = json.loads(json.dumps(run.record()))
    assert (found["rounds"], found["ended"], found["up_bytes"]) == (2, "finished", run.up_bytes)
    assert [RoundRecord.read(each) for each in found["history"]] == run.rounds


@pytest.mark.parametrize(("loss", "kept"), [(1e300, True), (1e307, False), (float("inf"), False)])
def test_huge_losses_and_samples_leave_a_record_that_is_json(loss: float, kept: bool) -> None:
    """A loss that no message can have is left out as one that is not finite; its device counts nevertheless."""

    def train(model: nn.Module, told: Round) -> Update:
        update = one_pass(model, told)
        return Update(samples=10**9, metrics={"loss": loss}) if told.client == 0 else update

    def not_a_number(model: nn.Module, told: Round) -> Update:
        return Update(samples=1, metrics={"accuracy": float("nan")})

    recipe = "SCAFFOLD(fraction=1.0, local_steps=1)"
    run = simulate(train, model_of, recipe, clients=3, rounds=1, evaluate=not_a_number)
    assert run.rounds[0].clients == (0, 1, 2)
    assert run.rounds[0].refused == {}
    mean = run.rounds[0].train_metrics["loss"]
    assert mean == pytest.approx(1e300) if kept else mean < 1e3
    found = json.loads(json.dumps(run.record(), allow_nan=False))
    assert found["history"][0]["metrics"] == {"accuracy": "nan"}


def test_a_learning_rate_that_no_message_can_have_is_reported_as_the_largest() -> None:
    def train(model: nn.Module, told: Round) -> Update:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e308)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2):
            optimizer.step()
        return Update(samples=1)

    run = simulate(train, model_of, "FedAvg(fraction=1.0)", clients=2, rounds=1)
    assert (run.rounds[0].clients, run.rounds[0].refused) == ((0, 1), {})
