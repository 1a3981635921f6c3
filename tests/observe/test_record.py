from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.observe.record import RankRecord, merge, read_ranks, write, write_rank
from gossamer.observe.recorder import live_path


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
        "gossamer", "recipe", "workers", "lost", "network", "emulation", "parameters", "steps", "skipped_steps",
        "seconds", "seconds_per_step", "compute_seconds_per_step", "waiting_seconds_per_step",
        "communication_seconds_per_step", "bytes_sent_per_step", "memory_bytes", "metrics", "final", "checkpoints",
        "collectives", "servers", "workers_agree", "workers_hold_merged",
    }  # fmt: skip
    assert merged["communication_seconds_per_step"] == {"encode": 0.1, "wire": 0.2, "decode": 0.3}
    assert merged["network"] is merged["emulation"] is merged["servers"] is None


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


def test_whoever_was_lost_is_named_and_need_not_agree(tmp_path: Path) -> None:
    def left(*, lost: int, digests: tuple[str, str] = ("a", "a")) -> dict[str, Any]:
        live_path(tmp_path, lost).touch()
        for rank, digest in zip({0, 1, 2} - {lost}, digests, strict=True):
            live_path(tmp_path, rank).touch()
            write_rank(tmp_path, ranked(rank, world=3, digest=digest))
        return merge(read_ranks(tmp_path))

    survived = left(lost=0)
    assert (survived["lost"], survived["workers"], survived["workers_agree"]) == ([0], 3, True)
    assert left(lost=0, digests=("a", "b"))["workers_agree"] is False
    live_path(tmp_path, 0).unlink()  # of a worker on another machine nobody knows here
    elsewhere = merge(read_ranks(tmp_path))
    assert (elsewhere["lost"], elsewhere["workers_agree"]) == ([], False)
    write_rank(tmp_path, ranked(2, world=3, digest="a"))
    assert merge(read_ranks(tmp_path))["workers_agree"] is None


def test_metrics_are_means_over_whoever_logged_them_in_the_order_of_steps() -> None:
    first = {"loss": [(1, 0.1, 2.0), (2, 0.2, 4.0)], "validation_loss": [(2, 0.3, 7.0)]}
    second = {"loss": [(2, 0.4, 6.0), (1, 0.3, 4.0)]}
    merged = merge([ranked(0, metrics=first), ranked(1, metrics=second)])
    assert merged["metrics"]["loss"] == [(1, pytest.approx(0.2), 3.0), (2, pytest.approx(0.3), 5.0)]
    assert merged["final"] == {"loss": 5.0, "validation_loss": 7.0}


def test_a_checkpoint_that_every_rank_reports_is_listed_once() -> None:
    merged = merge([ranked(rank, checkpoints=[(2, "there")]) for rank in range(2)])
    assert merged["checkpoints"] == [{"step": 2, "directory": "there"}]


def test_what_is_not_a_number_is_null_in_the_file(tmp_path: Path) -> None:
    metrics = {"loss": [(1, 0.1, 1.0), (2, 0.2, float("nan"))]}
    for rank in range(2):
        write_rank(tmp_path, ranked(rank, metrics=metrics))
    assert "NaN" not in (tmp_path / "record-0.json").read_text()
    write(tmp_path / "all.json", merge(read_ranks(tmp_path)))
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["metrics"]["loss"] == [[1, pytest.approx(0.1), 1.0], [2, pytest.approx(0.2), None]]
    assert record["final"] == {"loss": None}


def test_no_record_where_nobody_attached(tmp_path: Path) -> None:
    assert read_ranks(tmp_path) == []
