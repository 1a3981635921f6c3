"""Lightning with two real workers, in one job that makes all checks: what they said is compared here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import findings, succeed

pytest.importorskip("lightning")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
WORKER = str(Path(__file__).parents[1] / "support" / "lightning_worker.py")
PATIENCE = 250  # seconds; most of what they take is to import Lightning
Said = list[dict[str, Any]]


def said_by(texts: list[str]) -> Said:
    """What each worker found, by rank; a dict by names of checks."""
    return [{name: value for line in findings(text) for name, value in line.items()} for text in texts]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    words = [WORKER, str(tmp_path_factory.mktemp("lightning"))]
    return said_by(succeed(words, 2, preload=["gossamer.integrations.lightning"], timeout_seconds=PATIENCE))


def test_fits_have_the_bits_of_a_plain_loop_with_the_same_batches(said: Said) -> None:
    ended = set()
    for mine in said:
        for same_batches, fitted, plain in mine["same_bits"].values():
            assert same_batches
            assert fitted == plain
            ended.add(fitted)
    assert len(ended) == len(said[0]["same_bits"]), "recipes differ, and ranks do not"


def test_accumulated_batches_are_one_exchange_and_clipping_sees_the_mean(said: Said) -> None:
    for mine in said:
        fitted, plain, exchanges = mine["accumulated"]
        assert fitted == plain
        assert exchanges == [4]  # of eight batches
    assert said[0]["accumulated"] == said[1]["accumulated"]


def test_validation_and_checkpoints_have_what_workers_agree_on(said: Said) -> None:
    first, second = (mine["validated"] for mine in said)
    assert first["evaluated"] == second["evaluated"] == first["held"]
    assert first["apart"] != second["apart"]
    assert first["evaluated"] not in first["apart"]
    assert first["metrics"] == second["metrics"]


def test_a_resumed_fit_has_the_bits_of_one_that_continued(said: Said) -> None:
    for mine in said:
        for whole, resumed, without_what_lies_beside in mine["resumed"].values():
            assert resumed == whole
            assert without_what_lies_beside != whole


def test_collective_calls_give_all_ranks_the_same(said: Said) -> None:
    for rank, mine in enumerate(each["collective_calls"] for each in said):
        assert mine["reduced"] == [[1.5, 5.0], [3, 10], [2, 10], [2, 0]]
        assert mine["gathered"] == [[1, 0], [2, 10]]
        assert mine["told"] == {"from": 1, "none": None}
        assert "unpickled" in mine["refused"]
        assert (mine["any"], mine["all"]) == (True, False)
        assert mine["places"] == [rank, 2, rank, 0]
        assert mine["zero"] is (rank == 0)


def test_what_lightning_would_train_wrongly_is_refused(said: Said) -> None:
    for mine in said:
        momentum, delayed, counted, apart, both, session, after = mine["refused"]
        assert "write clip=1.0 in Route(DGC(density=0.3))" in momentum
        assert "GossamerStrategy(..., clip_norm=1.0)" in delayed
        assert "Trainer(accumulate_grad_batches=2)" in counted
        assert "class Both in examples/muon.py" in apart
        assert both == said[0]["refused"][4]
        assert session == "None", "closed after an exception"
        assert after == "after it"


def test_all_workers_stop_after_the_same_step(said: Said) -> None:
    assert [mine["stopped_early"] for mine in said] == [[2, 6], [2, 6]]


def test_the_loop_says_nothing_between_steps(said: Said) -> None:
    assert [mine["quiet_between_batches"] for mine in said] == [[0, 1], [0, 1]]


def test_fabric_has_the_bits_of_a_plain_loop_and_resumes_with_them(said: Said) -> None:
    for mine in said:
        for whole, plain, parts in mine["with_fabric"].values():
            assert whole == plain == parts
    assert said[0]["with_fabric"] == said[1]["with_fabric"]


def test_rank_0_gives_notice_of_a_fit_with_few_rounds(said: Said) -> None:
    first, second = (["rounds of 3 steps" in text for text in mine["noticed"]] for mine in said)
    assert any(first)
    assert not any(second)


@pytest.mark.nightly
def test_lightning_starts_the_workers_where_nobody_has(tmp_path: Path) -> None:
    """One process, whose Trainer(devices=2) starts the other."""
    alone = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    start = f"import os, sys; [os.environ.pop(name) for name in {alone}]; os.execv(sys.executable, sys.argv[1:])"
    (text,) = succeed(["-c", start, sys.executable, WORKER, str(tmp_path), "launched"], 1, timeout_seconds=PATIENCE)
    told = [line["launched"] for line in findings(text)]
    assert sorted(each["rank"] for each in told) == [0, 1]
    assert all(each["fitted"] == each["plain"] == told[0]["plain"] for each in told)
