"""Script file: the functions that a user's script marks as parts of a federation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gossamer.errors import LoopError
from gossamer.federated.client.functions import MARK, ClientFunction

OTHER_NAME = "__gossamer_federated__"  # of a script's module where another has the name of its file


@dataclass(frozen=True, kw_only=True)
class ScriptFile:
    """What a script says of a federation."""

    train: ClientFunction
    model: Callable[[], nn.Module]  # makes the model, alike on every machine
    evaluate: ClientFunction | None = None


def load_script(path: str | Path, arguments: Sequence[str] = ()) -> ScriptFile:
    """Import a script and find its marked functions. Its own sys.argv is `arguments`.

    Its folder stays on sys.path, and its module in sys.modules: functions import when they are called, and classes are
    pickled by where they are. Raises LoopError where one is missing or there are two of a kind.
    """
    names = vars(_imported(Path(path).resolve(), [str(path), *arguments]))
    found: dict[str, Any] = {}
    for value in {id(each): each for each in names.values() if callable(each)}.values():
        part = getattr(value, MARK, None)
        if part is not None and part in found:
            raise LoopError(f"{path} marks two functions with @gossamer.federated.{part}, and one is run. Keep one.")
        if part is not None:
            found[part] = value
    for part, example in (("client", "def train(model, round): ..."), ("model", "def make_model(): ...")):
        if part not in found:
            raise LoopError(
                f"{path} marks no function with @gossamer.federated.{part}, so there is nothing to federate. Write "
                f"it above the one that it is: @gossamer.federated.{part} {example}"
            )
    return ScriptFile(train=found["client"], model=found["model"], evaluate=found.get("evaluate"))


def _imported(path: Path, argv: list[str]) -> ModuleType:
    """As `import` would, whatever the file is called and however often it is loaded; it is never "__main__"."""
    module = ModuleType(_free_name(path))
    module.__file__ = str(path)
    if sys.path[:1] != [str(path.parent)]:
        sys.path.insert(0, str(path.parent))
    before, sys.argv = sys.argv, argv
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        sys.modules.pop(module.__name__, None)
        raise
    finally:
        sys.argv = before
    return module


def _free_name(path: Path) -> str:
    """The file's, unless another module has it: what it defines is then unpickled wherever it can be imported."""
    taken = sys.modules.get(path.stem)
    is_free = taken is None or getattr(taken, "__file__", None) == str(path)
    return path.stem if is_free and path.stem.isidentifier() else OTHER_NAME
