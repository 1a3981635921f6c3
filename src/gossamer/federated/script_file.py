"""Script file: the functions that a user's script marks as parts of a federation."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gossamer.errors import LoopError
from gossamer.federated.client.functions import MARK, ClientFunction

RUN_NAME = "__gossamer_federated__"  # of the script's module: `if __name__ == "__main__"` does not run


@dataclass(frozen=True, kw_only=True)
class ScriptFile:
    """What a script says of a federation."""

    train: ClientFunction
    model: Callable[[], nn.Module]  # makes the model, alike on every machine
    evaluate: ClientFunction | None = None


def load_script(path: str | Path, arguments: Sequence[str] = ()) -> ScriptFile:
    """Run a script and find its marked functions. Its own sys.argv is `arguments`.

    Raises LoopError where one is missing or there are two of a kind.
    """
    before = sys.argv
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        names = runpy.run_path(str(path), run_name=RUN_NAME)
    finally:
        sys.argv = before
        del sys.path[0]
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
