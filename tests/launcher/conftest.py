"""Fixtures of launchers: a run of launch_peers that outlives no test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served_launches import Run

from gossamer.base.run_files import RunFiles


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    started = [RunFiles(run.private).newest_start(number) for number in range(6)]
    for each in filter(None, started):
        assert not Path(f"/proc/{each['pid']}").exists(), "a process outlived its run"
