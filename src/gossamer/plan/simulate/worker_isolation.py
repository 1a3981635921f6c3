"""Worker isolation: several workers run user code in one process, one at a time.

Each has its own random states, environment, modules and output; the baton selects the running one. Actions that need a
separate process (fork, signal handlers, process groups) are refused.
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
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import numpy as np
import torch
from torch.utils.data import DataLoader

from gossamer.comm.runtime.uncaught_errors import STANDARD_LIBRARY
from gossamer.errors import GossamerError

FOREIGN = {"site-packages", "dist-packages"}  # below the script's folder, if it contains an environment
OWN_PACKAGE = __name__.partition(".")[0]


class ProcessState:
    """Process state of one worker, or the original one."""

    def __init__(self, folder: Path) -> None:
        """The current process state. folder: modules below it belong to this state."""
        self._prefix = f"{folder}{os.sep}"
        self._shared: set[str] = set()  # modules that do not belong to it
        self.keep()

    @classmethod
    def of_worker(
        cls, script: Path, arguments: Sequence[str], environment: Mapping[str, str | None], seed: int
    ) -> ProcessState:
        """State of a process in which `python script arguments...` begins; None removes a variable.

        seed: for generators that the interpreter would seed randomly; torch begins with its default seed.
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
        """Save the current process state."""
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.dtype, self.directory = torch.get_default_dtype(), os.getcwd()
        self.environment: Mapping[str, str] = dict(os.environ)
        self.arguments, self.path, self.main = sys.argv, sys.path, sys.modules["__main__"]
        self._modules = {name: sys.modules.pop(name) for name in self._own_modules()}

    def restore(self) -> None:
        """Restore the state of `keep`."""
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
        added = [name for name in sys.modules if name not in self._shared]
        own = [name for name in added if self._is_own(name)]
        self._shared.update(added)
        self._shared.difference_update(own)
        return own

    def _is_own(self, name: str) -> bool:
        file = _place(sys.modules[name])
        if not isinstance(file, str) or not file.startswith(self._prefix) or file.startswith(STANDARD_LIBRARY):
            return False
        return name.partition(".")[0] not in (OWN_PACKAGE, "__main__") and FOREIGN.isdisjoint(Path(file).parts)


def _place(module: ModuleType) -> object:
    """The file of a module; of a package without __init__.py its first folder."""
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    if file is None and isinstance(spec, ModuleSpec):
        return next(iter(spec.submodule_search_locations or ()), None)
    return file


def _set_environment(wanted: Mapping[str, str]) -> None:
    now = dict(os.environ)
    for name in now.keys() - wanted.keys():
        del os.environ[name]
    for name, text in wanted.items():
        if now.get(name) != text:
            os.environ[name] = text


# -- refused actions ---------------------------------------------------------------------------------------------------


ShowText = Callable[[str], None]
OF_LOADING_PROCESSES = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


class SimulationError(GossamerError):
    """A script, or a recipe, that cannot be simulated."""


@contextmanager
def guarded(print_text: ShowText) -> Iterator[None]:
    """Context manager: scripts cannot fork, handle signals, or create process groups. `print_text`: shows a message."""
    with (
        _replaced(DataLoader, "__init__", _without_workers(print_text)),
        _replaced(signal, "signal", _unheard(print_text)),
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


def _without_workers(print_text: ShowText) -> Callable[..., None]:
    begin = DataLoader.__init__

    @wraps(begin)
    def plain(*args: Any, **options: Any) -> None:
        called = inspect.signature(begin).bind(*args, **options)
        if called.arguments.get("num_workers"):
            print_text(
                f"a DataLoader requests {called.arguments['num_workers']} processes, which would be copies of a "
                "process with many threads, so it loads in its worker's own thread (num_workers=0); random "
                "transforms differ"
            )
            for name in OF_LOADING_PROCESSES:
                called.arguments.pop(name, None)
        begin(*called.args, **called.kwargs)

    return plain


def _unheard(print_text: ShowText) -> Callable[[int, Any], Any]:
    def unheard(number: int, handler: Any) -> Any:
        print_text(f"the script's handler of {signal.Signals(number).name} is ignored: the process is shared")
        return signal.getsignal(number)

    return unheard


def _refused(*args: Any, **options: Any) -> None:
    raise SimulationError(
        "the script uses torch.distributed directly, and virtual workers have no process group, so its communication "
        "would not be simulated. Use gossamer.attach, gossamer.mean and gossamer.gather for communication, or train by "
        "gossamer run --network SPEC"
    )


# -- output ------------------------------------------------------------------------------------------------------------


#: Sink of the running thread, and of its communication threads; None for the original stream.
sink: ContextVar[TextIO | None] = ContextVar("gossamer_sink", default=None)


class RoutedStream:
    """Replaces a standard stream: output goes to the running worker's sink, or else to the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(sink.get() or self._stream, name)


@contextmanager
def routed() -> Iterator[None]:
    """Context manager: standard output and errors of threads with a sink go to it."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (RoutedStream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


# -- one worker at a time ----------------------------------------------------------------------------------------------


class Baton:
    """The worker that holds the baton runs, in its own process state. `outside`: the state while it is free."""

    def __init__(self, outside: ProcessState) -> None:
        self._outside = self._installed = outside
        self._lock, self._line = threading.Lock(), deque[threading.Lock]()
        self._held = False

    def take(self, state: ProcessState) -> None:
        """Wait for the baton, in order of arrival."""
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
        """Pass the baton to the next in line. Called by the thread that holds it."""
        with self._lock:
            self._held = bool(self._line)
            if self._line:
                self._line.popleft().release()

    def retire(self) -> None:
        """Release the baton and restore the original process state."""
        self.take(self._outside)
        self.give()

    def _install(self, state: ProcessState) -> None:
        if state is not self._installed:
            self._installed.keep()
            self._installed = state
            state.restore()
