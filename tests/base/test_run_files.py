"""Reports in a run's directory, which several processes write and read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gossamer.base.run_files import RunFiles, read_json, write_json


def test_two_processes_can_report_one_start_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher and a forked worker do: here the other process reports just before this one's draft is in place."""
    path, replace, here = RunFiles(tmp_path).started(1, 0), os.replace, os.getpid()
    others = iter([here + 1])

    def interrupted(draft: Path, path: Path) -> None:
        if (other := next(others, None)) is not None:
            monkeypatch.setattr(os, "getpid", lambda: other)
            write_json(path, {"by": other})
        replace(draft, path)

    monkeypatch.setattr(os, "replace", interrupted)
    write_json(path, {"by": here})
    assert read_json(path) == {"by": here}
    assert os.listdir(tmp_path) == [path.name]
