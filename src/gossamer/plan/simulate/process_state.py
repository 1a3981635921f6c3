"""Process state: keeps and restores what a process has once, so that several workers in turn have one each.

Random states, the environment, the script's module and those it imports from its own folder, arguments, directory.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

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
