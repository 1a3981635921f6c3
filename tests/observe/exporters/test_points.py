"""Points of curves, and the tools that keep them. Tests with W&B's and MLflow's libraries are skipped without them."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.exporting import MANY, ODD, ODD_POINT, attached, disk_with_room_for, logged, noticed, step
from support.processes import eventually

from gossamer.events import Event, GroupChanged
from gossamer.observe.exporters.destination import ExportQueue
from gossamer.observe.exporters.points import (
    CurveExporter,
    JsonLinesWriter,
    MlflowWriter,
    Point,
    RecordsFile,
    WandbWriter,
    mlflow_name,
    unix_seconds,
)


class Kept:
    """A tool that keeps all points."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.closed = False

    def write(self, points: Sequence[Point]) -> None:
        self.points += points

    def close(self) -> None:
        self.closed = True


def disk_full(points: Sequence[Point]) -> None:
    raise OSError(28, "No space left on device")


def exported(*happened: Event) -> list[Point]:
    tool = Kept()
    exporter = CurveExporter(tool)
    for event in happened:
        exporter.take([event])
    exporter.close()
    assert tool.closed
    return tool.points


def test_steps_of_a_failed_write_are_counted_as_missing_and_later_ones_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = Kept()
    queue = ExportQueue("tensorboard:x", lambda: CurveExporter(tool))

    def give(*numbers: int) -> bool:
        for number in numbers:
            queue(step(number, seconds=0.25))
        return queue.pump()

    assert give(1, 2, 3, 4)  # the first step is a point, the others wait for a second to pass
    with monkeypatch.context() as full:
        full.setattr(tool, "write", disk_full)
        assert not give(5, 6)
    assert give(7, 8)
    with noticed() as said:
        queue.finish()
        queue.report_dropped()
    assert [point.step for point in tool.points] == [1, 8]  # the second one has steps 6 to 8
    assert said == ["4 of 8 events of this worker did not reach tensorboard:x."]


def test_steps_that_the_last_write_refuses_are_counted_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Kept()
    queue = ExportQueue("tensorboard:x", lambda: CurveExporter(tool))
    for number in range(1, 4):
        queue(step(number, seconds=0.25))
    assert queue.pump()
    monkeypatch.setattr(tool, "write", disk_full)
    with noticed() as said:
        queue.finish()
        queue.report_dropped()
    assert said[-1] == "2 of 3 events of this worker did not reach tensorboard:x."


def test_metrics_are_points_as_the_user_named_them() -> None:
    (point,) = exported(logged(7, **{"train/loss": 0.5, "accuracy": 0.25}))
    assert (point.step, point.values) == (7, {"train/loss": 0.5, "accuracy": 0.25})


def test_short_steps_are_one_point_a_second_with_their_means() -> None:
    points = exported(*(step(number, seconds=0.25) for number in range(1, 11)))
    assert [point.step for point in points] == [1, 5, 9, 10]
    assert [point.values["gossamer/step_seconds"] for point in points] == [0.25] * 4
    assert points[1].values["gossamer/bytes_sent"] == 4e6


def test_means_are_of_the_steps_since_the_last_point() -> None:
    took = [0.5, 0.1, 0.3, 0.8]
    points = exported(*(step(n, each, moment=sum(took[:n])) for n, each in enumerate(took, start=1)))
    assert [point.values["gossamer/step_seconds"] for point in points] == [0.5, pytest.approx(0.4)]


def test_long_steps_are_a_point_each_and_skipped_ones_are_counted() -> None:
    points = exported(*(step(number, seconds=2.0) for number in range(1, 4)))
    assert [point.step for point in points] == [1, 2, 3]
    assert points[0].values["gossamer/skipped_steps"] == 0


def test_the_number_of_workers_is_a_curve() -> None:
    change = GroupChanged(step=9, view=2, world=3, lost=(1,), joined=0, seconds=0.5, finished=True)
    assert [(p.step, p.values) for p in exported(attached(4), change)] == [
        (0, {"gossamer/workers": 4}), (9, {"gossamer/workers": 3}),
    ]  # fmt: skip


def test_moments_are_unix_seconds() -> None:
    assert unix_seconds(time.perf_counter()) == pytest.approx(time.time(), abs=1.0)
    assert unix_seconds(0.0) == pytest.approx(time.time() - time.perf_counter(), abs=1.0)


def test_records_follow_each_other_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    for record in (b"one ", b"two "):
        file = RecordsFile(path)
        file.append(record)
        file.append(b"more ")
        assert file.ends_with(b"more ")
        assert not file.ends_with(b"one ")
        file.close()
    assert path.read_bytes() == b"one more two more "


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordsFile(tmp_path / "file")
    make_room = disk_with_room_for(7, monkeypatch)
    file.append(b"12345")
    with pytest.raises(OSError, match="No space left"):
        file.append(b"67890")
    assert (tmp_path / "file").read_bytes() == b"12345"
    make_room()
    file.append(b"abc")
    assert (tmp_path / "file").read_bytes() == b"12345abc"
    file.close()


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def lines(path: Path) -> list[object]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_point_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path, rank=3)
    writer.write([ODD_POINT, Point(1.7e9 + 0.25, 301, MANY)])
    writer.close()
    finite = {**ODD, "nan": None, "inf": None, "-inf": None}
    assert lines(path) == [
        {"at": 1.7e9, "rank": 3, "step": 300, "values": finite},
        {"at": 1.7e9 + 0.25, "rank": 3, "step": 301, "values": MANY},
    ]


def test_a_line_that_was_torn_ends_where_the_next_begins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"at": 1, "ra')
    writer = JsonLinesWriter(path, rank=0)
    writer.write([Point(2.0, 1, {"loss": 1.0})])
    writer.close()
    torn, whole = path.read_text().splitlines()
    assert torn == '{"at": 1, "ra'
    assert json.loads(whole)["values"] == {"loss": 1.0}


POINTS = [Point(1.0, 3, {"train/loss": 0.5}), Point(2.0, 2, {"gossamer/step_seconds": 0.1})]


class Run:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.asked.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.asked.append(values)

    def finish(self) -> None:
        self.asked.append("finish")


def test_steps_are_a_metric_so_that_none_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    run, begun = Run(), {}

    def init(**told: Any) -> Run:
        begun.update(told)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))  # type: ignore[arg-type]
    writer = WandbWriter("team/project")
    writer.write(POINTS)
    writer.close()
    assert (begun["entity"], begun["project"], begun["reinit"]) == ("team", "project", "create_new")
    assert run.asked == [
        ("*", "gossamer/step"),
        {"train/loss": 0.5, "gossamer/step": 3},
        {"gossamer/step_seconds": 0.1, "gossamer/step": 2},
        "finish",
    ]


@pytest.mark.processes
def test_the_library_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    writer = WandbWriter("project")
    writer.write([*POINTS, ODD_POINT])
    writer.close()
    (kept,) = tmp_path.rglob("*.wandb")
    for name in (b"train/loss", b"gossamer/step_seconds", b"beyond float32"):
        assert eventually(lambda name=name: name in kept.read_bytes()), name  # its own process writes it


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("train/loss", "train/loss"), ("größe %", "gr__e _"), ("", "_"), ("a//b", "a/_/b"), ("../x", "__/x"),
        ("/x", "_/x"), (".", "_"), ("x" * 300, "x" * 250),
    ],
)  # fmt: skip
def test_names_become_paths_that_mlflow_takes(name: str, taken: str) -> None:
    """Seen with mlflow-skinny 3.17.2, whose log_batch refuses the whole batch for one bad name."""
    assert mlflow_name(name) == taken


def test_mlflow_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    writer = MlflowWriter(f"file://{tmp_path}")
    writer.write([ODD_POINT, Point(1.7e9 + 1, 301, {**MANY, "last": 1.0})])
    writer.close()
    client = mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}")
    experiment = client.get_experiment_by_name("gossamer")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics.keys() == {*map(mlflow_name, ODD), *MANY, "last"}
    assert math.isnan(run.data.metrics["nan"])
    (point,) = client.get_metric_history(run.info.run_id, "train/loss")
    assert (point.step, point.value, point.timestamp) == (300, 0.25, 1_700_000_000_000)
