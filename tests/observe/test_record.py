from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.events import Attached, Closed, Ended, StepEnded
from gossamer.observe.event_log import Recorder
from gossamer.observe.rank_record import RankRecord
from gossamer.observe.record import merge, read_ranks, write

ATTACHED = Attached(
    moment=0.0, recipe="Dense()", layouts=(), parameters=3, buffer_bytes=0, control_bytes=0, rank=0, world=2
)


def ranked(rank: int, **changes: Any) -> RankRecord:
    numbers = {
        "rank": rank, "world": 2, "recipe": "Dense()", "parameters": 10, "steps": 4, "skipped_steps": 1,
        "seconds": 8.0, "median_seconds": 2.0, "p90_seconds": 3.0, "compute_seconds": 1.5, "waiting_seconds": 0.5,
        "encode_seconds": 0.1, "wire_seconds": 0.2, "decode_seconds": 0.3, "bytes_sent": 40.0, "digest": "same",
    }  # fmt: skip
    return RankRecord(**numbers | changes)


def test_the_record_has_exactly_the_promised_fields() -> None:
    merged = merge([ranked(0), ranked(1)])
    assert set(merged) == {
        "gossamer", "recipe", "workers", "ended", "preempted", "lost", "left", "truncated", "lost_residuals",
        "network", "emulation",
        "sessions", "parameters", "steps", "resumed_at", "skipped_steps", "seconds", "seconds_per_step",
        "compute_seconds_per_step", "waiting_seconds_per_step", "communication_seconds_per_step", "bytes_sent_per_step",
        "memory_bytes",
        "metrics", "final", "checkpoints", "switches", "collectives", "servers", "workers_agree", "workers_hold_merged",
        "differing_tensor",
    }  # fmt: skip
    assert merged["communication_seconds_per_step"] == {"encode": 0.1, "wire": 0.2, "decode": 0.3}
    assert merged["network"] is merged["emulation"] is merged["servers"] is merged["preempted"] is None


def test_of_servers_the_record_has_what_the_last_to_leave_was_told() -> None:
    early, late = ({"applied": applied, "late": 1, "staleness": {"0": applied}} for applied in (5, 8))
    merged = merge([ranked(0, servers=late, bytes_pulled=10.0), ranked(1, servers=early, bytes_pulled=30.0)])
    assert merged["servers"] == {"bytes_pulled_per_step": 20.0, "applied": 8, "late": 1, "staleness": {"0": 8}}


def test_seconds_and_bytes_are_means_and_memory_is_the_largest() -> None:
    merged = merge([
        ranked(0, median_seconds=1.0, bytes_sent=10.0, peak_resident_bytes=5, seconds=7.0),
        ranked(1, median_seconds=3.0, bytes_sent=30.0, peak_resident_bytes=9, seconds=8.0),
    ])  # fmt: skip
    assert merged["seconds_per_step"] == {"median": 2.0, "p90": 3.0}
    assert merged["bytes_sent_per_step"] == {"accounted": 20.0, "interface": None}
    assert merged["memory_bytes"]["peak_resident"] == 9
    assert merged["seconds"] == 8.0


@pytest.mark.parametrize(
    ("digests", "agree"), [(("a", "a"), True), (("a", "b"), False), (("a", None), False), ((None, None), False)]
)
def test_workers_agree_only_where_all_have_shown_the_same(digests: tuple[str | None, str | None], agree: bool) -> None:
    assert merge([ranked(rank, digest=digest) for rank, digest in enumerate(digests)])["workers_agree"] is agree


@pytest.mark.parametrize(
    ("held", "all_hold"), [((True, True), True), ((True, False), False), ((True, None), None), ((None, False), None)]
)
def test_whether_each_holds_what_was_merged_is_told_beside(
    held: tuple[bool | None, bool | None], all_hold: bool | None
) -> None:
    merged = merge([ranked(rank, holds_merged=each) for rank, each in enumerate(held)])
    assert (merged["workers_hold_merged"], merged["workers_agree"]) == (all_hold, True)


def test_one_machine_of_several_knows_only_of_disagreement() -> None:
    assert merge([ranked(0)])["workers_agree"] is None
    assert merge([ranked(0, digest=None)])["workers_agree"] is False
    assert merge([ranked(0, digest="a", world=3), ranked(1, digest="b", world=3)])["workers_agree"] is False


def test_the_first_differing_tensor_is_named_in_the_order_of_the_model() -> None:
    def merged(*tensors: dict[str, str]) -> Any:
        ranks = [ranked(rank, digest=str(each), tensors=each) for rank, each in enumerate(tensors)]
        return merge(ranks)["differing_tensor"]

    same, other = {"z": "1", "b": "2", "a": "3"}, {"z": "1", "b": "4", "a": "5"}
    assert merged(same, other, same) == {"name": "b", "hashes": {"0": "2", "1": "4", "2": "2"}, "others": 1}
    assert merged(same, {"z": "1", "a": "3"}) == {"name": "b", "hashes": {"0": "2", "1": None}, "others": 0}
    frozen = [replace(each, changed_frozen=["b"]) for each in (ranked(0, tensors=same), ranked(1, tensors=other))]
    found = merge([replace(each, digest=str(each.rank)) for each in frozen])["differing_tensor"]
    assert found == {"name": "b", "hashes": {"0": "2", "1": "4"}, "others": 1, "frozen": True}
    assert merged(same, same) is None
    assert merged(same, {}) is None  # a session that was not closed


@pytest.mark.parametrize(
    ("told", "agree"), [((True, True), True), ((True, None), None), ((True, False), False), ((None, None), None)]
)
def test_one_machine_of_several_knows_what_the_others_told_in_time(told: tuple[bool | None, ...], agree: bool) -> None:
    differing = {"name": "w", "hashes": {}, "others": 0}
    ranks = [ranked(rank, world=4, agrees=each, differing=differing) for rank, each in enumerate(told)]
    merged = merge(ranks)
    assert merged["workers_agree"] is agree
    assert merged["differing_tensor"] == (differing if agree is False else None)
    assert merge([replace(each, world=2) for each in ranks])["workers_agree"] is True  # all are here


def test_whoever_a_finished_run_has_lost_is_named_and_left_out() -> None:
    def left(*digests: str, lost: tuple[int, ...]) -> dict[str, Any]:
        ranks = [ranked(rank, world=3, complete=rank not in lost, lost=lost, digest=digests[rank]) for rank in range(3)]
        return merge([replace(rank, bytes_sent=1e9) if rank.rank in lost else rank for rank in ranks])

    survived = left("lost", "a", "a", lost=(0,))
    assert (survived["lost"], survived["workers"], survived["workers_agree"]) == ([0], 3, True)
    assert survived["bytes_sent_per_step"]["accounted"] == 40.0
    assert left("lost", "a", "b", lost=(0,))["workers_agree"] is False


def test_a_rank_that_was_lost_before_it_attached_is_named() -> None:
    survived = merge([ranked(rank, world=3, lost=(2,)) for rank in (0, 1)])
    assert (survived["lost"], survived["workers_agree"]) == ([2], True)


@pytest.mark.parametrize(("other", "agree"), [("a", None), ("b", False), (None, False)])
def test_agreement_is_unknown_where_a_full_disk_truncated_a_rank_s_log(other: str | None, agree: bool | None) -> None:
    cut = ranked(0, world=3, digest=None, complete=False, truncated=(0,))
    others = [ranked(rank, world=3, digest=digest, truncated=(0,)) for rank, digest in ((1, "a"), (2, other))]
    merged = merge([cut, *others])
    assert (merged["workers_agree"], merged["truncated"], merged["lost"]) == (agree, [0], [])
    assert merge([replace(cut, world=1)])["workers_agree"] is None, "no rank has a hash"
    killed = ranked(2, world=3, digest=None, complete=False)
    beside = merge([replace(each, lost=(2,)) for each in (replace(cut, metrics={"loss": [(1, 0.1, 2.0)]}), killed)])
    assert (beside["lost"], beside["final"]) == ([2], {"loss": 2.0})


def test_a_rank_that_ended_on_a_full_disk_is_not_lost(tmp_path: Path, room: Callable[[int | None], None]) -> None:
    killed, cut = Recorder(tmp_path, 0), Recorder(tmp_path, 1)
    for rank, recorder in enumerate((killed, cut)):
        recorder(replace(ATTACHED, rank=rank))
        recorder(StepEnded(moment=0.1, step=1, seconds=0.1))
    room(0)
    cut(Closed(steps=1, digest="a", residual_bytes=0, bucket_bytes=0))
    cut.close()
    second = read_ranks(tmp_path)[1]
    assert (second.lost, second.truncated, second.digest) == ((0,), (1,), None)
    room(None)
    again = Recorder(tmp_path, 1)  # another start, on a disk that has room
    again(replace(ATTACHED, rank=1))
    again(StepEnded(moment=0.1, step=1, seconds=0.1))
    second = read_ranks(tmp_path)[1]
    assert (second.lost, second.truncated) == ((0, 1), ()), "as if it was killed now"
    again.close()
    assert read_ranks(tmp_path)[1].complete
    killed.close()


def test_a_rank_that_left_a_finished_run_is_named_and_neither_disagrees_nor_counts() -> None:
    def merged(**changes: Any) -> dict[str, Any]:
        left = ranked(0, world=3, steps=2, digest=None, bytes_sent=1e9, **changes)
        return merge([left, ranked(1, world=3), ranked(2, world=3)])

    record = merged(left=True)
    assert (record["left"], record["lost"], record["workers_agree"], record["steps"]) == ([0], [], True, 4)
    assert record["bytes_sent_per_step"]["accounted"] == 40.0
    assert merged(left=False)["workers_agree"] is False
    alone = merge([ranked(0, left=True)])
    assert (alone["left"], alone["steps"]) == ([0], 4)


def test_what_lost_workers_had_still_to_send_is_told_of_who_is_gone_and_who_began_again() -> None:
    def told(norm: float, step: int) -> dict[str, Any]:
        return {"norm": norm, "step": step}

    here = ranked(0, world=4, residual=told(9.0, 80))  # it ended with the others, and what it kept with it
    again = ranked(1, world=4, residual=told(8.0, 80), lost_residuals=(told(0.5, 30), told(0.25, 10)))
    left = ranked(2, world=4, residual=told(0.75, 20), left=True)
    killed = ranked(3, world=4, residual=told(0.4, 40), complete=False)
    ranks = [replace(rank, lost=(3,)) for rank in (here, again, left, killed)]
    lost = [(1, 0.25, 10), (2, 0.75, 20), (1, 0.5, 30), (3, 0.4, 40)]
    found = [tuple(each.values()) for each in merge(ranks)["lost_residuals"]]
    assert found == lost
    unfinished = merge(ranks, ended="interrupted")["lost_residuals"]
    assert [each["rank"] for each in unfinished] == [1, 1], "all ended, with a checkpoint or without"
    assert merge([ranked(0), ranked(1)])["lost_residuals"] == []


def test_the_run_began_with_whoever_was_there_first() -> None:
    """Rank 0 was lost and began again at step 3, so its seconds say nothing of the run's."""
    again = ranked(0, resumed_at=2, seconds=1.0, metrics={"loss": [(3, 0.1, 6.0), (4, 0.2, 8.0)]})
    first = ranked(1, seconds=8.0, metrics={"loss": [(2, 5.0, 1.0), (3, 6.0, 2.0), (4, 7.0, 4.0)]})
    merged = merge([again, first])
    assert (merged["resumed_at"], merged["seconds"]) == (0, 8.0)
    assert merged["metrics"]["loss"] == [(2, 5.0, 1.0), (3, 6.0, 4.0), (4, 7.0, 6.0)]
    both = merge([replace(again, resumed_at=0), first])
    assert both["metrics"]["loss"][1] == (3, pytest.approx(3.05), 4.0), "means of seconds where both began together"


@pytest.mark.parametrize("ended", ["failed", "interrupted"])
def test_of_a_run_that_did_not_finish_all_that_was_logged_is_there(ended: Ended) -> None:
    """One rank raised and wrote its end; the other was killed for it."""
    raised = ranked(1, lost=(0,), digest=None, metrics={"loss": [(50, 1.0, 3.0)]})
    killed = ranked(0, lost=(0,), digest=None, complete=False, metrics={"loss": [(50, 1.0, 5.0)]})
    merged = merge([killed, raised], ended=ended)
    assert (merged["ended"], merged["lost"], merged["workers_agree"]) == (ended, [], None)
    assert merged["metrics"] == {"loss": [(50, 1.0, 4.0)]}


def test_metrics_are_means_over_whoever_logged_them_in_the_order_of_steps() -> None:
    first = {"loss": [(1, 0.1, 2.0), (2, 0.2, 4.0)], "validation_loss": [(2, 0.3, 7.0)]}
    second = {"loss": [(2, 0.4, 6.0), (1, 0.3, 4.0)]}
    merged = merge([ranked(0, metrics=first), ranked(1, metrics=second)])
    assert merged["metrics"]["loss"] == [(1, pytest.approx(0.2), 3.0), (2, pytest.approx(0.3), 5.0)]
    assert merged["final"] == {"loss": 5.0, "validation_loss": 7.0}


def test_switches_of_the_recipe_are_rank_0_s() -> None:
    merged = merge([ranked(rank, switches=[(2, "Dense()", "why")]) for rank in range(2)])
    assert merged["switches"] == [{"step": 2, "recipe": "Dense()", "reason": "why"}]


def test_a_checkpoint_that_every_rank_reports_is_listed_once() -> None:
    merged = merge([ranked(rank, checkpoints=[(2, "there")]) for rank in range(2)])
    assert merged["checkpoints"] == [{"step": 2, "directory": "there"}]


def test_what_is_not_a_number_is_null_in_the_file(tmp_path: Path) -> None:
    metrics = {"loss": [(1, 0.1, 1.0), (2, 0.2, None)]}
    write(tmp_path / "all.json", merge([ranked(rank, metrics=metrics) for rank in range(2)]))
    assert "NaN" not in (tmp_path / "all.json").read_text()
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["metrics"]["loss"] == [[1, pytest.approx(0.1), 1.0], [2, pytest.approx(0.2), None]]
    assert record["final"] == {"loss": None}


def test_no_record_where_nobody_attached(tmp_path: Path) -> None:
    assert read_ranks(tmp_path) == []


@pytest.mark.parametrize("value", [1e308, -1.7e308])
def test_the_record_of_ranks_that_log_huge_numbers_has_their_mean(tmp_path: Path, value: float) -> None:
    merged = merge([ranked(rank, metrics={"loss": [(1, 0.5, value)]}) for rank in range(2)])
    assert merged["final"] == {"loss": value}
    write(tmp_path / "record.json", merged)
    assert json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)["final"] == {"loss": value}
