"""AsyncDiLoCo on bad networks, with processes that are killed or stall, by a seed.

Each local step is merged at most once, with the weight that its age gives it; a merge with a quorum waits for its grace
only; no contribution waits without end. GOSSAMER_SEEDS=5000 runs 5,000 seeds of each recipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from support.async_diloco_runs import LocalRun, ballots, local_run, vote
from support.fault_seeds import BLOCK, block_name, blocks, replayed
from support.nightly import nightly
from torch import Tensor

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import ServerStrategy
from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo
from gossamer.base.peer_ops import SERVER, WORKER, Peer, PeerEvent, Push, Receipt, Reply
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.train.parameter_server import ServerShard, server
from gossamer.train.parameter_server.from_recipe import push_pull_codecs
from gossamer.train.parameter_server.update_policy import QuorumPolicy

WORLD, SERVERS, STEPS, COLUMNS = 3, 2, 17, 200
PEERS = [Peer(WORKER, n) for n in range(WORLD)] + [Peer(SERVER, n) for n in range(SERVERS)]
NEWCOMERS = 3  # of an elastic run
NUMBERS = {worker: 2**62 + 7919 * worker for worker in range(WORLD + NEWCOMERS)}  # as the launchers draw them
ELASTIC_PEERS = [Peer(WORKER, n) for n in NUMBERS.values()] + PEERS[WORLD:]
PERIOD, HORIZON_SECONDS, STALL_SECONDS = 3, 5.0, 20.0
BEGINNING = 6  # round trips of a worker that returns, until its first message arrives
SPEEDS, SLOWEST_STEP = (0.05, 0.1, 0.1, 0.5), 0.75  # seconds of a local step; with noise, the longest
MORE_SEEDS = [range(first, first + BLOCK) for first in range(1000, 1100, BLOCK)]
RECIPES = {
    "alone": "AsyncDiLoCo(period=3, outer_learning_rate=1.0, outer_momentum=0.0)",
    "two": "AsyncDiLoCo(period=3, quorum=2, outer_learning_rate=1.0, outer_momentum=0.0, pull=Int8())",
    "all": "AsyncDiLoCo(period=3, quorum=3, outer_learning_rate=1.0, outer_momentum=0.0)",
    "grace": "AsyncDiLoCo(period=3, grace=6.0, outer_learning_rate=1.0, outer_momentum=0.0)",
    "fragments": "AsyncDiLoCo(period=3, quorum=2, grace=2.0, fragments=2, outer_learning_rate=1.0, outer_momentum=0.0)",
}


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@dataclass
class Witness:
    """What one server should have done, by the documented rules; it outlives restarts of the server."""

    net: VirtualNetwork
    number: int  # of the server
    stall_seconds: float
    merged: dict[int, Tensor] = field(default_factory=dict)  # by block, how often each place was merged
    moved: dict[int, Tensor] = field(default_factory=dict)  # by block, the sum of all merges
    taken: dict[tuple[int, int], float] = field(default_factory=dict)  # by worker and version, the arrival
    last: dict[int, float] = field(default_factory=dict)  # by worker, the arrival of its last contribution
    pace: dict[int, float] = field(default_factory=dict)  # by worker, seconds of its steps between two arrivals
    quorum_since: dict[int, float] = field(default_factory=dict)  # by version
    merges: int = 0

    def weigh(self, shard: ServerShard, strategy: AsyncDiLoCo) -> list[tuple[list[tuple[int, Tensor]], float]]:
        """By due contribution: its changes by block, and the factor with which the parameters should move by them."""
        due = {worker: each for worker, each in sorted(shard.due.items()) if each.gradients}
        weights = {worker: each.weight**2 / each.steps for worker, each in due.items()}
        share = len(due) / len({*shard.members, *shard.due})
        found = []
        for worker, each in due.items():
            missed_rounds = int(each.staleness * share + 1e-9)
            factor = share * weights[worker] / sum(weights.values()) / (1 + missed_rounds) ** 0.5
            found.append(([*zip(shard.spec.blocks_of(each.fragment), each.gradients, strict=True)], factor))
        return found

    def note(self, shard: ServerShard, due: list[tuple[list[tuple[int, Tensor]], float]]) -> None:
        """Compare the parameters of the server with those that the rules give."""
        for changes, factor in due:
            for number, change in changes:
                assert set(change.unique().tolist()) <= {0.0, 1.0}, "a change is not a set of local steps"
                self.merged[number] = self.merged.get(number, torch.zeros_like(change)) + change
                self.moved[number] = self.moved.get(number, torch.zeros_like(change)) + factor * change
        for number, moved in self.moved.items():
            torch.testing.assert_close(-shard.blocks[number].flat, moved, rtol=0, atol=1e-9)
        self.merges += 1

    def look(self, shard: ServerShard, strategy: AsyncDiLoCo, now: float) -> None:
        """Check waits, after an event was handled."""
        present = {(worker, version) for version, slot in shard.pending.items() for worker in slot}
        for worker, version in present - self.taken.keys():
            if worker in self.last and (steps := shard.pending[version][worker].steps):
                self.pace[worker] = (now - self.last[worker]) / steps
            self.last[worker] = now
        self.taken = {each: self.taken.get(each, now) for each in present}
        for (worker, version), since in self.taken.items():
            assert now - since <= self.longest_wait(strategy, since), f"worker {worker} waits at version {version}"
        waits_elsewhere = {worker for worker, version in present if version != shard.version}
        could_send = set(shard.members) - waits_elsewhere | set(shard.due)
        if shard.due and len(shard.due) >= min(strategy.quorum, len(could_send)):
            since = self.quorum_since.setdefault(shard.version, now)
            fastest = min((self.pace[each] for each in {*shard.members, *shard.due} & self.pace.keys()), default=0.0)
            grace = strategy.grace * max(fastest, SLOWEST_STEP) + self.downtime(since)  # arrivals include waits
            assert now - since <= grace, f"version {shard.version} has a quorum, and waits longer than its grace"
        else:
            self.quorum_since.pop(shard.version, None)

    def downtime(self, since: float) -> float:
        """An upper bound of the seconds after `since` for which faults keep peers from running or sending."""
        return max(HORIZON_SECONDS - since, 0.0) + self.net.dead_after_seconds if self.net.faults else 0.0

    def longest_wait(self, strategy: AsyncDiLoCo, since: float) -> float:
        """An upper bound: the beginning and a round of the slowest worker, the grace, and all delays of messages."""
        others = PERIOD * SLOWEST_STEP + self.stall_seconds if strategy.quorum > 1 else 0.0
        others *= strategy.fragments  # a worker may send another fragment first
        net = self.net
        delays = net.round_trip_seconds + 12 * net.jitter_seconds + (12 * net.resend_seconds if net.loss else 0.0)
        return others + strategy.grace * SLOWEST_STEP + BEGINNING * delays + self.downtime(since) + 0.1


@dataclass(frozen=True)
class Witnessed(QuorumPolicy):
    """The policy of servers, with a witness of each event and merge."""

    witness: Witness

    def react(self, shard: ServerShard, event: PeerEvent) -> Iterator[Reply]:
        yield from super().react(shard, event)
        self.witness.look(shard, self.strategy, event.moment)

    def apply(self, shard: ServerShard) -> None:
        due = self.witness.weigh(shard, self.strategy)
        super().apply(shard)
        self.witness.note(shard, due)


def strategy_of(shard: ServerShard) -> AsyncDiLoCo:
    strategy: ServerStrategy = push_pull_codecs(resolve(shard.spec.recipe)).strategy
    assert isinstance(strategy, AsyncDiLoCo)
    return strategy


def job(name: str, seed: int, directory: Path | None, *, elastic: bool = False) -> tuple[LocalRun, float]:
    """A run, and the seconds for which one worker, which stays connected, makes no step."""
    random = Random(seed)
    world = WORLD + NEWCOMERS if elastic else WORLD
    speeds = [random.choice(SPEEDS) for _ in range(world)]
    noise = Random(seed + 1)
    changes: dict[str, Any] = {}
    if elastic:
        changing = Random(seed + 2)
        newcomers = {worker: changing.random() * HORIZON_SECONDS for worker in range(WORLD, world)}
        lost = changing.sample(range(world), changing.randint(0, world - 1))
        gone = {worker: newcomers.get(worker, 0.0) + changing.random() * HORIZON_SECONDS for worker in lost}
        changes = {"numbers": NUMBERS, "arrivals": newcomers, "departures": gone}
    stalled = (random.randrange(WORLD), random.randrange(STEPS)) if random.random() < 0.3 else None

    def seconds(worker: int, step: int) -> float:
        return speeds[worker] * (0.5 + noise.random()) + (STALL_SECONDS if (worker, step) == stalled else 0.0)

    run = local_run(
        RECIPES[name], world=world, servers=SERVERS, steps=STEPS, seed=seed,
        make=ballots(world, COLUMNS, tensors=2 if name == "fragments" else 1),
        local_step=vote(COLUMNS), directory=directory, seconds=seconds, **changes,
    )  # fmt: skip
    return run, STALL_SECONDS if stalled else 0.0


def check(
    name: str, seed: int, net: VirtualNetwork, directory: Path | None, policy: type[Witnessed], *, elastic: bool = False
) -> int:
    """Run a seed. Every worker reaches the end. Each local step is merged once, or was lost with a killed worker; none
    waits. Returns the number of merges."""
    done, stall_seconds = job(name, seed, directory, elastic=elastic)
    witnesses = {number: Witness(net, number, stall_seconds) for number in range(SERVERS)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "policy_for", lambda shard: policy(strategy_of(shard), witnesses[shard.spec.number]))
        done.in_background(net, most_seconds=1000.0)
    killed = {fault.peer.number for fault in net.faults if getattr(fault, "peer", None) and fault.peer.kind == WORKER}
    for number, shard in done.shards.items():
        if elastic and not shard.version:  # all were lost before
            continue
        counts = torch.cat([witnesses[number].merged[block] for block in sorted(witnesses[number].merged)])
        assert counts.max() <= 1, "a local step was merged more than once"
        assert not any(shard.pending.values()), "a contribution waits at the end"
        tensors = counts.view(-1, done.world * COLUMNS)
        assert counts.sum().item() == pytest.approx(shard.merged * len(tensors)), "the count of merged samples is wrong"
        for worker, known in (done.numbers or dict(enumerate(range(WORLD)))).items():
            if known in killed | shard.missed or worker in done.departures:
                continue
            own = tensors[:, worker * COLUMNS : worker * COLUMNS + done.counted[worker]]
            assert bool(own.all()) or shard.dropped, "a local step was lost"
    return sum(each.merges for each in witnesses.values())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("block", [*blocks(8), *nightly(*MORE_SEEDS)], ids=block_name)
def test_each_local_step_is_merged_once_while_workers_come_and_go(name: str, block: range, tmp_path: Path) -> None:
    merges = 0
    for seed in block:
        net = VirtualNetwork.random(seed, ELASTIC_PEERS, HORIZON_SECONDS)
        with replayed(seed, f"come_and_go and {name}"):
            merges += check(name, seed, net, tmp_path / str(seed), Witnessed, elastic=True)
    assert merges > 0


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("block", [*blocks(8), *nightly(*MORE_SEEDS)], ids=block_name)
def test_whatever_happens_each_local_step_is_merged_once_and_in_time(name: str, block: range, tmp_path: Path) -> None:
    for seed in block:
        net = VirtualNetwork.random(seed, PEERS, HORIZON_SECONDS)
        with replayed(seed, f"whatever_happens and {name}"):
            assert check(name, seed, net, tmp_path / str(seed), Witnessed) > 0


class Twice(Witnessed):
    """The negative control: a late contribution is counted in its own merge, and in the next one."""

    def apply(self, shard: ServerShard) -> None:
        late = {worker: each._replace(staleness=0) for worker, each in shard.due.items() if each.staleness > 1}
        super().apply(shard)
        if late and not shard.due:
            shard.pending[shard.version] = late


class Repeated(Witnessed):
    """The negative control: a repeated message is a new contribution."""

    def receive_gradient(self, shard: ServerShard, push: Push) -> Receipt:
        version = self.version_of(shard, push)
        shard.take(push.stamp, version, push.about, push.payload)
        return Receipt(version=version)


class OtherRule(Witnessed):
    """A negative control that merges by another strategy than the witness."""

    rule: ClassVar[type[AsyncDiLoCo]]

    def apply(self, shard: ServerShard) -> None:
        due = self.witness.weigh(shard, self.strategy)
        QuorumPolicy(self.rule(**vars(self.strategy))).apply(shard)
        self.witness.note(shard, due)


class EqualFactors(AsyncDiLoCo):
    """Late contributions are merged like others."""

    def factor(self, staleness: int, share: float) -> float:
        return 1.0


class GrowingOthers(AsyncDiLoCo):
    """Late contributions are reduced, and the others grow in their place."""

    def merge(self, weights: Sequence[float], staleness: Sequence[int], present: int) -> tuple[list[float], float]:
        return super().merge(weights, staleness, present)[0], len(weights) / present


class LateAtFullWeight(OtherRule):
    rule = EqualFactors


class LateReplaced(OtherRule):
    rule = GrowingOthers


class Endless(Witnessed):
    """The negative control: a grace window without an end."""

    def _deadline(self, shard: ServerShard) -> float:
        return float("inf")


class Unbounded(Witnessed):
    """The negative control: a quorum counts on workers that have left."""

    def _has_quorum(self, shard: ServerShard) -> bool:
        return len(shard.due) >= self.strategy.quorum


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (Twice, "alone"), (Repeated, "alone"), (LateAtFullWeight, "alone"), (LateReplaced, "two"), (Endless, "grace"),
        (Unbounded, "all"),
    ],
)  # fmt: skip
def test_a_server_that_breaks_a_rule_is_detected(policy: type[Witnessed], name: str) -> None:
    found = 0
    for seed in range(10):
        try:
            check(name, seed, VirtualNetwork.random(seed, PEERS, HORIZON_SECONDS, mortal=()), None, policy)
        except AssertionError:
            found += 1
        if found > 1:
            return
    pytest.fail(f"{found} of 10 runs fail the check")
