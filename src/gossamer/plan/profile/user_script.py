"""User scripts: runs a script in this process as `python script.py` would, with another recipe."""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.errors import AttachError
from gossamer.events import Attached, Event, subscribe


class _Seen(BaseException):
    """Ends a script at attach. Not an Exception, so that the script's handlers do not catch it."""


def attached_by(script: Path, arguments: Sequence[str], recipe: Recipe) -> Attached:
    """Run a script in this process until it attaches, with `recipe` instead of its own; nothing is sent."""
    seen: list[Attached] = []
    how = ""

    def listen(event: Event) -> None:
        if isinstance(event, Attached):
            seen.append(event)
            raise _Seen

    unsubscribe = subscribe(listen)
    try:
        with redirect_stdout(sys.stderr):
            run_as_main(script, arguments, recipe)
    except _Seen:
        pass
    except SystemExit as end:
        how = f" by sys.exit({end.code!r})" if isinstance(end.code, str) else ""
    finally:
        unsubscribe()
        gc.collect()  # else a simulated worker may collect the session, and wait for its thread within a lock
    if not seen:
        raise AttachError(
            f"{script} ended{how} before it called gossamer.attach, so there is no model to explain. Pass the "
            "arguments of a training after its name, or a size instead of it: --parameters 10000000."
        )
    return seen[0]


def run_as_main(script: Path, arguments: Sequence[str], recipe: Recipe | str) -> None:
    """Run a script as `python script.py` would (its arguments, its folder first in sys.path), with the recipe.

    A recipe as text is parsed by `attach`, so it may contain terms that the script registers.
    """
    argv, path, environment, folder = sys.argv, sys.path, dict(os.environ), os.getcwd()
    sys.argv = [str(script), *arguments]
    sys.path = [str(script.resolve().parent), *path]
    os.environ |= {
        "GOSSAMER_RECIPE": str(recipe),
        "GOSSAMER_RECORD": "",
        "GOSSAMER_LOG_TO": "",
    }  # profiling is not a run
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path = argv, path
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
