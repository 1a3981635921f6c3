"""What a process has once, and each worker has for itself."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from gossamer.plan.simulate.process_state import ProcessState

DRAWS: list[Callable[[], float]] = [lambda: torch.rand(()).item(), random.random, np.random.rand]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def worker(script: Path, rank: int = 0) -> ProcessState:
    return ProcessState.of_worker(script, ["--fast"], {"RANK": str(rank), "HOME": None}, rank)


@pytest.mark.parametrize("draw", DRAWS)
def test_each_goes_on_with_its_own_random_numbers(script: Path, draw: Callable[[], float]) -> None:
    outside, states = ProcessState(script.parent), [worker(script, rank) for rank in range(2)]
    drawn: dict[int, list[float]] = {0: [], 1: []}
    for rank in (0, 1, 1, 0, 0, 1):
        states[rank].restore()
        drawn[rank].append(draw())
        states[rank].keep()
    alone = worker(script, 1)
    alone.restore()
    assert [draw() for _ in range(3)] == drawn[1]
    outside.restore()


def test_torch_begins_as_in_a_new_process(script: Path) -> None:
    outside = ProcessState(script.parent)
    torch.manual_seed(3)
    worker(script).restore()
    assert torch.initial_seed() == torch.Generator().initial_seed()
    outside.restore()


def test_the_process_around_is_put_back(script: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()

    def look() -> object:
        modules = {name: module for name, module in sys.modules.items() if not name.startswith("_")}
        return (
            dict(os.environ),
            sys.argv,
            sys.path,
            modules,
            sys.modules["__main__"],
            os.getcwd(),
            torch.get_default_dtype(),
        )

    before, outside, state = look(), ProcessState(tmp_path), worker(script)
    outside.keep()
    state.restore()
    assert sys.argv == [str(script), "--fast"]
    assert sys.path[0] == str(tmp_path)
    assert os.environ["RANK"] == "0"
    assert "HOME" not in os.environ
    assert vars(sys.modules["__main__"])["__file__"] == str(script)
    os.environ["MORE"] = "1"
    os.chdir(tmp_path / "folder")
    torch.set_default_dtype(torch.float64)
    helper = sys.modules["helper_of_a_script"] = ModuleType("helper_of_a_script")
    helper.__file__ = str(tmp_path / "helper_of_a_script.py")
    state.keep()
    outside.restore()
    assert look() == before
    state.restore()
    assert sys.modules["helper_of_a_script"] is helper
    assert os.getcwd() == str(tmp_path / "folder")
    state.keep()
    outside.restore()


@pytest.mark.parametrize("place", ["lib/site-packages/other.py", "../elsewhere.py"])
def test_modules_from_elsewhere_are_shared(script: Path, place: str) -> None:
    state = worker(script)
    module = sys.modules["other_module"] = ModuleType("other_module")
    module.__file__ = os.path.normpath(script.parent / place)
    state.keep()
    assert sys.modules.pop("other_module") is module
