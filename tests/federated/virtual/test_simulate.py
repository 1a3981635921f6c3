"""Simulate: what a run records of each version."""

from __future__ import annotations

from support.federations import model_of, one_pass

from gossamer.federated import simulate
from gossamer.strategies.federated.privacy.loss import gaussian_epsilon

PRIVATE = "FedAvg(fraction=1.0, local_steps=1, privacy=CentralPrivacy(noise=4.0, clip=1.0, delta=0.01))"


def test_every_version_says_what_all_so_far_tell_of_a_device() -> None:
    run = simulate(one_pass, model_of, PRIVATE, clients=4, rounds=3)
    assert [each.epsilon for each in run.rounds] == [gaussian_epsilon(4.0, rounds, 0.01) for rounds in (1, 2, 3)]
    plain = simulate(one_pass, model_of, "FedAvg(fraction=1.0, local_steps=1)", clients=4, rounds=1)
    assert plain.rounds[0].epsilon is None
