"""Coordinator and members in virtual time, on bad networks: invariants of views and of what is completed in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks import membership_seeds
from benchmarks.membership_invariants import INVARIANTS, TWINS, caught, check
from benchmarks.membership_runs import ROLES, ElasticRun, Machine
from support.fault_seeds import block_name, blocks, replayed

from gossamer.base.peer_ops import Peer, PeerScript
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.comm.simulation.faulty_network import Cut, VirtualNetwork


@pytest.mark.parametrize("block", blocks(200), ids=block_name)
def test_promise_20_views_and_histories_are_one(block: range) -> None:
    for seed in block:
        with replayed(seed, "views_and_histories_are_one"):
            check(ElasticRun(seed).go())


class CutOff(ElasticRun):
    """Four workers, of which at least two train. For some seconds the network is cut: machine 0 and the coordinator are
    on one side, or the coordinator and the first three."""

    def __init__(self, seed: int, near: Sequence[int]) -> None:
        super().__init__(seed)
        self.count, self.initial, self.least, self.most, self.transactions = 4, 4, 2, 4, 60
        self.machines = [Machine(each, self, 0.0) for each in range(4)]
        self._near = near

    def resizing(self) -> PeerScript:
        yield from ()

    def network(self) -> VirtualNetwork:
        near = [COORDINATOR, *(Peer(role, each) for role in ROLES for each in self._near)]
        far = [Peer(role, each) for role in ROLES for each in range(4) if each not in self._near]
        heals = 9.0 + self.random.uniform(0, 4)
        return replace(super().network(), loss=0.0, faults=(Cut(tuple(near), tuple(far), 4.0, heals),))


@pytest.mark.parametrize(("near", "again"), [((0,), set()), ((0, 1, 2), {3})])
def test_who_trained_nowhere_while_the_network_was_cut_is_not_put_out_when_it_heals(
    near: tuple[int, ...], again: set[int]
) -> None:
    for seed in range(10):
        run = CutOff(seed, near).go()
        check(run)
        assert {each.number for each in run.machines if len(each.processes) > 1} == again, (seed, run.notes)


@pytest.mark.parametrize("twin", TWINS)
def test_wrong_rules_are_found_out(twin: str) -> None:
    assert any(caught(twin, seed) for seed in range(50))


def test_the_program_names_what_it_went_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["membership_seeds", "--seeds", "5", "--twin-seeds", "30"])
    assert membership_seeds.main() == 0
    said = capsys.readouterr().out
    assert "5 seeds from 0 on" in said
    assert all(f"| {name} | 0 |" in said for name in INVARIANTS)
    monkeypatch.setattr("sys.argv", ["membership_seeds", "--seeds", "0", "--twin-seeds", "0"])
    assert membership_seeds.main() == 1


def test_runs_are_the_same_again() -> None:
    first, second = (ElasticRun(457).go() for _ in range(2))
    assert first.notes == second.notes
    assert [each.entries for each in first.processes] == [each.entries for each in second.processes]
    assert first.trace == second.trace
