"""Loops and scripts of docs/how-to (arrays, pipeline, exporters) run as printed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.exporting import step
from support.page_commands import FENCE
from support.paths import ROOT
from support.processes import succeed
from support.virtual_workers import Worker, cluster

import gossamer
from gossamer import engine, events
from gossamer.events import Noticed

PAGE = (ROOT / "docs" / "how-to" / "arrays.md").read_text()
LOOPS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loops_of_the_page_train_alone(loop: str) -> None:
    names: dict[str, object] = {}
    exec(loop, names)
    check(names["parameters"])


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loops_of_the_page_train_with_others(loop: str) -> None:
    def train(worker: Worker) -> None:
        def session(parameters: Any, recipe: str, **options: Any) -> engine.Session:
            return engine.Session(parameters, recipe, worker.transport, **options)

        text = re.sub(r"^import gossamer\n|^from gossamer import engine\n", "", loop, flags=re.MULTILINE)
        here = SimpleNamespace(init=lambda: SimpleNamespace(rank=worker.rank))
        names: dict[str, object] = {"engine": SimpleNamespace(Session=session), "gossamer": here}
        exec(text, names)
        check(names["parameters"])

    cluster(train, 2)


def check(parameters: object) -> None:
    assert isinstance(parameters, dict)
    np.testing.assert_allclose(parameters["weight"], np.ones((8, 1)), atol=0.05)


def test_the_page_names_all_that_the_module_has() -> None:
    assert all(f"engine.{name}" in PAGE for name in gossamer.engine.__all__)


# -- docs/how-to/pipeline.md: its script trains, as it stands ----------------------------------------------------------


@pytest.mark.processes
def test_the_script_on_the_page_trains(tmp_path: Path) -> None:
    (script,) = [
        code
        for language, code in FENCE.findall((ROOT / "docs" / "how-to" / "pipeline.md").read_text())
        if language == "python"
    ]
    program = tmp_path / "train.py"
    program.write_text("import torch\n\ntorch.set_num_threads(1)\n" + script)
    quiet, said = succeed([str(program)], 2)
    first, second = (float(line.removeprefix("loss ")) for line in said.splitlines() if line.startswith("loss "))
    assert second < first
    assert "loss" not in quiet


# -- The listener of docs/how-to/exporters.md receives the events that the page names, until it unsubscribes -----------

EXPORTERS_PAGE = (ROOT / "docs" / "how-to" / "exporters.md").read_text(encoding="utf-8")


def test_the_page_s_listener_hears_steps_and_notices(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", EXPORTERS_PAGE, re.DOTALL) if "subscribe" in block)
    variables: dict[str, Any] = {}
    exec(code, variables)
    try:
        events.emit(replace(step(7), seconds=1.5))
        events.emit(replace(step(8), seconds=0.5))  # none of those that the page tells of
        events.emit(Noticed(message="a disk is full"))
    finally:
        variables["end"]()
    events.emit(replace(step(9), seconds=1.5))  # it has heard enough
    assert capsys.readouterr().out.splitlines() == ["step 7 took 1.5 s", "a disk is full"]
