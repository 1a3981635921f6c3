"""Python runs this first in every process that the tests start, of which most do little more than to import torch.

Every torch.optim optimizer imports torch._dynamo, which takes as long as torch itself, to say "not to be compiled" of
its own functions. Where nothing is compiled those words do nothing, so a worker needs no compiler to hear them. Any
other word brings the real module. And the garbage collector looks at young objects only: to look at all that an import
makes, while it makes them, takes a sixth of its time and finds nothing.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"


class Later(ModuleType):
    """In the compiler's place until somebody asks for more than torch asks of it while nothing is compiled."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        return function

    @staticmethod
    def graph_break(message: str = "") -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # looked for in every module by inspect
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(import_module(NAME), name)


sys.modules[NAME] = Later(NAME)
gc.set_threshold(*gc.get_threshold()[:2], 10_000)
