"""gossamer.launch: calls a function on several workers, from a notebook cell or a script.

As a program (`python -m gossamer.cli.launch FOLDER`) it is the worker's side: it calls the function and stores its
result. The function and its results are pickles in a private folder of this user and never pass through a network.
"""

from __future__ import annotations

import html
import io
import linecache
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gossamer.base import bounded_file
from gossamer.base.run_files import RUN_DIRECTORY
from gossamer.errors import GossamerError, WorkerFailed, require

if TYPE_CHECKING:
    from gossamer.algorithms.recipes.recipe import Recipe
    from gossamer.launcher.failure import Outcome
    from gossamer.launcher.job import Job

FUNCTION = "function.pickle"
STATUS_SECONDS = 0.25  # between two updates of the line in a notebook cell
NO_CLOUDPICKLE = (
    "gossamer.launch needs cloudpickle to send a function of a notebook or a script to its workers, and "
    'cloudpickle is not installed. Write: pip install "gossamer[notebook]"'
)
NESTED = (
    "gossamer.launch was called in a worker of `gossamer run` or of another gossamer.launch. The workers run already: "
    "call the function itself, or start the script with `python`"
)

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    *args: Any,
    workers: int = 2,
    recipe: str | Recipe | None = None,
    network: str | None = None,
    logs: str | Path | None = None,
    max_restarts: int = 0,
    grace_seconds: float = 30.0,
) -> list[Result]:
    """Call `function(*args)` on several workers of this machine, and return its result on each rank.

    It starts, watches and records the workers as `gossamer run` does. Output and progress appear in the notebook cell
    or terminal. The function may be defined in a notebook cell or in a script.

    Args:
        function: called once on each worker. It joins the others with gossamer.init().
        *args: its arguments, with the same values on each worker.
        workers: number of worker processes.
        recipe: overrides the recipe of gossamer.attach in the function. None for the function's own.
        network: an emulated network, `RATE[,ROUND_TRIP][,loss=P]`, such as "20mbit,20ms". It needs
            Linux and root; elsewhere it is only approximated.
        logs: folder for the record and the log of each rank. None for runs/TIME.
        max_restarts: restarts of all workers after a failure.
        grace_seconds: time for workers to save after an interrupt.

    Returns:
        The results in order of rank. None for a rank whose loss the recipe tolerates.

    Raises:
        WorkerFailed: a worker failed first; the message has its rank, error and traceback.
        KeyboardInterrupt: after Ctrl-C, or an interrupt of the notebook's kernel, when all workers have ended.
        RecipeError: the recipe is invalid.
        GossamerError: cloudpickle is missing, or the workers cannot be started from this process.
        TypeError, ValueError: an argument is invalid.

    Example:
        def train(learning_rate):
            world = gossamer.init()
            ...  # the training loop
            return world.rank

        ranks = gossamer.launch(train, 0.1, workers=2)  # [0, 1]
    """
    if not callable(function):
        raise TypeError(
            f"launch needs a function, got {type(function).__name__}. Write: gossamer.launch(train, workers=2)"
        )
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise TypeError(f"workers must be an integer, got {workers!r}. Write: gossamer.launch(train, workers=2)")
    require(workers >= 1, f"workers must be at least 1, got {workers}. Write: gossamer.launch(train, workers=2)")
    if RUN_DIRECTORY in os.environ:
        raise GossamerError(NESTED)
    if threading.current_thread() is not threading.main_thread():
        raise GossamerError(
            "gossamer.launch was called in a thread, but only the main thread can handle Ctrl-C. Call it there"
        )
    with tempfile.TemporaryDirectory(prefix="gossamer-launch-") as name:  # mode 0700
        folder = Path(name)
        _store_call(folder, function, args)
        try:
            _run(folder, function, workers, recipe, network, logs, max_restarts, grace_seconds)
        except click.ClickException as error:
            raise GossamerError(error.format_message()) from None
        return [_result(folder, rank) for rank in range(workers)]


def _store_call(folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write the call, and all that a worker needs to read it: import path, and the source of notebook cells."""
    if find_spec("cloudpickle") is None:
        raise GossamerError(NO_CLOUDPICKLE)
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    try:
        call = _pickled((function, args))
    except Exception as error:
        raise TypeError(
            f"{_name(function)} or its arguments cannot be sent to the workers ({type(error).__name__}: {error}). "
            "Create files, locks, sockets and generators inside the function"
        ) from None
    (folder / FUNCTION).write_bytes(pickle.dumps((sys.path, cells, call)))


def _pickled(value: object) -> bytes:
    """A pickle that has functions and classes of a notebook or script by value."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            """Keep the identity of dataclasses.MISSING, to which fields of a dataclass are compared."""
            return "MISSING" if value is MISSING else super().reducer_override(value)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _run(
    folder: Path,
    function: Callable[..., Any],
    workers: int,
    recipe: str | Recipe | None,
    network_text: str | None,
    logs: str | Path | None,
    max_restarts: int,
    grace_seconds: float,
) -> None:
    """Run the workers to their end. Raises for every end but success."""
    from gossamer.cli.log_folder import new_logs
    from gossamer.cli.run_training import Surroundings, run_job
    from gossamer.comm.network import read_network
    from gossamer.launcher.job import Job
    from gossamer.plan.emulation import plan

    network = None if network_text is None else read_network(network_text, workers)
    planned = None if network is None else plan(network)
    if planned is not None and planned.reenters:
        raise GossamerError(
            f"network={network_text!r} needs root in a notebook. Write the function to a script, and start it with: "
            f"gossamer run --network {network_text} train.py"
        )
    job = Job(
        script=Path(__spec__.name),
        as_module=True,
        arguments=(str(folder),),
        name=_name(function),
        workers=workers,
        recipe=_recipe_text(recipe),
        max_restarts=max_restarts,
        grace_seconds=grace_seconds,
        logs=new_logs() if logs is None else Path(logs),
        worker_module="gossamer.cli.worker",
        keeps_standby=True,
    )
    outcomes: list[Outcome] = []

    def keep(job: Job, outcome: Outcome, checkpoint: object) -> None:
        outcomes.append(outcome)

    run_job(job, Surroundings(network, planned), explain=keep, status=_cell_status())
    for outcome in outcomes:
        _raise(job, outcome)


def _recipe_text(recipe: str | Recipe | None) -> str | None:
    from gossamer.algorithms.recipes.recipe import resolve
    from gossamer.cli.recipe_options import session_recipe
    from gossamer.errors import RecipeError

    if recipe is None:
        return None
    try:
        return session_recipe(recipe if isinstance(recipe, str) else repr(resolve(recipe)))
    except click.BadParameter as error:
        raise RecipeError(error.message) from None


def _raise(job: Job, outcome: Outcome) -> None:
    """Raise the error of a run that did not finish."""
    import signal

    from gossamer.launcher.process_logs import log_path

    if outcome.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.signal is not None:
        raise SystemExit(outcome.exit_code)
    if (failure := outcome.failure) is not None:
        traceback = f"\n\n{failure.traceback.rstrip()}" if failure.traceback else ""
        place = f"\n\nLog of rank {failure.rank}: {log_path(job.logs, failure.rank)}"
        raise WorkerFailed(f"{failure}{traceback}{place}", rank=failure.rank, traceback=failure.traceback)


def _result(folder: Path, rank: int) -> Any:
    path = _result_path(folder, rank)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.pickle"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _cell_status() -> Callable[[str], None] | None:
    """Shows the progress in one line of a notebook cell; None outside of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import HTML, display

    handle = display(HTML("<pre>starting</pre>"), display_id=True)
    shown, due = "", 0.0

    def show(text: str) -> None:
        nonlocal shown, due
        if text != shown and time.monotonic() >= due:
            shown, due = text, time.monotonic() + STATUS_SECONDS
            handle.update(HTML(f"<pre>{html.escape(text)}</pre>"))

    return show


# -- in the worker -----------------------------------------------------------------------------------------------------


def call(folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Call the function of the folder on this rank, and store its result there."""
    path, cells, stored = pickle.loads((folder / FUNCTION).read_bytes())
    sys.path[:] = path
    linecache.cache.update(cells)  # tracebacks show the lines of notebook cells
    function, args = pickle.loads(stored)
    result = function(*args)
    try:
        content = _pickled(result)
    except Exception as error:
        raise TypeError(
            f"the result of {_name(function)} is a {type(result).__name__}, which cannot be returned to the launcher "
            f"({type(error).__name__}: {error}). Return numbers, texts, tensors, or a state_dict()"
        ) from None
    bounded_file.write_whole(_result_path(folder, int(environment["RANK"])), content)


if __name__ == "__main__":
    call(Path(sys.argv[1]))
