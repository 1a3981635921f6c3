"""Parallel jobs, in processes of one thread each."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.side_by_side import done

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_one_process_is_this_one_and_prepares_first() -> None:
    seen: list[Any] = []
    told = list(done(lambda job: seen.append(job) or os.getpid(), [3, 1, 2], 1, lambda: seen.append("prepared")))
    assert told == [os.getpid()] * 3
    assert seen == ["prepared", 3, 1, 2]


def test_nothing_to_do_is_done() -> None:
    assert list(done(abs, list[int](), 1)) == []


def test_this_process_has_one_thread_too() -> None:
    torch.set_num_threads(2)
    assert list(done(operator.call, [torch.get_num_threads], 1, lambda: None)) == [2]
    assert list(done(operator.call, [torch.get_num_threads], 1)) == [1]


@pytest.mark.processes
def test_others_have_one_thread_and_are_told_as_they_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job waits for what is written once the second is told: in order, nobody would ever end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    os.mkfifo(slow := tmp_path / "slow")
    told = done(operator.call, [partial(Path.read_text, slow), torch.get_num_threads], 2)
    assert next(told) == 1
    slow.write_text("slow")
    assert list(told) == ["slow"]
