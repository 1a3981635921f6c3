"""What every test runs with; and tests that measure or build networks share one worker of `pytest --dist loadgroup`."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support.forked_programs import end_servers, forked_programs

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing on a busy one
settings.load_profile("any machine")

if not torch.cuda.is_available():  # read when a kernel is defined, so before anything imports one
    os.environ.setdefault("TRITON_INTERPRET", "1")

MAY_UNPICKLE = {
    "gossamer.train.checkpoint.dcp",  # torch's own format, and only classes of that format
    "gossamer.cli.launch",  # functions and results of this user's own processes, in a private folder
}


def refuse_unpickling(event: str, arguments: tuple[object, ...]) -> None:
    """Promise 16, over the whole suite: whatever of Gossamer unpickles fails the test that it happens in."""
    if event == "pickle.find_class":
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] == "gossamer" and caller not in MAY_UNPICKLE:
            raise AssertionError(f"{caller} unpickles {arguments}")


sys.addaudithook(refuse_unpickling)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script's `pytest &`; what tests start would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTS_PROCESSES, IN_TURN = ("processes", "namespaces"), ("measures", "namespaces")
NEW_PROGRAMS = ("new_programs", "measures")
EAGER = str(Path(__file__).parent / "eager")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors are not worth waking a second one, and beside other tests each turn would wait for it."""
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plain", action="store_true", help="processes that tests start import the real torch._dynamo")


def marked(item: pytest.Item, names: Iterable[str]) -> bool:
    return any(item.get_closest_marker(name) for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Tests and what they import stay: to look through them for garbage takes as long as to collect them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So does what a file of tests leaves: sources and tests that call gc.collect() would look through all of it."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" not in config.option.markexpr and not config.getoption("plain"):  # both once a day
        nightly = [item for item in items if marked(item, ["nightly"])]
        items[:] = [item for item in items if not marked(item, ["nightly"])]
        config.hook.pytest_deselected(items=nightly)
    no_gpu = pytest.mark.skip(reason="torch.cuda.is_available() is False: no GPU, or a torch built for processors")
    for item in items:
        if marked(item, ["gpu"]) and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if marked(item, IN_TURN):
            if not any(name in item.path.read_text() for name in IN_TURN):
                raise pytest.UsageError(
                    f"{item.nodeid} runs in turn, and make test looks for such tests in files that say so"
                )
            item.add_marker(pytest.mark.xdist_group("in turn"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Processes that a test starts find eager/sitecustomize.py; this one, whose tests compile models, does not.

    Most of them are forks of a process that has imported torch, which computes with one thread.
    """
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if marked(item, STARTS_PROCESSES) and not item.config.getoption("plain"):
            patch.setenv("PYTHONPATH", EAGER, prepend=os.pathsep)
            if not marked(item, NEW_PROGRAMS):
                patch.setenv("OMP_NUM_THREADS", "1")
                stack.enter_context(forked_programs())
        return (yield)


def pytest_unconfigure() -> None:
    end_servers()
