"""Partitions in virtual time: four workers and their coordinator, cut into two sides that both live."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from benchmarks.membership_invariants import Hasty, check
from benchmarks.membership_runs import DEAD_AFTER_SECONDS, ElasticRun, Machine, of_all_roles, within_machines
from support.fault_seeds import replayed

from gossamer.base.peer_ops import WORKER, Peer, PeerScript
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.comm.simulation import compute
from gossamer.comm.simulation.faulty_network import Cut, VirtualNetwork

WORKERS = 4
CUT, HEALED = 4.0, 12.0  # seconds
SEEDS = range(8)


class PartitionedRun(ElasticRun):
    """Everybody is there from the beginning, nobody dies, and some are cut off from the coordinator and the rest."""

    def __init__(self, seed: int, cut_off: Sequence[int], one_way: bool = False) -> None:
        super().__init__(seed)
        self.cut_off, self._one_way = cut_off, one_way
        self.count = self.initial = self.most = WORKERS
        self.least, self.transactions = 2, 90
        self.machines = [Machine(each, self, 0.0) for each in range(WORKERS)]

    def resizing(self) -> PeerScript:
        yield from compute(0.0)

    def network(self) -> VirtualNetwork:
        away = tuple(Peer(WORKER, each) for each in self.cut_off)
        rest = tuple(Peer(WORKER, each) for each in range(WORKERS) if each not in self.cut_off)
        cut = Cut(away, (*rest, COORDINATOR), CUT, HEALED, one_way=self._one_way)
        return VirtualNetwork(
            round_trip_seconds=self.random.choice((0.002, 0.05)),
            jitter_seconds=self.random.choice((0.0, 0.01)),
            dead_after_seconds=DEAD_AFTER_SECONDS,
            resend_seconds=0.2,
            faults=of_all_roles([cut]),
            links=within_machines(WORKERS),
        )

    def committed_by(self, numbers: set[int]) -> set[int]:
        """Transactions that were made in views of just these members."""
        return {step for process in self.processes for step, _, who in process.entries if set(who) == numbers}


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("cut_off", [[3], [0], [2, 3], [1, 2, 3]])
def test_promise_5_at_most_one_side_commits(cut_off: list[int], one_way: bool) -> None:
    """The side that the coordinator is on, where it has the least number of workers; else nobody."""
    for seed in SEEDS:
        with replayed(seed, "at_most_one_side_commits"):
            run = PartitionedRun(seed, cut_off, one_way)
            run.go()
            check(run)
            assert all(machine.process.is_done for machine in run.machines)
            assert not run.committed_by({each + 1 for each in cut_off})
            others = {each + 1 for each in range(WORKERS) if each not in cut_off}
            assert bool(run.committed_by(others)) == (len(others) >= run.least)


def test_the_check_notices_who_goes_on_without_the_others() -> None:
    class Alone(PartitionedRun):
        def __init__(self, seed: int) -> None:
            super().__init__(seed, [2, 3])
            self.process = Hasty

    committed = [Alone(seed).go().committed_by({3}) for seed in SEEDS]
    assert any(committed)
