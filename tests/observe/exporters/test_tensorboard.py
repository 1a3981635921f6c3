"""Event files of TensorBoard: bytes that its own writer wrote, and what its own reader reads, where it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.exporting import MANY, ODD_POINT, disk_with_room_for

from gossamer.observe.exporters import tensorboard as ours
from gossamer.observe.exporters.points import Point
from gossamer.observe.exporters.tensorboard import TensorBoardWriter

# By tensorboard 2.21.0's RecordWriter and event_pb2
VERSION = "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9"
TWO_SCALARS = (
    "34000000000000005e33175c0900006040fc54d94110ac022a260a110a0a747261696e2f6c6f7373150000803e0a110a0a6772c3b6c39f6520"
    "250a150000807fc468e80f"
)


def test_records_are_those_of_tensorboards_own_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours.time, "time", lambda: 1700000000.25)
    writer = TensorBoardWriter(tmp_path)
    writer.write([Point(1700000001.5, 300, {"train/loss": 0.25, "größe %\n": math.inf})])
    writer.close()
    (file,) = tmp_path.iterdir()
    assert file.read_bytes().hex() == VERSION + TWO_SCALARS


def test_each_writer_has_a_file_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        writer = TensorBoardWriter(tmp_path)
        writer.write([ODD_POINT])
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_no_float32_is_infinite() -> None:
    assert ours.single(1e300) == math.inf
    assert ours.single(-1e300) == -math.inf
    assert math.isnan(ours.single(math.nan))
    assert ours.single(-2.5) == -2.5


def read(folder: Path) -> dict[str, list[Any]]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(folder))
    found.Reload()
    return {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write([ODD_POINT, Point(1.7e9, 2**40, MANY)])
    writer.close()
    tags = read(tmp_path)
    assert tags.keys() == {*ODD_POINT.values, *MANY}
    assert [(e.wall_time, e.step, e.value) for e in tags["train/loss"]] == [(1.7e9, 300, 0.25)]
    assert math.isnan(tags["nan"][0].value)
    assert tags["beyond float32"][0].value == math.inf
    assert [(e.step, e.value) for e in tags["layer.999/norm"]] == [(2**40, 999 / 8)]


def test_tensorboard_reads_what_came_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TensorBoardWriter(tmp_path)
    make_room = disk_with_room_for(100, monkeypatch)
    writer.write([Point(1.7e9, 1, {"loss": 1.0})])
    with pytest.raises(OSError, match="No space left"):
        writer.write([Point(1.7e9, 2, {"loss": 2.0})])
    make_room()
    writer.write([Point(1.7e9, 3, {"loss": 3.0})])
    writer.close()
    assert [(event.step, event.value) for event in read(tmp_path)["loss"]] == [(1, 1.0), (3, 3.0)]
