from __future__ import annotations

from pathlib import Path

import pytest
from support.exporting import disk_with_room_for

from gossamer.observe.exporters.whole_records import RecordsFile


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
