from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gossamer.base import bounded_file


@pytest.mark.parametrize("nbytes", [0, 9, 10])
def test_a_file_up_to_the_limit_is_read(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * nbytes)
    assert bounded_file.read_bytes(path, 10) == bounded_file.read_text(path, 10).encode() == b"x" * nbytes


def test_a_sparse_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 20 * 2**30)
    with pytest.raises(ValueError, match=r"file has more than 67108864 bytes"):
        bounded_file.read_bytes(path)


def test_a_device_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"/dev/zero has more than 1000 bytes"):
        bounded_file.read_bytes(Path("/dev/zero"), 1000)


def test_the_end_of_a_file_is_its_last_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert (bounded_file.read_end(path, 3), bounded_file.read_end(path, 30)) == (b"789", b"0123456789")


def test_a_long_line_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwotwo\n")
    assert list(bounded_file.read_lines(path, 4)) == [b"one\n", b"twot", b"wo\n"]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    for content in ("first: µ", b"second"):
        bounded_file.write_whole(path, content)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    with path.open("rb") as reader:
        bounded_file.write_whole(path, b"other")
        assert reader.read() == b"second", "an open file keeps its content"
    bounded_file.write_whole(path, b"second")

    def full(draft: Path, content: bytes) -> int:
        draft.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        bounded_file.write_whole(path, b"third")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"second"
