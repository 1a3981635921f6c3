"""Weights & Biases: what its library is asked; a run of its own is kept offline (skipped where it is missing)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.exporting import ODD_POINT
from support.processes import eventually

from gossamer.observe.exporters.points import Point
from gossamer.observe.exporters.wandb_run import WandbWriter

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
