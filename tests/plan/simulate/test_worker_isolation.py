"""What a process has once, and each worker has for itself."""

from __future__ import annotations

import importlib
import io
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gossamer.plan.simulate import SimulationError
from gossamer.plan.simulate.worker_isolation import Baton, ProcessState, guarded, routed, sink

DRAWS: list[Callable[[], float]] = [lambda: torch.rand(()).item(), random.random, np.random.rand]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def worker(script: Path, rank: int = 0) -> ProcessState:
    return ProcessState.of_worker(script, ["--fast"], {"RANK": str(rank), "HOME": None}, rank)


@pytest.mark.parametrize("draw", DRAWS)
def test_each_continues_with_its_own_random_numbers(script: Path, draw: Callable[[], float]) -> None:
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


@pytest.mark.parametrize(("folder", "own"), [(".", True), ("lib/site-packages", False), ("../elsewhere", False)])
def test_a_package_without_an_init_file_belongs_to_the_worker_of_its_script(
    script: Path, folder: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = Path(os.path.normpath(script.parent / folder))
    (above / "package_of_a_script").mkdir(parents=True)
    (above / "package_of_a_script" / "counter.py").write_text("count = 0")
    monkeypatch.syspath_prepend(above)
    outside = ProcessState(script.parent)
    states = [worker(script, rank) for rank in range(2)]
    counts = []
    for turn in range(2):
        for state in states:
            state.restore()
            if not turn:
                importlib.import_module("package_of_a_script.counter")
            else:
                counter = sys.modules["package_of_a_script"].counter
                counter.count += 1
                counts.append(counter.count)
            state.keep()
    outside.restore()
    for name in ("package_of_a_script", "package_of_a_script.counter"):
        sys.modules.pop(name, None)
    assert counts == ([1, 1] if own else [1, 2])


@pytest.mark.parametrize("place", ["lib/site-packages/other.py", "../elsewhere.py"])
def test_modules_from_elsewhere_are_shared(script: Path, place: str) -> None:
    state = worker(script)
    module = sys.modules["other_module"] = ModuleType("other_module")
    module.__file__ = os.path.normpath(script.parent / place)
    state.keep()
    assert sys.modules.pop("other_module") is module


def test_the_standard_library_is_shared_if_the_interpreter_is_below_the_scripts_folder() -> None:
    used = {name: sys.modules[name] for name in ("os", "random", "signal", "threading")}
    outside = ProcessState(Path(os.__file__).parents[2])  # as of a script in the home directory
    kept = {name: sys.modules.get(name) for name in used}
    outside.restore()
    assert kept == used


# -- script guards -----------------------------------------------------------------------------------------------------


DATA = [torch.tensor(float(number)) for number in range(6)]


def test_nothing_forks() -> None:
    said: list[str] = []
    with guarded(said.append):
        loaders = [
            DataLoader(DATA, batch_size=2, num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=9),
            DataLoader(DATA, 2, False, None, None, 2),  # type: ignore[arg-type]
            DataLoader(DATA, batch_size=2),
        ]
        assert [loader.num_workers for loader in loaders] == [0, 0, 0]
        assert [[batch.tolist() for batch in loader] for loader in loaders] == 3 * [[[0, 1], [2, 3], [4, 5]]]
    assert len(said) == 2
    assert "requests 2 processes" in said[0]
    assert DataLoader(DATA, num_workers=1).num_workers == 1


def test_no_signal_is_handled() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)
    with guarded(said.append):
        assert signal.signal(signal.SIGUSR1, lambda *_: None) is before
    assert signal.getsignal(signal.SIGUSR1) is before
    assert "SIGUSR1 is ignored" in said[0]


def test_no_process_group_is_made() -> None:
    begin = torch.distributed.init_process_group
    with guarded(lambda text: None), pytest.raises(SimulationError, match=r"uses torch\.distributed directly"):
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    assert torch.distributed.init_process_group is begin


# -- routed output -----------------------------------------------------------------------------------------------------


def test_a_thread_with_a_sink_prints_there(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [io.StringIO(), io.StringIO()]

    def work(output: io.StringIO) -> None:
        sink.set(output)
        print("mine")
        sys.stderr.write("too")

    before = sys.stdout
    with routed():
        threads = [threading.Thread(target=copy_context().run, args=(work, output)) for output in outputs]
        for thread in threads:
            thread.start()
            thread.join()
        print("the process's")
        assert sys.stdout.fileno is not None
    assert [output.getvalue() for output in outputs] == ["mine\ntoo", "mine\ntoo"]
    assert capsys.readouterr().out == "the process's\n"
    assert sys.stdout is before


# -- baton -------------------------------------------------------------------------------------------------------------


def test_one_at_a_time_and_nobody_is_left_out(tmp_path: Path) -> None:
    baton, inside, most, runs = Baton(ProcessState(tmp_path)), 0, 0, [0] * 5
    state = ProcessState(tmp_path)

    def work(number: int) -> None:
        nonlocal inside, most
        for _ in range(50):
            baton.take(state)
            inside += 1
            most = max(most, inside)
            runs[number] += 1
            inside -= 1
            baton.give()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (runs, most, inside) == ([50] * 5, 1, 0)


def test_a_recipe_that_came_first_has_it_first(tmp_path: Path) -> None:
    baton, order = Baton(ProcessState(tmp_path)), list[int]()
    state = ProcessState(tmp_path)
    baton.take(state)

    def work(number: int) -> None:
        baton.take(state)
        order.append(number)
        baton.give()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for waiting, thread in enumerate(threads, 1):
        thread.start()
        while len(baton._line) < waiting:
            pass
    baton.give()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]
