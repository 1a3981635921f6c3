"""Goodput of thousands of workers that fail at random, in virtual time.

Workers are equally fast. Each fails at random, independent of the others, and is away for some time. Goodput is the
number of samples in the parameters with which training continues, over that of the same workers without failures.

Servers of AsyncDiLoCo are the real ones: its shard, its policy of quorum and grace, its rule of a merge. The other runs
follow a model of one number each, the seconds for which a failure stops all workers.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import torch
from torch.nn import Parameter

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import (
    SERVER,
    WORKER,
    Answer,
    Arrived,
    Ask,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    Pull,
    Pulled,
    Push,
    Receipt,
    Stamp,
)
from gossamer.train.parameter_server.client.shard_client import shard_clients
from gossamer.train.parameter_server.delayed_nesterov import DelayedNesterov
from gossamer.train.parameter_server.from_recipe import make_shard, push_pull_codecs
from gossamer.train.parameter_server.shard import ServerShard
from gossamer.train.parameter_server.shard_spec import options_of
from gossamer.train.parameter_server.update_policy import GRADIENT, JOIN, PARAMETERS, QuorumPolicy

SERVER_0 = Peer(SERVER, 0)
SPEED_SPREAD = 0.02  # of the time of a period, relative
SILENT_SECONDS = 5.0  # until a server counts a failed worker as lost


@dataclass(frozen=True)
class Failures:
    """Workers that fail. step_seconds: of one step; away_seconds: until a failed worker is back."""

    workers: int
    mean_seconds_between: float  # failures of one worker
    away_seconds: float = 600.0
    step_seconds: float = 1.0
    seconds: float = 20_000.0  # simulated

    def drawn(self, random: Random) -> Iterator[tuple[float, int]]:
        """Moments of failures and the workers, in order. A worker that is away may be drawn, and does not fail."""
        now = 0.0
        while (now := now + random.expovariate(self.workers / self.mean_seconds_between)) < self.seconds:
            yield now, random.randrange(self.workers)

    def returning(self, random: Random) -> Iterator[tuple[float, int]]:
        """Workers that are away at the beginning, with the moments at which they return."""
        share = self.away_seconds / (self.away_seconds + self.mean_seconds_between)
        for worker in range(self.workers):
            if random.random() < share:
                yield random.random() * self.away_seconds, worker


def restart_of_all(failures: Failures, pause_seconds: float, random: Random) -> float:
    """Lock step: a failure stops all workers for `pause_seconds`, and the step is repeated.

    Failures within the pause do not lengthen it. Machines replace failed ones within it.
    """
    steps, now = 0.0, 0.0
    for moment, _ in failures.drawn(random):
        if moment >= now:
            steps += (moment - now) // failures.step_seconds
            now = moment + pause_seconds
    steps += max(failures.seconds - now, 0.0) // failures.step_seconds
    return steps * failures.step_seconds / failures.seconds


def elastic(failures: Failures, pause_seconds: float, random: Random, period: int = 1) -> float:
    """Lock step, or rounds of `period` local steps, that continue without a failed worker.

    Failures and returns stop all workers for a half of `pause_seconds` each: those of one step or round, and those that
    happen meanwhile, for one half together. A failed worker's steps of the round are lost, and it returns at the
    beginning of a round.
    """
    events = [(moment, False, worker) for moment, worker in failures.drawn(random)]
    returning = list(failures.returning(random))
    events += [(moment, True, worker) for moment, worker in returning]
    heapq.heapify(events)
    away = {worker for _, worker in returning}
    duration, useful, now = period * failures.step_seconds, 0.0, 0.0
    while now < failures.seconds:
        pause, there = 0.0, failures.workers - len(away)
        while events and events[0][0] < now + duration + pause:
            moment, returns, worker = heapq.heappop(events)
            if returns:
                away.discard(worker)
            elif worker not in away:
                there -= there > 0
                away.add(worker)
                heapq.heappush(events, (moment + failures.away_seconds, True, worker))
            else:
                continue
            pause = pause_seconds / 2
        useful += there * duration
        now += duration + pause
    return useful / (failures.workers * now)


class Merging(Protocol):
    """Servers of AsyncDiLoCo, as workers see them."""

    factors: list[float]  # by merged contribution, that of its age

    def __init__(self, strategy: AsyncDiLoCo, workers: int) -> None: ...
    @property
    def version(self) -> int: ...
    @property
    def samples(self) -> float:
        """Merged samples."""

    def send(self, worker: int, known: int, steps: int, now: float) -> None: ...
    def lose(self, worker: int, now: float) -> None: ...
    def join(self, worker: int, now: float) -> None: ...
    def look(self, now: float) -> object: ...
    def wake_at(self) -> float | None: ...
    def answered(self) -> list[int]: ...


class Counted:
    """The rule of a merge without grace, with counts in place of parameters."""

    def __init__(self, strategy: AsyncDiLoCo, workers: int) -> None:
        self._strategy, self._present = strategy, set(range(workers))
        self.version, self.samples, self.factors = 0, 0.0, list[float]()
        self._due, self._answered = dict[int, tuple[int, int]](), list[int]()

    def send(self, worker: int, known: int, steps: int, now: float) -> None:
        self._present.add(worker)
        self._due[worker] = known, steps
        self.look(now)

    def lose(self, worker: int, now: float) -> None:
        self._present.discard(worker)
        self.look(now)

    def join(self, worker: int, now: float) -> None:
        self._present.add(worker)

    def look(self, now: float) -> None:
        present = len(self._present | self._due.keys()) if len(self._due) > 1 else len(self._present)
        if len(self._due) >= max(self._strategy.needed(present), 1):
            ages = [self.version - known for known, _ in self._due.values()]
            share = len(ages) / present
            self.factors += [self._strategy.factor(age, share) for age in ages]
            self.samples += sum(steps for _, steps in self._due.values())
            self.version += 1
            self._answered += self._due
            self._due.clear()

    def wake_at(self) -> float | None:
        return None

    def answered(self) -> list[int]:
        found, self._answered = self._answered, []
        return found


@dataclass(frozen=True)
class Noting(QuorumPolicy):
    """The policy of real servers, which notes the factors of what it merges."""

    factors: list[float]

    def apply(self, shard: ServerShard) -> None:
        present = len({*shard.members, *shard.due})
        for each in shard.due.values():
            self.factors.append(self.strategy.factor(each.staleness, len(shard.due) / present))
        super().apply(shard)


class RealServer:
    """A real shard and policy of a server of AsyncDiLoCo, with one parameter, and messages without a network."""

    def __init__(self, strategy: AsyncDiLoCo, workers: int) -> None:
        recipe = resolve(repr(strategy), workers)
        tensors = {"weight": Parameter(torch.zeros(1))}
        outer = DelayedNesterov(
            [{"params": list(tensors.values())}], lr=strategy.outer_learning_rate, momentum=strategy.outer_momentum
        )
        (self._client,) = shard_clients(
            tensors, outer, push_pull_codecs(recipe), recipe=repr(recipe), world=workers, seed=0, shards=1
        )
        self._shard = make_shard(self._client.spec.to_json(), self._client.parameters_of(tensors))
        self._options = options_of(outer)
        self._message = self._client.encode(Stamp(0, 0), self._options, 0)
        self._steps = [0] * workers
        self.factors = list[float]()
        self._policy, self._answered = Noting(strategy, self.factors), list[int]()

    @property
    def version(self) -> int:
        return self._shard.version

    @property
    def samples(self) -> float:
        return self._shard.merged

    def send(self, worker: int, known: int, steps: int, now: float) -> None:
        about = self._client.about(self._options, float(steps), self._message.counts, fragment=0, steps=steps)
        stamp = Stamp(worker, self._steps[worker], known)
        receipt = self._ask(worker, self._push(GRADIENT, stamp, about, self._message.payload), now)
        assert isinstance(receipt, Receipt)
        self._steps[worker] += 1
        self._ask(worker, Pull(of=SERVER_0, key=PARAMETERS, known=known, at_least=receipt.version), now)

    def join(self, worker: int, now: float) -> None:
        self.look(now, PeerJoined(moment=now, peer=Peer(WORKER, worker)))
        stamp = Stamp(worker, self._steps[worker])
        self._ask(worker, self._push(JOIN, stamp, self._client.spec.agreed_settings()), now)

    def _push(self, key: str, stamp: Stamp, about: str, payload: Payload = ()) -> Push:
        return Push(to=SERVER_0, key=key, stamp=stamp, about=about, payload=payload)

    def _ask(self, worker: int, op: Ask, now: float) -> Answer | None:
        """The answer to a request, None if it comes later."""
        return self.look(now, Arrived(moment=now, token=worker, sender=Peer(WORKER, worker), op=op))

    def lose(self, worker: int, now: float) -> None:
        self.look(now, PeerLeft(moment=now, peer=Peer(WORKER, worker)))

    def look(self, now: float, event: PeerEvent | None = None) -> Answer | None:
        found = None
        for reply in self._policy.react(self._shard, event or PeerEvent(moment=now)):
            if isinstance(reply.answer, Pulled):
                self._answered.append(reply.token)
            else:
                found = reply.answer
        return found

    def wake_at(self) -> float | None:
        return self._policy.wake_at(self._shard)

    def answered(self) -> list[int]:
        found, self._answered = self._answered, []
        return found


SEND, FAIL, LOSE, RETURN, WAKE = range(5)


@dataclass
class Learner:
    """A worker of AsyncDiLoCo. Its moments are those of its own steps."""

    pace: float  # seconds of a step
    since: float = 0.0  # its last message, or its return
    known: int = 0  # version of the parameters that it adopted last
    awaits: bool = False
    away: bool = False
    life: int = 0


@dataclass
class AsyncRun:
    """Workers of AsyncDiLoCo that fail, with their servers."""

    failures: Failures
    strategy: AsyncDiLoCo
    servers: Merging
    random: Random
    learners: list[Learner] = field(default_factory=list)
    events: list[tuple[float, int, int, int]] = field(default_factory=list)  # moment, kind, worker, life

    def goodput(self) -> float:
        failures, random = self.failures, self.random
        self.learners = [
            Learner(failures.step_seconds * (1 + SPEED_SPREAD * (2 * random.random() - 1)))
            for _ in range(failures.workers)
        ]
        for moment, worker in failures.drawn(random):
            heapq.heappush(self.events, (moment, FAIL, worker, -1))
        for moment, worker in failures.returning(random):
            self.learners[worker].away = True
            self.servers.lose(worker, 0.0)
            heapq.heappush(self.events, (moment, RETURN, worker, 0))
        for worker, learner in enumerate(self.learners):
            if not learner.away:
                learner.since = -random.random() * self.strategy.period * learner.pace  # not all at the same moment
                self._plan(worker, learner.since)
        started = sum(-each.since / each.pace for each in self.learners if not each.away)
        while self.events and self.events[0][0] < failures.seconds:
            self._handle(*heapq.heappop(self.events))
        unsent = sum((failures.seconds - each.since) / each.pace for each in self.learners if not each.away)
        possible = sum(failures.seconds / each.pace for each in self.learners)
        return (self.servers.samples + unsent - started) / possible

    def _plan(self, worker: int, since: float) -> None:
        learner = self.learners[worker]
        moment = since + self.strategy.period * learner.pace
        heapq.heappush(self.events, (moment, SEND, worker, learner.life))

    def _handle(self, now: float, kind: int, worker: int, life: int) -> None:
        learner = self.learners[worker] if kind != WAKE else None
        if learner is None:
            self.servers.look(now)
        elif kind == FAIL and not learner.away:
            learner.away, learner.life = True, learner.life + 1
            heapq.heappush(self.events, (now + min(SILENT_SECONDS, self.failures.away_seconds), LOSE, worker, 0))
            heapq.heappush(self.events, (now + self.failures.away_seconds, RETURN, worker, 0))
        elif kind == LOSE:
            self.servers.lose(worker, now)
        elif kind == RETURN:
            learner.away, learner.awaits, learner.since, learner.known = False, False, now, self.servers.version
            self.servers.join(worker, now)
            self._plan(worker, now)
        elif kind == SEND and life == learner.life and not learner.away and not learner.awaits:
            steps = math.floor((now - learner.since) / learner.pace + 1e-6)
            learner.awaits, learner.since = True, learner.since + steps * learner.pace
            self.servers.send(worker, learner.known, steps, now)
        self._answer(now)

    def _answer(self, now: float) -> None:
        for worker in self.servers.answered():
            learner = self.learners[worker]
            if not learner.away:
                learner.awaits, learner.known = False, self.servers.version
                due = learner.since + self.strategy.period * learner.pace
                heapq.heappush(self.events, (max(due, now), SEND, worker, learner.life))
        if (wake := self.servers.wake_at()) is not None and wake > now:
            heapq.heappush(self.events, (wake, WAKE, 0, 0))
