"""Durable checkpoints: at any operation a kill, a full disk or a power failure leaves one that loads."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.fake_disk import WRITING, FakeDisk, watched
from support.nightly import nightly

from gossamer.errors import CheckpointError
from gossamer.train import checkpoint
from gossamer.train.checkpoint import coordinated, fsync
from gossamer.train.checkpoint.agreement import SharedStep
from gossamer.train.checkpoint.coordinated import LoadedCheckpoint

ABOUT = {"run": "mine"}
FORM = {"rank": 0, "world": 1, "recipe": "", "layout": "", "step": 0, "passes": 0, "state": {}, "progress": {}}


def tree(value: float) -> dict[str, object]:
    parts = {"model": {"x": torch.full((3,), value)}, "optimizer": {}, "world": {}, "random": {}, "mine": {}}
    return {"session": FORM, **parts}


def save(directory: Path, step: int, value: float, keep: int = 2) -> None:
    coordinated.save(SharedStep(str(directory), step, 0, lambda text: [text]), tree(value), ABOUT, keep)


def loaded(directory: Path) -> float | None:
    found = coordinated.load(directory, 0, 1, lambda text: [text])
    return None if found is None else value_of(found)


def value_of(found: LoadedCheckpoint) -> float:
    (value,) = set(found.tree["model"]["x"].tolist())
    return float(value)


# what was saved before, what is saved now, how many stay
CASES: dict[str, tuple[list[int], int, int]] = {
    "the first": ([], 2, 2),
    "the second": ([2], 4, 2),
    "the fourth": ([2, 4, 6], 8, 2),
    "keeping one": ([2], 4, 1),
    "a step again": ([2, 4], 4, 2),
    "the only step again": ([4], 4, 2),
    "the only step again, keeping one": ([4], 4, 1),
}


def begun(directory: Path, before: list[int], keep: int) -> float | None:
    for step in before:
        save(directory, step, float(step), keep)
    return float(before[-1]) if before else None


def operations(directory: Path, case: str) -> list[str]:
    before, step, keep = CASES[case]
    begun(directory, before, keep)
    with watched(directory.parent) as disk:
        save(directory, step, -1.0, keep)
    assert loaded(directory) == -1.0
    return disk.names


class Killed(BaseException):
    """Ends a save as a signal would: nothing tidies up."""


def at_every_operation(folder: Path, case: str, check: Callable[[Path, FakeDisk, float | None], None]) -> int:
    """Kill a save at each of its operations; returns their number."""
    before, step, keep = CASES[case]
    count = len(operations(folder / "whole" / "kept", case))
    for fatal in range(count):
        root = folder / str(fatal)
        root.mkdir()
        value = begun(root / "kept", before, keep)

        def kill(number: int, name: str, fatal: int = fatal) -> None:
            if number >= fatal:
                raise Killed

        with watched(root, kill) as disk:
            with pytest.raises(Killed):
                save(root / "kept", step, -1.0, keep)
            disk.before = lambda number, name: None
            check(root, disk, value)
    return count


@pytest.mark.parametrize("case", CASES)
def test_promise_10_killed_at_any_operation_the_one_before_or_the_new_one_loads(case: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()

    def check(root: Path, disk: FakeDisk, value: float | None) -> None:
        assert loaded(root / "kept") in (value, -1.0)
        save(root / "kept", 10, 10.0)  # whoever goes on finds nothing in the way
        assert loaded(root / "kept") == 10.0

    assert at_every_operation(tmp_path, case, check) > 8


def check_power_failures(folder: Path, case: str, seeds: int) -> None:
    (folder / "whole").mkdir()

    def check(root: Path, disk: FakeDisk, value: float | None) -> None:
        for seed in [None, *range(seeds)]:
            found = disk.after_power_failure(root.parent / f"{root.name}-{seed}", seed)
            assert loaded(found / "kept") in (value, -1.0)
            shutil.rmtree(found)

    at_every_operation(folder, case, check)


@pytest.mark.parametrize(
    "case",
    [
        "the first", "the fourth", "a step again", "the only step again, keeping one",
        *nightly("the second", "keeping one", "the only step again"),
    ],
)  # fmt: skip
def test_after_a_power_failure_at_any_operation_one_loads(case: str, tmp_path: Path) -> None:
    """Of what was not synced, any part may be there."""
    check_power_failures(tmp_path, case, seeds=2)


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_outlives_a_power_failure(case: str, tmp_path: Path) -> None:
    check_saved_outlives(tmp_path, case)


def check_saved_outlives(folder: Path, case: str) -> None:
    before, step, keep = CASES[case]
    root = folder / "root"
    root.mkdir()
    begun(root / "deep" / "kept", before, keep)
    with watched(root) as disk:
        save(root / "deep" / "kept", step, -1.0, keep)
        found = disk.after_power_failure(folder / "found", None)
    assert loaded(found / "deep" / "kept") == -1.0


@pytest.mark.parametrize("case", ["the first", "the second", "a step again"])
def test_without_syncing_folders_it_is_lost(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fsync, checkpoint.files):
        monkeypatch.setattr(module.system, "sync_folder", lambda folder: None)
    with pytest.raises((AssertionError, CheckpointError)):
        check_saved_outlives(tmp_path, case)


def test_without_keeping_what_is_replaced_it_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "keep_replaced", lambda *_: None)
    with pytest.raises(AssertionError):
        test_promise_10_killed_at_any_operation_the_one_before_or_the_new_one_loads("the only step again", tmp_path)


def test_pruning_before_all_are_complete_would_lose_the_one_before(tmp_path: Path) -> None:
    """Two ranks, of which one dies before it completes; keep=1."""
    answers: list[list[str]] = []

    def both(text: str) -> list[str]:
        return [text, text]

    def other_dies(text: str) -> list[str]:
        answers.append([text])
        if len(answers) == 3:  # set aside, staged, completed
            raise Killed
        return [text, text]

    coordinated.save(SharedStep(str(tmp_path), 2, 0, both), tree(2.0), ABOUT, 1)
    with pytest.raises(Killed):
        coordinated.save(SharedStep(str(tmp_path), 4, 0, other_dies), tree(4.0), ABOUT, 1)
    assert checkpoint.complete_steps(tmp_path, 0) == [2, 4]
    coordinated.save(SharedStep(str(tmp_path), 6, 0, both), tree(6.0), ABOUT, 1)
    assert checkpoint.complete_steps(tmp_path, 0) == [6]


def test_parts_then_manifest_then_names(tmp_path: Path) -> None:
    names = operations(tmp_path / "kept", "the second")
    writes = [name for name in names if name not in {"open", "write"}]
    part = ["mkdir", "fsync", "fsync"]  # the step's folder, in its directory; the part's content
    named = ["fsync", "replace", "fsync", "replace", "fsync", "fsync"]  # the manifest's content, and names
    assert writes[: len(part + named)] == part + named
    assert set(writes[len(part + named) :]) <= {"unlink", "rmdir"}


@pytest.mark.parametrize("case", CASES)
def test_promise_10_a_full_disk_at_any_operation_loses_nothing_and_says_what_to_free(case: str, tmp_path: Path) -> None:
    before, step, keep = CASES[case]
    (tmp_path / "whole").mkdir()
    names = operations(tmp_path / "whole" / "kept", case)
    full_at = [number for number, name in enumerate(names) if name in WRITING]
    assert len(full_at) > 6
    for number in full_at:
        root = tmp_path / str(number)
        root.mkdir()
        value = begun(root / "kept", before, keep)
        if value is not None:
            (root / "kept" / "run-old" / "step-00000009").mkdir(parents=True)
            (root / "kept" / "run-old" / "step-00000009" / "rank-0.safetensors").write_bytes(b"x" * 1234)

        def full(now: int, name: str, since: int = number) -> None:
            if now >= since and name in WRITING:
                raise OSError(errno.ENOSPC, "No space left on device")

        with watched(root, full) as disk:
            with pytest.raises(CheckpointError, match="No space left on device") as caught:
                save(root / "kept", step, -1.0, keep)
            disk.before = lambda number, name: None
        if value is not None:
            assert "run-old has 1,234 bytes" in str(caught.value)
        assert "bytes are free" in str(caught.value)
        assert loaded(root / "kept") in (value, -1.0)
        assert not list(root.rglob("*.partial"))
        save(root / "kept", 10, 10.0)
        assert loaded(root / "kept") == 10.0
