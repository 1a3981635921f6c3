"""Candidates of a pair in virtual time: both ends use one connection, whichever of them open, break or are late."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from support.fault_seeds import block_name, blocks, replayed

from gossamer.comm.mesh.connection_candidates import (
    BEGIN_SECONDS,
    MOST_KNOCKS,
    PROOF_SECONDS,
    Approach,
    ConnectionCandidate,
    ConnectionCandidates,
)

TURN_SECONDS = 0.05


@dataclass(eq=False)
class Wire:
    """One connection. The ends are 0, the caller, and 1; each has the candidate by which it opened the connection."""

    way: Approach
    candidates: dict[int, ConnectionCandidate] = field(default_factory=dict)
    broken: bool = False


class Network:
    """Two ends and the connections between them. works: the ways that can succeed, with their seconds."""

    def __init__(self, source: random.Random, works: dict[tuple[int, Approach], float], faults: float) -> None:
        self._source, self._works, self._faults = source, works, faults
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self.now = 0.0
        self.used: dict[int, Wire] = {}
        self.proofs: list[Wire] = []  # on which the caller has begun to prove itself
        self.opened: list[tuple[float, Approach]] = []
        self._begins = [source.uniform(0, 2.0), source.uniform(0, 2.0)]
        self._ends: dict[int, ConnectionCandidates] = {}
        self._waits: dict[Approach, Wire] = {}  # one end has opened a relayed connection
        self._wires: dict[ConnectionCandidate, Wire] = {}  # by the candidates of both ends
        for end in (0, 1):
            self.at(self._begins[end], partial(self._begin, end))

    def at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._serial), act))

    def run(self, until: float) -> None:
        while self._events and len(self.used) < 2 and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def _begin(self, end: int) -> None:
        ways = [Approach.PUNCHED, Approach.RELAYED] if end else [Approach.DIRECT, Approach.PUNCHED, Approach.RELAYED]
        self._ends[end] = ConnectionCandidates([ConnectionCandidate(way, lambda: None) for way in ways], self.now)
        self._turn(end)

    def _turn(self, end: int) -> None:
        if end in self.used:
            return
        candidates = self._ends[end]
        for each in candidates.due(self.now):
            self.opened.append((self.now - self._begins[end], each.way))
            seconds = self._works.get((end, each.way))
            if seconds is None or self._source.random() < self._faults:
                self.at(self.now + 0.2, partial(candidates.failed, each, self.now + 0.2))
            else:
                self.at(self.now + seconds, partial(self._connected, end, each))
        if (late := candidates.overdue(self.now)) is not None:
            self._close(self._wires[late])
        self.at(self.now + TURN_SECONDS, partial(self._turn, end))

    def _connected(self, end: int, candidate: ConnectionCandidate) -> None:
        """The other end is present once it has begun: on a relay, once it has dialed it, too."""
        other = 1 - end
        if other not in self._ends or end in self.used:
            self.at(self.now + 0.1, partial(self._connected, end, candidate))
            return
        wire = Wire(candidate.way, {end: candidate})
        if candidate.way is Approach.RELAYED:
            first = self._waits.pop(Approach.RELAYED, None)
            if first is None or end in first.candidates:
                self._waits[Approach.RELAYED] = self._wires[candidate] = wire
                return
            wire = first
            wire.candidates[end] = candidate
        elif end == 1:
            knocked = self._ends[0].knocked()
            if knocked is None:
                self._ends[1].failed(candidate, self.now)
                return
            wire.candidates[0] = knocked
        if self._source.random() < self._faults:
            self.at(self.now + self._source.uniform(0, 0.3), partial(self._close, wire))
        self._wires |= dict.fromkeys(wire.candidates.values(), wire)
        self._ends[0].present(wire.candidates[0])
        self._prove()

    def _close(self, wire: Wire) -> None:
        """Both ends notice it."""
        if wire.broken or wire is self.used.get(1):
            return  # once the called end uses it, a break concerns the later training
        wire.broken = True
        for end, candidate in wire.candidates.items():
            if self._wires.pop(candidate, None) is not None:
                self._ends[end].failed(candidate, self.now)
        self._prove()

    def _prove(self) -> None:
        if 0 not in self.used and (candidate := self._ends[0].to_prove(self.now)) is not None:
            wire = self._wires[candidate]
            self.proofs.append(wire)
            if self._source.random() >= self._faults:  # else the proof is lost, and the wire is silent
                self.at(self.now + self._source.uniform(0, 0.1), partial(self._accept, wire))

    def _accept(self, wire: Wire) -> None:
        if not wire.broken:
            self.used[1] = wire
            self.at(self.now + self._source.uniform(0, 0.1), partial(self._accepted, wire))

    def _accepted(self, wire: Wire) -> None:
        if not wire.broken and self._ends[0].proving is wire.candidates[0]:
            self.used[0] = wire


def network(seed: int, faults: float) -> tuple[Network, dict[tuple[int, Approach], float]]:
    source = random.Random(seed)
    possible = [(0, Approach.DIRECT), (0, Approach.PUNCHED), (1, Approach.PUNCHED)]
    works = {each: source.uniform(0.001, 0.2) for each in possible if source.random() < 0.4}
    if source.random() < 0.7 or not works:
        works |= {(end, Approach.RELAYED): source.uniform(0.001, 0.2) for end in (0, 1)}
    return Network(source, works, faults), works


@pytest.mark.parametrize("block", blocks(200), ids=block_name)
def test_both_ends_use_the_same_connection_if_any_way_works(block: range) -> None:
    for seed in block:
        with replayed(seed, "both_ends_use_the_same_connection"):
            net, _ = network(seed, faults=0.3)
            net.run(until=300.0)
            assert set(net.used) == {0, 1}
            assert net.used[0] is net.used[1]


@pytest.mark.parametrize("block", blocks(200), ids=block_name)
def test_a_direct_way_that_works_is_used_and_no_relay(block: range) -> None:
    for seed in block:
        with replayed(seed, "a_direct_way_that_works"):
            net, works = network(seed, faults=0.0)
            net.run(until=300.0)
            assert len(net.proofs) == 1
            begins = abs(net._begins[0] - net._begins[1])
            quick = [
                way for (_, way), seconds in works.items() if way is not Approach.RELAYED and begins + seconds < 0.5
            ]
            if quick:
                assert net.used[0].way is not Approach.RELAYED


def test_later_ways_begin_only_after_their_delay() -> None:
    candidates = ConnectionCandidates([ConnectionCandidate(way, lambda: None) for way in Approach], now=10.0)
    assert [[each.way for each in candidates.due(10.0 + begin)] for begin in BEGIN_SECONDS.values()] == [
        [way] for way in Approach
    ]


def test_the_caller_proves_itself_on_one_connection_at_a_time_and_the_best_first() -> None:
    relayed, punched, direct = (ConnectionCandidate(way, lambda: None) for way in reversed(Approach))
    candidates = ConnectionCandidates([relayed, punched, direct], now=0.0)
    candidates.present(relayed)
    assert candidates.to_prove(2.0) is relayed
    assert candidates.overdue(2.0 + PROOF_SECONDS) is None  # there is no other connection
    candidates.present(punched)
    candidates.present(direct)
    assert candidates.to_prove(2.0) is None
    assert candidates.overdue(2.0 + PROOF_SECONDS) is relayed
    candidates.failed(relayed, 2.0 + PROOF_SECONDS)
    assert candidates.to_prove(8.0) is direct


def test_a_candidate_that_fails_is_opened_again_after_longer_pauses() -> None:
    candidate = ConnectionCandidate(Approach.DIRECT, lambda: None)
    candidates, now, pauses = ConnectionCandidates([candidate], now=0.0), 0.0, []
    for _ in range(8):
        assert candidates.due(now) == [candidate]
        assert candidates.due(now + 1e6) == []  # an attempt is in progress
        candidates.failed(candidate, now)
        pauses.append(candidate.due - now)
        now = candidate.due
    assert pauses == sorted(pauses)
    assert pauses[-2] == pauses[-1] == 1.0


def test_a_member_cannot_open_more_connections_than_the_limit() -> None:
    candidates = ConnectionCandidates([], now=0.0)
    knocks = [candidates.knocked() for _ in range(MOST_KNOCKS + 1)]
    assert knocks[-1] is None
    assert None not in knocks[:-1]
    assert knocks[0] is not None
    candidates.failed(knocks[0], 0.0)
    assert candidates.knocked() is not None
