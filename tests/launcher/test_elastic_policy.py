"""What becomes of an elastic run as its workers are lost, fail, finish, leave and are asked for; in virtual time."""

from __future__ import annotations

import pytest
from support.elastic_policies import VirtualRun

from gossamer.launcher.elastic_policy import ElasticPolicy, ElasticWorker
from gossamer.launcher.failure import Failure, Outcome
from gossamer.launcher.restart_policy import STRANDED

KILLED = -9


def check_a_loss_is_restarted_alone(run: VirtualRun) -> None:
    run.attach()
    run.workers[3].end(KILLED)
    assert run.after(60.0)
    assert run.notes == ["rank 3 was lost (signal SIGKILL). The other 3 continue; restarting it (1 of at most 5)."]
    assert run.living == [0, 1, 2, 3]
    assert [len(worker.starts) for worker in run.workers] == [1, 1, 1, 2]
    assert run.coordinator.buried == run.workers[3].members[:1]


def test_a_lost_worker_is_started_again_alone_as_another_member() -> None:
    check_a_loss_is_restarted_alone(VirtualRun(4, least=2, restarts=5))


def test_the_check_of_losses_detects_a_mutant_that_restarts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def restarts_all(self: ElasticPolicy, worker: ElasticWorker, failure: Failure, now: float) -> None:
        for each in self.workers:
            each.start()

    monkeypatch.setattr(ElasticPolicy, "_worker_failed", restarts_all)
    with pytest.raises(AssertionError):
        check_a_loss_is_restarted_alone(VirtualRun(4, least=2, restarts=5))


def test_a_worker_that_dies_again_within_seconds_waits_longer_each_time() -> None:
    run = VirtualRun(2, restarts=6).attach()
    for wait in (0.0, 1.0, 2.0, 4.0):
        run.workers[1].end(KILLED)
        lost_at = run.now[0]
        while run.after(0.25) and 1 not in run.living:
            pass
        assert run.workers[1].starts[-1] - lost_at == pytest.approx(wait, abs=0.3)
    run.after(60.0)  # it lived on
    run.workers[1].end(KILLED)
    run.after()
    assert run.living == [0, 1]
    assert "restarting it in 4 s (4 of at most 6)" in run.notes[3]


def test_restarts_end_and_the_others_continue() -> None:
    run = VirtualRun(3, restarts=1).attach()
    run.workers[2].end(KILLED)
    run.after(30.0)
    run.workers[2].end(KILLED)
    assert run.after(30.0)
    assert run.living == [0, 1]
    assert run.notes[-1] == "rank 2 was lost (signal SIGKILL). The other 2 continue."
    for worker in run.workers[:2]:
        worker.end(0)
    assert not run.after()
    assert run.policy.outcome({}) == Outcome(restarts=1)


def test_the_first_loss_names_the_line_to_write_for_restarts() -> None:
    run = VirtualRun(3).attach()
    for place in (1, 2):
        run.workers[place].end(KILLED)
        run.after()
    assert run.notes == [
        "rank 1 was lost (signal SIGKILL). The other 2 continue. To restart each lost worker up to 5 times: "
        "--max-restarts 5",
        "rank 2 was lost (signal SIGKILL). The other one continues.",
    ]


def test_an_error_before_training_ends_the_run() -> None:
    run = VirtualRun(3, restarts=5)
    run.workers[1].end(1, "NameError: x")
    assert not run.after()
    failure = run.policy.outcome({}).failure
    assert failure is not None
    assert (failure.rank, failure.summary) == (1, "NameError: x")


def test_an_error_in_one_of_those_that_train_is_a_loss() -> None:
    run = VirtualRun(3, restarts=5).attach()
    run.workers[1].end(1, "MemoryError: 3 GB")
    assert run.after()
    assert run.notes == [
        "rank 1 failed: MemoryError: 3 GB (exit code 1). The other 2 continue; restarting it (1 of at most 5). "
        "Its log: logs/rank-1.log"
    ]
    assert run.after(1.0)
    assert run.living == [0, 1, 2]


def test_a_worker_that_is_not_like_the_others_is_not_started_again() -> None:
    run = VirtualRun(3, restarts=5).attach()
    run.workers[1].end(1, "gossamer.errors.MismatchError: the ranks are not alike")
    assert run.after()
    assert "The other 2 continue. Its log" in run.notes[0]
    assert run.after(100.0)
    assert run.living == [0, 2]


def test_a_worker_whose_coordinator_stayed_away_is_not_started_again() -> None:
    """The launcher of other machines ends with the last of its workers."""
    run = VirtualRun(2, restarts=5, joins=True).attach()
    for worker in run.workers:
        worker.end(1, "gossamer.errors.CoordinatorLost: the coordinator did not answer", echo=True)
    assert not run.after()
    failure = run.policy.outcome({}).failure
    assert failure is not None
    assert "CoordinatorLost" in failure.summary


def test_the_coordinator_is_told_of_each_start() -> None:
    run = VirtualRun(2, restarts=1).attach()
    run.workers[1].end(KILLED)
    run.after()
    assert run.coordinator.started == [*run.workers[0].members, *run.workers[1].members]


def test_workers_of_a_run_that_continues_have_no_parameters_before_they_attach() -> None:
    run = VirtualRun(2, resumed=True)
    assert not any(worker.holds_state for worker in run.workers)
    assert all(worker.holds_state for worker in VirtualRun(2).workers)


def check_the_same_error_in_all_ends_the_run(run: VirtualRun) -> None:
    run.attach()
    for worker in run.workers:
        worker.end(1, f"ValueError: bad data at {worker.number}")
        run.after(0.01)
    assert not run.after(100.0)
    outcome = run.policy.outcome({})
    assert outcome.failure is not None
    assert (outcome.failure.summary, outcome.exit_code) == ("ValueError: bad data at 0", 1)


def test_an_error_that_all_meet_ends_the_run_with_the_first() -> None:
    check_the_same_error_in_all_ends_the_run(VirtualRun(3, restarts=5))


def test_the_check_of_common_errors_detects_a_mutant_that_restarts_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ElasticPolicy, "_is_stranding", property(lambda self: False))
    with pytest.raises(AssertionError):
        check_the_same_error_in_all_ends_the_run(VirtualRun(3, restarts=5))


def test_an_old_loss_is_not_the_cause_of_a_later_error() -> None:
    run = VirtualRun(3, least=2).attach()
    run.workers[0].end(1, "OSError: old")
    run.after()
    run.after(600.0)
    run.workers[1].end(1, "ValueError: new")
    assert not run.after()
    assert run.policy.failed[0].summary == "ValueError: new"
    failure = run.policy.outcome({}).failure
    assert failure is not None
    assert failure.summary == "ValueError: new"


def test_an_error_ends_a_run_that_is_too_small_without_its_worker() -> None:
    run = VirtualRun(2, least=2, restarts=1).attach()
    run.workers[0].end(1, "MemoryError")
    assert run.after()
    run.attach()
    run.workers[0].end(1, "MemoryError")
    assert not run.after()
    assert run.policy.outcome({}).exit_code == 1


def test_a_loss_leaves_those_who_only_began_again_nothing_to_continue_from() -> None:
    run = VirtualRun(2, restarts=5).attach()
    run.workers[0].end(KILLED)
    run.after()
    run.workers[1].end(KILLED)
    assert not run.after()
    outcome = run.policy.outcome({})
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.summary, outcome.exit_code) == (1, STRANDED, 137)


def test_before_training_whoever_is_lost_may_begin_again() -> None:
    run = VirtualRun(2, restarts=5)
    for worker in run.workers:
        worker.end(KILLED)
        assert run.after()
    assert run.living == [0, 1]


def test_before_training_the_others_do_not_wait_for_one_that_will_not_come() -> None:
    run = VirtualRun(3, restarts=1)
    run.workers[1].end(KILLED)
    run.after()
    assert run.coordinator.expected == 3
    run.workers[1].end(KILLED)
    run.after()
    assert run.coordinator.expected == 2
    run.attach(0, 2)
    run.workers[0].end(KILLED)
    run.after()
    assert run.coordinator.expected == 2, "training has begun"


def test_a_run_that_lost_everyone_failed() -> None:
    run = VirtualRun(2).attach()
    for worker in run.workers:
        worker.end(KILLED)
    assert not run.after()
    failure = run.policy.outcome({}).failure
    assert failure is not None
    assert failure.summary == "all 2 workers were lost, this one last"


def check_too_few_wait_and_end_resumable(run: VirtualRun) -> None:
    run.attach()
    run.workers[0].end(KILLED)
    assert run.after()
    assert "The other one waits for more." in run.notes[0]
    assert run.notes[1:] == [
        "1 worker of at least 2 is left, so training waits for more workers, for 30 min at most "
        "(GOSSAMER_TIMEOUT=1800). To add some: gossamer run --join HOST"
    ]
    assert run.after(1799.0)
    assert len(run.notes) == 2
    assert not run.after(2.0)
    outcome = run.policy.outcome({})
    assert outcome.resumable == "1 worker of at least 2 was left, and no worker joined within 30 min"
    assert (outcome.exit_code, outcome.failure) == (75, None)


def test_fewer_than_the_least_wait_for_others_and_end_resumable() -> None:
    check_too_few_wait_and_end_resumable(VirtualRun(2, least=2))


def test_the_check_of_too_few_detects_a_mutant_that_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ElasticPolicy, "_watch_least", lambda self, now: None)
    with pytest.raises(AssertionError):
        check_too_few_wait_and_end_resumable(VirtualRun(2, least=2))


def test_whoever_joins_from_elsewhere_ends_the_wait() -> None:
    run = VirtualRun(2, least=2).attach()
    run.workers[0].end(KILLED)
    run.after(1700.0)
    run.coordinator.members.add(7)
    assert run.after(1000.0)
    assert run.policy.size == 2
    run.coordinator.members.clear()
    assert run.after(0.0)
    assert run.after(1000.0), "the wait begins anew"


def test_a_worker_that_left_is_no_loss_and_not_started_again() -> None:
    run = VirtualRun(3, restarts=5).attach()
    run.workers[2].end(0, left=True)
    assert run.after(60.0)
    assert (run.living, run.notes) == ([0, 1], ["rank 2 has left the run. The other 2 continue."])
    for worker in run.workers[:2]:
        worker.end(KILLED)
    run.after(), run.after(100.0)
    assert run.policy.outcome({}).exit_code == 137, "whoever left has not finished"


def test_a_run_that_all_have_left_may_be_resumed() -> None:
    run = VirtualRun(2).attach()
    for worker in run.workers:
        worker.end(0, left=True)
    assert not run.after()
    assert run.policy.outcome({}).exit_code == 75


def test_once_one_has_finished_the_lost_stay_lost_and_the_late_are_ended() -> None:
    run = VirtualRun(3, restarts=5).attach()
    run.workers[2].end(KILLED)
    run.after(20.0)
    run.workers[0].end(0)
    assert run.after(), "rank 1 is still at work"
    run.workers[1].end(KILLED)
    assert not run.after(), "rank 2 was only on its way"
    assert run.policy.outcome({}) == Outcome(restarts=1)
    assert run.living == [2]


def test_nobody_is_started_again_once_the_coordinator_has_ended_the_run() -> None:
    run = VirtualRun(3, restarts=5).attach()
    run.workers[0].end(KILLED)
    run.after(60.0)
    run.workers[0].end(KILLED)
    run.after()
    assert run.workers[0].due is not None
    run.coordinator.ended = "all workers that had the parameters have left"
    run.workers[1].end(1, "PeerLost: not in the run any more", echo=True)
    run.after(60.0)
    assert run.living == [2]
    run.workers[2].end(1, "PeerLost: not in the run any more", echo=True)
    assert not run.after()
    assert run.policy.outcome({}).exit_code == 1


def test_once_the_coordinator_hears_that_all_is_done_losses_stay_and_errors_count() -> None:
    run = VirtualRun(3, least=3, restarts=5).attach()
    run.coordinator.finishing = True
    run.workers[2].end(KILLED)
    assert run.after(60.0)
    assert run.living == [0, 1]
    assert run.notes == ["rank 2 was lost (signal SIGKILL). The other 2 continue."]
    run.workers[0].end(1, "OSError: disk full")
    assert not run.after()
    assert run.policy.outcome({}).exit_code == 1


def test_workers_that_never_attach_finish_one_by_one() -> None:
    run = VirtualRun(2)
    run.workers[0].end(0)
    assert run.after()
    run.workers[1].end(0)
    assert not run.after()
    assert run.policy.outcome({}) == Outcome()


@pytest.mark.parametrize(("echo", "exit_code"), [(False, 1), (True, 0)])
def test_an_error_after_another_has_finished_is_the_runs_unless_it_says_that_the_other_is_gone(
    echo: bool, exit_code: int
) -> None:
    run = VirtualRun(2, restarts=1).attach()
    run.workers[1].end(0)
    run.after()
    run.workers[0].end(1, "OSError: disk full", echo=echo)
    assert not run.after()
    assert run.policy.outcome({}).exit_code == exit_code


def test_members_elsewhere_keep_the_coordinator_alive() -> None:
    run = VirtualRun(2).attach()
    run.coordinator.members.add(7)
    for worker in run.workers:
        worker.end(KILLED)
    assert run.after()
    assert run.after(1e6)
    run.coordinator.members.clear()
    assert not run.after()


def test_of_a_worker_that_is_evicted_it_is_known_that_it_does_not_train() -> None:
    run = VirtualRun(3).attach()
    assert run.policy.training == 3
    run.coordinator.members = {worker.member for worker in run.workers[:2]}
    assert (run.policy.training, run.policy.size) == (2, 3)


def test_the_finished_stay_a_while_for_those_elsewhere() -> None:
    run = VirtualRun(1).attach()
    run.coordinator.members.add(7)
    run.workers[0].end(0)
    assert run.after()
    assert run.after(29.0)
    assert not run.after(2.0)
    assert run.policy.outcome({}) == Outcome()


def test_asked_for_more_it_starts_them_at_free_places_first() -> None:
    run = VirtualRun(3).attach()
    run.workers[1].end(KILLED)
    run.after()
    run.coordinator.members.add(7)
    run.coordinator.request = 5
    assert run.after()
    assert run.living == [0, 1, 2, 3]
    assert run.notes[-1] == "5 workers were requested, and the run has 3. Starting 2 here."
    run.coordinator.request = 2
    assert run.after()
    assert run.living == [0, 1, 2, 3], "the coordinator puts out who is too many"


def test_a_launcher_that_joined_leaves_the_run_to_its_coordinator() -> None:
    run = VirtualRun(2, restarts=1, joins=True).attach()
    for worker in run.workers:
        worker.end(KILLED)
    assert run.after(60.0)
    assert run.living == [0, 1], "others have what they need to go on"
    assert run.notes[0] == (
        "rank 0 was lost (signal SIGKILL). The run continues without it; restarting it (1 of at most 1)."
    )
    for worker in run.workers:
        worker.end(0, left=True)
    assert not run.after()
    assert run.policy.outcome({}).exit_code == 0


# -- who goes on, and what is lost; in virtual time --------------------------------------------------------------------


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


def test_only_members_continue() -> None:
    check_only_members_go_on(VirtualRun(4, least=2, restarts=5))


def test_the_check_of_members_detects_a_mutant_that_counts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts_processes(self: ElasticPolicy) -> str:
        return f"The other {sum(worker.lives for worker in self.workers)} continue"

    monkeypatch.setattr(ElasticPolicy, "_going_on", counts_processes)
    with pytest.raises(AssertionError):
        check_only_members_go_on(VirtualRun(4, least=2, restarts=5))


# -- with servers, which have the parameters ---------------------------------------------------------------------------


def test_with_servers_the_loss_of_all_workers_is_restarted() -> None:
    run = VirtualRun(2, restarts=1, served=True).attach()
    for worker in run.workers:
        worker.end(KILLED)
    assert run.after(60.0)
    assert run.living == [0, 1]
    for worker in run.workers:
        worker.end(0)
    assert not run.after()
    assert run.policy.outcome({}) == Outcome(restarts=2)
    without = VirtualRun(2, restarts=1).attach()
    for worker in without.workers:
        worker.end(KILLED)
    assert not without.after(60.0)


def test_with_servers_no_worker_waits_for_another_one() -> None:
    run = VirtualRun(2, least=2, served=True).attach()
    run.workers[1].end(KILLED)
    assert run.after()
    assert "The other one continues" in run.notes[0]
    assert "so the run ends without more workers" in run.notes[1]
    assert not run.after(1800.0)
    assert run.policy.outcome({}).resumable
