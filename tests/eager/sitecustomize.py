"""Python runs this first in every process that the tests start, of which most do little more than to import torch.

Every torch.optim optimizer imports torch._dynamo, which takes as long as torch itself, to say "not to be compiled" of
its own functions. Where nothing is compiled those words do nothing, so a worker needs no compiler to hear them. And
tensors without data, by which recipes are priced, import an algebra system to ask whether a truth is true: where sizes
are numbers, that is known. Any other word brings the real module.

The garbage collector looks at young objects only: to look at all that an import makes, while it makes them, takes a
sixth of its time and finds nothing. Nor does it look at all of that when the process ends, which takes as long again.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER, ALGEBRA, SHAPES = "torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes"


class Later(ModuleType):
    """In a module's place until somebody asks for more than torch asks of it while nothing is compiled."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (name != "__path__" or self.__name__ == SHAPES):  # which has no modules in it
            raise AttributeError(name)  # looked for in every module by inspect
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if self.__name__ == SHAPES and InPlaceOfShapes in sys.meta_path:
            sys.meta_path.remove(InPlaceOfShapes)
        return import_module(self.__name__)


class Compiler(Later):
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        return function or (lambda decorated: decorated)

    @staticmethod
    def graph_break(message: str = "") -> None:
        pass


class Algebra(Later):
    @property
    def Basic(self) -> type:  # noqa: N802
        """What nothing can be before the real module is there."""
        return Nothing if sys.modules.get(ALGEBRA) is self else self.real().Basic


class Nothing:
    pass


class Shapes(Later):
    """Of sizes that are numbers all is known; symbols are the real module's."""

    def __init__(self) -> None:
        super().__init__(SHAPES)
        for word in ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"):
            self.tell(word, lambda truth: truth)
        self.tell("guarding_hint_or_throw", lambda size: size)
        self.tell("has_guarding_hint", lambda size: True)
        self.tell("is_nested_int", lambda size: False)
        self.tell("sym_and", lambda *truths: all(truths))
        self.tell("sym_or", lambda *truths: any(truths))
        self.tell("sym_eq", lambda one, other: one == other)

    def tell(self, word: str, answer: Callable[..., Any]) -> None:
        def asked(*values: Any) -> Any:
            return answer(*values) if known(values) else getattr(self.real(), word)(*values)

        setattr(self, word, asked)


def known(value: Any) -> bool:
    return type(value) in (bool, int) or (isinstance(value, tuple) and all(map(known, value)))


class InPlaceOfShapes:
    """Finds them before the real ones, and lets the import system do all else."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, InPlaceOfShapes) if name == SHAPES else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return Shapes()

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


def leave_at_the_end() -> None:
    """As it is what remains; nanobind, of triton, counts that as leaks and says so."""
    if "triton" not in sys.modules:
        gc.freeze()


sys.modules |= {COMPILER: Compiler(COMPILER), ALGEBRA: Algebra(ALGEBRA)}
sys.meta_path.insert(0, InPlaceOfShapes)  # type: ignore[arg-type]
gc.set_threshold(*gc.get_threshold()[:2], 10_000)
atexit.register(leave_at_the_end)  # first, so that it runs after whatever else is to run at the end
