"""Event files of TensorBoard: bytes that its own writer wrote, and the events that a reader finds in them."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from pathlib import Path

import pytest
from support.exporting import MANY, ODD_POINT, disk_with_room_for
from tensorboardX.proto.event_pb2 import Event

from gossamer.observe.exporters import tensorboard as ours
from gossamer.observe.exporters.points import Point
from gossamer.observe.exporters.tensorboard import TensorBoardWriter, record

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


def read(folder: Path) -> dict[str, list[tuple[float, int, float]]]:
    """(wall_time, step, value) of all scalars, by tag, up to the first torn record, as TensorBoard reads a file."""
    (file,) = folder.iterdir()
    content, found = file.read_bytes(), defaultdict(list)
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        if record(event := Event.FromString(content[12 : 12 + length])) != content[: length + 16]:
            break
        content = content[length + 16 :]
        for value in event.summary.value:
            found[value.tag].append((event.wall_time, event.step, value.simple_value))
    return found


def test_all_scalars_are_read_back(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write([ODD_POINT, Point(1.7e9, 2**40, MANY)])
    writer.close()
    tags = read(tmp_path)
    assert tags.keys() == {*ODD_POINT.values, *MANY}
    assert tags["train/loss"] == [(1.7e9, 300, 0.25)]
    assert math.isnan(tags["nan"][0][2])
    assert tags["beyond float32"][0][2] == math.inf
    assert tags["layer.999/norm"] == [(1.7e9, 2**40, 999 / 8)]


def test_a_value_below_the_range_of_float32_is_minus_infinity(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write([Point(1.7e9, 1, {"loss": -1e300, "\udcff": 1.0})])
    writer.close()
    assert read(tmp_path) == {"loss": [(1.7e9, 1, -math.inf)], "?": [(1.7e9, 1, 1.0)]}


def test_scalars_written_after_a_full_disk_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TensorBoardWriter(tmp_path)
    make_room = disk_with_room_for(100, monkeypatch)
    writer.write([Point(1.7e9, 1, {"loss": 1.0})])
    with pytest.raises(OSError, match="No space left"):
        writer.write([Point(1.7e9, 2, {"loss": 2.0})])
    make_room()
    writer.write([Point(1.7e9, 3, {"loss": 3.0})])
    writer.close()
    assert [(step, value) for _, step, value in read(tmp_path)["loss"]] == [(1, 1.0), (3, 3.0)]
