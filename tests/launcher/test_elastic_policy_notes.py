"""What is said of a loss: who goes on, and what is lost; in virtual time."""

from __future__ import annotations

import pytest
from support.elastic_policies import VirtualRun

from gossamer.launcher.elastic_policy import ElasticPolicy

KILLED = -9


def test_what_is_lost_with_a_worker_is_said_as_far_as_it_told() -> None:
    run = VirtualRun(4, least=2, restarts=5).attach()
    run.workers[3].lost_residual = "Its residual, of norm 0.41 after step 1200, is lost with it"
    run.workers[3].end(KILLED)
    run.after(60.0)
    assert run.notes == [
        "rank 3 was lost (signal SIGKILL). The other 3 continue; restarting it (1 of at most 5). Its residual, of norm "
        "0.41 after step 1200, is lost with it."
    ]


def check_only_members_go_on(run: VirtualRun) -> None:
    """Of four processes three are members, and the last is on its way to join them."""
    run.attach(0, 1, 2)
    run.coordinator.members |= {worker.member for worker in run.workers[:3]}
    run.workers[1].end(KILLED)
    run.after()
    assert run.notes[0].startswith("rank 1 was lost (signal SIGKILL). The other 2 continue; restarting")
    run.workers[3].end(KILLED)
    run.after()
    assert run.notes[1].startswith("rank 3 was lost (signal SIGKILL). The other 2 continue; restarting")
    run.workers[2].end(KILLED)
    run.after()
    assert run.notes[2].startswith("rank 2 was lost (signal SIGKILL). The other one waits for more; restarting")


def test_only_members_go_on() -> None:
    check_only_members_go_on(VirtualRun(4, least=2, restarts=5))


def test_the_check_of_members_notices_who_counts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts_processes(self: ElasticPolicy) -> str:
        return f"The other {sum(worker.lives for worker in self.workers)} continue"

    monkeypatch.setattr(ElasticPolicy, "_going_on", counts_processes)
    with pytest.raises(AssertionError):
        check_only_members_go_on(VirtualRun(4, least=2, restarts=5))
