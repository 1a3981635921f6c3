"""Termination of gossip: what a worker said in one incarnation does not count for the next."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from support.fault_seeds import replayed
from support.pairwise_partners import start_of
from support.virtual_endings import ends_of
from torch import Tensor

from gossamer.algorithms.gossip.final_mean import FinalMean
from gossamer.algorithms.gossip.partner import Partner, with_incarnation
from gossamer.algorithms.gossip.state_transfer import STATUS, PeerStatus, decode_status, hash_of
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import WORKER, Arrived, Peer, Pull, Push, Stamp
from gossamer.comm.simulation.faulty_network import Cut, Fault, Pause, VirtualNetwork
from gossamer.errors import PeerLost
from gossamer.train.synchronizers.termination import Claim, TerminationProtocol


class Ageless(TerminationProtocol):
    """Takes what a worker said in one incarnation for what all of them said."""

    @property
    def _done_here(self) -> set[int]:
        return set(self._reports["done"])


def check_who_is_done(rule: type[TerminationProtocol]) -> None:
    """Somebody who is done and comes back is not, until it says so again; what is late changes nothing."""
    one = rule(Partner(FlatTensors.pack({"weight": start_of(0)}), 0), 2)
    script = one.listen(lambda peer, where: places.append((peer, where)))
    places: list[tuple[Peer, str]] = []
    next(script)

    def said(key: str, incarnation: int, about: str = "") -> set[int]:
        push = Push(to=Peer(WORKER, 0), key=key, stamp=Stamp(1, with_incarnation(incarnation, 0)), about=about)
        script.send(Arrived(moment=0.0, token=1, sender=Peer(WORKER, 1), op=push))
        next(script)
        return one._done_here

    assert said("here", 0) == set()
    assert said("done", 0) == {1}
    assert said("here", 1, "[]") == set()
    assert said("done", 0) == set()
    assert said("done", 1) == {1}
    assert said("done", 0) == {1}
    assert places == [(Peer(WORKER, 1), "[]")]


def test_a_rank_that_came_back_is_not_done() -> None:
    check_who_is_done(TerminationProtocol)
    with pytest.raises(AssertionError):
        check_who_is_done(Ageless)


def test_restarted_worker_receives_the_latest_status() -> None:
    """That a worker is done, and that the run is asked to end."""
    old, new = (
        TerminationProtocol(Partner(FlatTensors.pack({"weight": start_of(0)}), rank, incarnation=rank), 2)
        for rank in (0, 1)
    )
    old._done, old.steps = True, 17
    old._record_report("stop", 1, 0)
    script = old.listen()
    next(script)
    greeting = new.push_status(0, "here")
    reply = script.send(Arrived(moment=0.0, token=1, sender=Peer(WORKER, 1), op=next(greeting)))
    assert not new.must_stop
    with pytest.raises(StopIteration):
        greeting.send(reply.answer)
    assert new.must_stop
    assert new._done_here == {0}
    next(script)
    op = Pull(of=Peer(WORKER, 0), key=STATUS)
    said = script.send(Arrived(moment=0.0, token=2, sender=Peer(WORKER, 1), op=op)).answer
    assert decode_status(said.about) == PeerStatus(
        incarnation=0, steps=17, done=True, stop=True, agreed=False, here=(1, 0)
    )


@pytest.mark.parametrize(
    ("claimed", "accepted", "world", "is_its"),
    [
        (None, 2, 3, True),
        (None, 1, 2, False),
        (None, 2, 4, False),
        (None, 3, 4, True),
        ("a", 1, 4, True),
        ("b", 4, 4, False),
    ],
)
def test_worker_accepts_the_mean_of_the_run(claimed: str | None, accepted: int, world: int, is_its: bool) -> None:
    """The one that is entered; without a place for it, the one that more than half of all accepted."""
    partner = Partner(FlatTensors.pack({"weight": start_of(0)}), 0)
    one = TerminationProtocol(partner, world, lambda text: claimed)
    partner.mark_gone(1)
    if is_its:
        one._check_claimed("a", accepted)
    else:
        with pytest.raises(PeerLost, match="without a connection to workers 1"):
            one._check_claimed("a", accepted)


def test_a_worker_takes_one_mean_and_is_dismissed_with_no_other() -> None:
    one = TerminationProtocol(Partner(FlatTensors.pack({"weight": start_of(0)}), 0), 3)
    first, second = (FinalMean((start_of(rank),), 0.0).encoded() for rank in (1, 2))
    assert [one._accepts(mean) for mean in (first, second, first)] == [True, False, True]
    one._dismissed_with.add(hash_of(second))
    with pytest.raises(PeerLost):
        one._check_taken()
    one._dismissed_with.add(hash_of(first))
    one._check_taken()


# -- Termination of gossip after a silence near the end: workers end with the same bits, or say whom they do not hear

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
