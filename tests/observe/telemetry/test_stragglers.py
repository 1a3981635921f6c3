from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from gossamer.observe.telemetry.stragglers import RankPace, Straggler, straggler

WORKERS = 4
COMPUTE, WIRE, LINK = 0.08, 0.02, 12.5e6  # seconds of a step; bytes a second
Work = Callable[[RankPace], RankPace]


def healthy(draw: Random, world: int = WORKERS) -> list[RankPace]:
    """Ranks whose work differs by a few percent, before lock step makes their steps equally long."""
    return [
        RankPace(
            rank=rank,
            step=100,
            seconds=COMPUTE * draw.uniform(0.95, 1.05),
            waiting=0.0,
            data=0.002 * draw.random(),
            garbage=0.001 * draw.random(),
            crowded=0.05 * draw.random(),
            silent_seconds=draw.random(),
            rates={peer: LINK * draw.uniform(0.8, 1.2) for peer in range(world) if peer != rank},
        )
        for rank in range(world)
    ]


def in_lock_step(paces: list[RankPace], wire: float = WIRE) -> list[RankPace]:
    """Everybody waits for who works longest, then for the wire."""
    seconds = max(pace.seconds for pace in paces) + wire
    return [replace(pace, waiting=seconds - pace.seconds, seconds=seconds) for pace in paces]


def slowed(seed: int, spoil: Work, wire: float = WIRE) -> tuple[int, Straggler | None]:
    draw = Random(seed)
    paces = healthy(draw)
    rank = draw.randrange(WORKERS)
    paces[rank] = spoil(paces[rank])
    return rank, straggler(in_lock_step(paces, wire))


def longer(pace: RankPace, **changes: float) -> RankPace:
    return replace(pace, seconds=pace.seconds + 0.06, **changes)


CAUSES: dict[str, Work] = {
    "computing": longer,
    "data loading": lambda pace: longer(pace, data=pace.data + 0.06),
    "garbage collection": lambda pace: longer(pace, garbage=pace.garbage + 0.05),
    "loaded machine": lambda pace: longer(pace, crowded=0.4),
    "stopped": lambda pace: replace(pace, silent_seconds=6.0),
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("seed", range(20))
def test_the_slow_rank_is_named_with_its_cause(cause: str, seed: int) -> None:
    rank, found = slowed(seed, CAUSES[cause])
    assert found is not None
    assert (found.rank, found.cause) == (rank, cause)


@pytest.mark.parametrize("seed", range(20))
def test_a_used_up_quota_is_slow_computing_and_says_so(seed: int) -> None:
    rank, found = slowed(seed, lambda pace: longer(pace, denied=0.4, crowded=0.1))
    assert found is not None
    assert (found.rank, found.cause) == (rank, "computing")
    assert "40% of the time its quota" in found.evidence


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_link_is_found_though_everybody_waits_alike(seed: int) -> None:
    draw = Random(seed)
    slow = draw.randrange(WORKERS)
    paces = [
        replace(
            pace, rates={peer: rate * (0.2 if slow in (pace.rank, peer) else 1) for peer, rate in pace.rates.items()}
        )
        for pace in healthy(draw)
        if pace.rates is not None
    ]
    found = straggler(in_lock_step(paces, wire=0.3))
    assert found is not None
    assert (found.rank, found.cause) == (slow, "link")
    assert straggler(in_lock_step(paces, wire=0.005)) is None, "nobody waits for it"


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_with_one_fast_connection_has_no_slow_link(seed: int) -> None:
    """Where packets are lost, what a connection reaches is a matter of chance."""
    draw = Random(seed)
    slow = draw.randrange(WORKERS)
    paces = [
        replace(pace, rates={peer: rate * (0.2 if slow == pace.rank else 1) for peer, rate in pace.rates.items()})
        for pace in healthy(draw)
        if pace.rates is not None
    ]
    assert straggler(in_lock_step(paces, wire=0.3)) is None


@pytest.mark.parametrize("world", [2, 4, 64])
@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_named_in_a_healthy_run(seed: int, world: int) -> None:
    for wire in (0.0, WIRE, 1.0):
        assert straggler(in_lock_step(healthy(Random(seed), world), wire)) is None


def test_who_works_longer_and_holds_up_nobody_is_not_named() -> None:
    """As in local training and pairwise gossip: its steps take longer, and the others' do not."""
    paces = healthy(Random(0))
    paces[1] = longer(paces[1])
    assert straggler(paces) is None


def test_there_is_nothing_to_tell_of_one_or_none() -> None:
    assert straggler([]) is None
    assert straggler(healthy(Random(0))[:1]) is None


def test_where_nobody_is_heard_nobody_is_stopped() -> None:
    paces = [replace(pace, silent_seconds=30.0) for pace in healthy(Random(0))]
    assert straggler(in_lock_step(paces)) is None


def test_a_rank_that_waits_as_long_as_the_others_holds_nobody_up() -> None:
    """Its work is longer, but it waits, too: all wait for something else, such as a slow line."""
    paces = [RankPace(rank=rank, step=100, seconds=0.2, waiting=0.1) for rank in range(3)]
    also_waits = RankPace(rank=3, step=100, seconds=0.3, waiting=0.1)
    assert straggler([*paces, also_waits]) is None
    held_up = [replace(pace, seconds=0.3, waiting=0.2) for pace in paces]
    found = straggler([*held_up, replace(also_waits, waiting=0.0)])
    assert found is not None
    assert found.rank == 3
