"""Termination of gossip after a silence near the end: workers end with the same bits, or say whom they do not hear."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from support.fault_seeds import replayed
from support.virtual_endings import ends_of
from torch import Tensor

from gossamer.base.peer_ops import WORKER, Peer
from gossamer.comm.simulation.faulty_network import Cut, Fault, Pause, VirtualNetwork
from gossamer.errors import PeerLost
from gossamer.train.synchronizers.termination import Claim, TerminationProtocol

DEAD_AFTER_SECONDS = 0.5


class Alone(TerminationProtocol):
    """Takes the mean of those that it hears for everybody's."""

    def _check_claimed(self, text: str, accepted: int) -> None:
        pass

    def _check_taken(self) -> None:
        pass


def silence(seed: int) -> Fault:
    """Near the end: one worker is stopped, or cut off from some or all others, briefly or for longer than it takes to
    count as gone."""
    random = Random(seed)
    at, seconds = 0.2 + 0.7 * random.random(), 2.0 * random.random()
    one, *others = random.sample([Peer(WORKER, rank) for rank in range(3)], 3)
    if random.random() < 0.4:
        return Pause(one, at, seconds)
    return Cut((one,), tuple(others[: random.choice((1, 2, 2))]), at, at + seconds, one_way=random.random() < 0.3)


def store() -> Claim:
    """One place that all workers see, wherever they are cut off."""
    entered: list[str] = []

    def claim(text: str) -> str:
        entered.append(text)
        return entered[0]

    return claim


def nowhere() -> Claim:
    return lambda text: None


def ended(seed: int, claim: Claim, rule: type[TerminationProtocol] = TerminationProtocol) -> list[Tensor | PeerLost]:
    net = VirtualNetwork(
        round_trip_seconds=0.01,
        jitter_seconds=0.005,
        dead_after_seconds=DEAD_AFTER_SECONDS,
        resend_seconds=0.05,
        faults=(silence(seed),),
    )
    return ends_of(net, seed, rule, claim)


def count_apart(seeds: range, place: Callable[[], Claim], rule: type[TerminationProtocol]) -> tuple[int, int, int]:
    """Runs whose workers end well with other bits, those that all end well, and those that some end with an error."""
    apart = together = refused = 0
    for seed in seeds:
        with replayed(seed, "after_a_silence"):
            found = ended(seed, place(), rule)
            models = [each for each in found if isinstance(each, Tensor)]
            apart += not all(torch.equal(each, models[0]) for each in models)
            together += len(models) == 3
            refused += len(models) < 3
            assert all(
                "finished without a connection to workers" in str(each) for each in found if isinstance(each, PeerLost)
            )
    return apart, together, refused


@pytest.mark.parametrize("place", [store, nowhere])
def test_after_a_silence_there_is_one_model_and_no_other(place: Callable[[], Claim]) -> None:
    apart, together, refused = count_apart(range(30), place, TerminationProtocol)
    assert apart == 0
    assert together > 4
    assert refused > 3


@pytest.mark.parametrize("place", [store, nowhere])
def test_two_models_are_found(place: Callable[[], Claim]) -> None:
    assert count_apart(range(15), place, Alone)[0] > 0


def test_a_claim_that_another_made_is_kept() -> None:
    claim = store()
    assert [claim("a"), claim("b"), claim("a")] == ["a", "a", "a"]
