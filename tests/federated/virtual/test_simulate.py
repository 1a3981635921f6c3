"""Simulate: what a run records of each version."""

from __future__ import annotations

import json

from support.federations import model_of, one_pass
from torch import nn

from gossamer.federated import Round, Update, simulate
from gossamer.federated.round_record import RoundRecord
from gossamer.strategies.federated.privacy.loss import gaussian_epsilon

PRIVATE = "FedAvg(fraction=1.0, local_steps=1, privacy=CentralPrivacy(noise=4.0, clip=1.0, delta=0.01))"


def test_every_version_says_what_all_so_far_tell_of_a_device() -> None:
    run = simulate(one_pass, model_of, PRIVATE, clients=4, rounds=3)
    assert [each.epsilon for each in run.rounds] == [gaussian_epsilon(4.0, rounds, 0.01) for rounds in (1, 2, 3)]
    plain = simulate(one_pass, model_of, "FedAvg(fraction=1.0, local_steps=1)", clients=4, rounds=1)
    assert plain.rounds[0].epsilon is None


def test_a_run_says_why_it_ended() -> None:
    spent = simulate(one_pass, model_of, PRIVATE.replace("noise", "budget=1.2, noise"), clients=4, rounds=9)
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
        return Update(samples=1)

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
