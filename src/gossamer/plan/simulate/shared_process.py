"""Shared process: several workers run user code in one process, one at a time.

Each has its own random states, environment, modules and output; the baton decides which one runs. What a script may do
only in a process of its own (fork, handle signals, make process groups) is refused.
"""

from __future__ import annotations

import inspect
import os
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import numpy as np
import torch
from torch.utils.data import DataLoader

from gossamer.errors import GossamerError

FOREIGN = {"site-packages", "dist-packages"}  # below the script's folder, as where it holds an environment
OWN_PACKAGE = __name__.partition(".")[0]


class ProcessState:
    """One worker's, or the one that was there before."""

    def __init__(self, folder: Path) -> None:
        """The process as it is now. folder: modules below it are this state's own."""
        self._prefix = f"{folder}{os.sep}"
        self._shared: set[str] = set()  # modules that are not
        self.keep()

    @classmethod
    def of_worker(
        cls, script: Path, arguments: Sequence[str], environment: Mapping[str, str | None], seed: int
    ) -> ProcessState:
        """Of a process in which `python script arguments...` begins; None takes a variable away.

        seed: of what the interpreter would seed by chance; torch begins with its own default seed.
        """
        state = cls(script.resolve().parent)
        state.main = ModuleType("__main__")
        vars(state.main).update(__file__=str(script), __builtins__=__builtins__)
        state.arguments = [str(script), *arguments]
        state.path = [str(script.resolve().parent), *state.path]
        state.environment = {
            name: text for name, text in {**state.environment, **environment}.items() if text is not None
        }
        state.random = (
            torch.Generator().get_state(),
            random.Random(seed).getstate(),
            np.random.RandomState(seed).get_state(),
        )
        return state

    def keep(self) -> None:
        """Remember the process as it is."""
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.dtype, self.directory = torch.get_default_dtype(), os.getcwd()
        self.environment: Mapping[str, str] = dict(os.environ)
        self.arguments, self.path, self.main = sys.argv, sys.path, sys.modules["__main__"]
        self._modules = {name: sys.modules.pop(name) for name in self._own_modules()}

    def restore(self) -> None:
        """Make the process what it was at `keep`."""
        torch_state, python_state, numpy_state = self.random
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_default_dtype(self.dtype)
        if os.getcwd() != self.directory:
            os.chdir(self.directory)
        _set_environment(self.environment)
        sys.argv, sys.path, sys.modules["__main__"] = self.arguments, self.path, self.main
        sys.modules.update(self._modules)

    def _own_modules(self) -> list[str]:
        own = [name for name in sys.modules.keys() - self._shared if self._is_own(name)]
        self._shared |= sys.modules.keys() - {*own}
        return own

    def _is_own(self, name: str) -> bool:
        file = getattr(sys.modules[name], "__file__", None)
        if not isinstance(file, str) or not file.startswith(self._prefix):
            return False
        return name.partition(".")[0] not in (OWN_PACKAGE, "__main__") and FOREIGN.isdisjoint(Path(file).parts)


def _set_environment(wanted: Mapping[str, str]) -> None:
    now = dict(os.environ)
    for name in now.keys() - wanted.keys():
        del os.environ[name]
    for name, text in wanted.items():
        if now.get(name) != text:
            os.environ[name] = text


# -- what a script may not do ------------------------------------------------------------------------------------------


Say = Callable[[str], None]
OF_LOADING_PROCESSES = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


class SimulationError(GossamerError):
    """A script, or a recipe, that cannot be simulated."""


@contextmanager
def guarded(say: Say) -> Iterator[None]:
    """Within the block scripts neither fork, nor handle signals, nor make process groups. say: tells the user."""
    with (
        _replaced(DataLoader, "__init__", _without_workers(say)),
        _replaced(signal, "signal", _unheard(say)),
        _replaced(torch.distributed, "init_process_group", _refused),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _without_workers(say: Say) -> Callable[..., None]:
    begin = DataLoader.__init__

    @wraps(begin)
    def plain(*args: Any, **options: Any) -> None:
        called = inspect.signature(begin).bind(*args, **options)
        if called.arguments.get("num_workers"):
            say(
                f"a DataLoader asks for {called.arguments['num_workers']} processes, which would be copies of a "
                "process with many threads, so it loads in its worker's own thread (num_workers=0); what its "
                "transforms draw by chance differs"
            )
            for name in OF_LOADING_PROCESSES:
                called.arguments.pop(name, None)
        begin(*called.args, **called.kwargs)

    return plain


def _unheard(say: Say) -> Callable[[int, Any], Any]:
    def unheard(number: int, handler: Any) -> Any:
        say(f"the script's handler of {signal.Signals(number).name} is left out: the process is not its own")
        return signal.getsignal(number)

    return unheard


def _refused(*args: Any, **options: Any) -> None:
    raise SimulationError(
        "the script uses torch.distributed directly, and virtual workers have no process group: what it sends would "
        "not be simulated. Leave communication to gossamer.attach, gossamer.mean and gossamer.gather, or train by "
        "gossamer run --network SPEC"
    )


# -- output ------------------------------------------------------------------------------------------------------------


#: Of the running thread, and of communication threads that it makes; None: as before.
sink: ContextVar[TextIO | None] = ContextVar("gossamer_sink", default=None)


class RoutedStream:
    """Stands in for a standard stream: everything is the running worker's own, or else that stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(sink.get() or self._stream, name)


@contextmanager
def routed() -> Iterator[None]:
    """Within the block standard output and errors of threads that have a sink go there."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (RoutedStream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


# -- one worker at a time ----------------------------------------------------------------------------------------------


class Baton:
    """Who holds it runs, and finds the process in a state of its own. `outside`: the state while nobody holds it."""

    def __init__(self, outside: ProcessState) -> None:
        self._outside = self._installed = outside
        self._lock, self._line = threading.Lock(), deque[threading.Lock]()
        self._held = False

    def take(self, state: ProcessState) -> None:
        """Wait in line for it."""
        granted = threading.Lock()
        granted.acquire()
        with self._lock:
            if not self._held:
                self._held = True
                granted.release()
            else:
                self._line.append(granted)
        granted.acquire()
        self._install(state)

    def give(self) -> None:
        """Let the next in line have it. By the thread that holds it."""
        with self._lock:
            self._held = bool(self._line)
            if self._line:
                self._line.popleft().release()

    def lay_down(self) -> None:
        """Nobody takes it for a while: the process is as it was before."""
        self.take(self._outside)
        self.give()

    def _install(self, state: ProcessState) -> None:
        if state is not self._installed:
            self._installed.keep()
            self._installed = state
            state.restore()
