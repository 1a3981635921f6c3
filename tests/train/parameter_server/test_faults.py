"""Everything that can happen to a network and to processes, drawn by a seed: each contribution counts at most once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_seeds import block_name, blocks, replayed
from support.server_runs import NoDeduplication, Run, run
from torch import Tensor
from torch.nn import Parameter

from gossamer.base.peer_ops import SERVER, WORKER, Peer
from gossamer.comm.simulation.faulty_network import Kill, Pause, VirtualNetwork
from gossamer.train.parameter_server import ServerShard, SynchronousPolicy

WORLD, SERVERS, STEPS = 3, 2, 5
PEERS = [Peer(WORKER, n) for n in range(WORLD)] + [Peer(SERVER, n) for n in range(SERVERS)]
RECIPES = {
    "async": "ParameterServer()",
    "sync": 'ParameterServer("sync")',
    "stale": 'ParameterServer("stale", staleness=1)',
    "backup": 'ParameterServer("sync", backup=1)',
}


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def ballots() -> dict[str, Parameter]:
    """One row for each server, one column for each contribution there may be."""
    return {"ballots": Parameter(torch.zeros(SERVERS, WORLD * STEPS, dtype=torch.float64))}


def vote(tensors: Mapping[str, Tensor], worker: int, step: int) -> dict[str, Tensor]:
    """Every contribution is a mark at a place of its own."""
    mark = torch.zeros(SERVERS, WORLD * STEPS, dtype=torch.float64)
    mark[:, worker * STEPS + step] = -1
    return {"ballots": mark}


def job(name: str, seed: int, directory: Path | None, **options: Any) -> Run:
    return run(
        RECIPES[name], world=WORLD, servers=SERVERS, steps=STEPS, seed=seed, make=ballots, gradient=vote,
        directory=directory, **options,
    )  # fmt: skip


def check_once(done: Run, net: VirtualNetwork) -> None:
    """Everyone comes to an end; what was acknowledged is marked, nothing twice, and nothing else but what was under
    way when its worker was killed."""
    done.trace(net, most_seconds=1000.0)
    for number, shard in done.shards.items():
        (marks,) = (block.flat for block in shard.blocks)
        counted = int((marks > 0).sum())
        waiting = sum(len(due) for due in shard.pending.values())
        assert counted + waiting == shard.staleness.total(), "something was taken and not applied, or applied twice"
        assert set(marks.tolist()) <= {0.0, 1.0, 1 / 2, 1 / 3}, "something counted more than once"
        for worker, path in done.done.items():
            for each in path:
                assert (marks[worker * STEPS + each.step] > 0) == (each.applied[number] >= 0), "a receipt was wrong"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("block", blocks(25), ids=block_name)
def test_promise_18_whatever_happens_each_contribution_counts_once(name: str, block: range, tmp_path: Path) -> None:
    """Every other job has a meeting in its middle."""
    for seed in block:
        net = VirtualNetwork.random(seed, PEERS, 10.0)
        with replayed(seed, f"whatever_happens and {name}"):
            check_once(job(name, seed, tmp_path / str(seed), barrier_after=3 if seed % 2 else None), net)


def test_without_deduplication_something_counts_twice() -> None:
    immortal = (VirtualNetwork.random(seed, PEERS, 10.0, mortal=()) for seed in range(12))
    jobs = (
        (job("async", seed, None, policy=lambda shard: NoDeduplication()), net) for seed, net in enumerate(immortal)
    )
    assert len([*islice(filter(counts_twice, jobs), 4)]) == 4


def counts_twice(case: tuple[Run, VirtualNetwork]) -> bool:
    try:
        check_once(*case)
    except AssertionError:
        return True
    return False


# -- who has left is not waited for -----------------------------------------------------------------------------------

LOST = VirtualNetwork(round_trip_seconds=0.01, dead_after_seconds=1.0, faults=(Kill(Peer(WORKER, 1), 0.3),))


@dataclass(frozen=True)
class Faithful(SynchronousPolicy):
    """Waits for the dead, too."""

    def lose(self, shard: ServerShard, peer: Peer) -> None:
        pass


@pytest.mark.parametrize("name", ["sync", "stale"])
def test_a_lost_worker_costs_one_detection(name: str) -> None:
    def check(policy: Any = None) -> None:
        lost = job(name, 0, None, policy=policy)
        trace = lost.trace(LOST, most_seconds=100.0)
        assert trace.seconds < 0.3 + 1.0 + STEPS * 0.2
        assert all(shard.answer_log.next_step == STEPS for shard in lost.shards.values())

    check()
    with pytest.raises(AssertionError, match="waits for the answer"):
        check(lambda shard: Faithful())


def test_a_worker_that_was_away_comes_back_where_the_others_are() -> None:
    """Stopped for long enough to count as gone: its contribution to a round that is over is not taken."""
    away = job("sync", 0, None)
    net = VirtualNetwork(round_trip_seconds=0.01, dead_after_seconds=0.25, faults=(Pause(Peer(WORKER, 2), 0.35, 0.42),))
    check_once(away, net)
    steps = [each.step for each in away.done[2]]
    late = [each for each in away.done[2] if each.applied[0] == -1]
    assert len(late) == 1
    assert 0 < len(steps) < STEPS
    assert len(away.done[0]) == STEPS
