"""`gossamer run`: runs a script on several workers, records it, and explains a failure.

This module has the command with its options; run_training.py does the work, and imports torch.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from gossamer.algorithms.collectives import COLLECTIVES
from gossamer.base import system
from gossamer.cli.forecast_file import forecast_option
from gossamer.cli.options import (
    FiniteRange,
    WorkerCount,
    check_certificates,
    check_collective,
    check_congestion,
    check_notices,
    check_token,
    check_watch,
    elastic_options,
    emulation_option,
    first_workers,
    limit_options,
    log_to_option,
    machine_options,
    output_option,
    trace_options,
)
from gossamer.cli.program import program_argument
from gossamer.cli.recipe_options import check_session_recipe
from gossamer.launcher.fork_server import MAY_FORK, fork_server
from gossamer.launcher.job import Spawn, WorkerRange, spawn, threads_per_worker

THREADS = "OMP_NUM_THREADS"
WAYS = ", ".join(("auto", "engine", *COLLECTIVES))


def prepare_imports(context: click.Context, option: click.Parameter, workers: int | WorkerRange) -> int | WorkerRange:
    """Prepare this process to import torch for its workers, before other options are checked: torch reads the number of
    threads at its import, and the garbage collector would search through all that is imported."""
    if context.find_root().obj is MAY_FORK:
        gc.disable()
        if THREADS not in os.environ and "torch" not in sys.modules:
            os.environ[THREADS] = context.meta[THREADS] = threads_per_worker(first_workers(workers))
    return workers


@contextmanager
def worker_starter(context: click.Context, *, fork: bool) -> Iterator[Spawn]:
    """Context manager: a function that starts workers, by forks of this process if `fork`.

    The server of these forks begins as soon as torch is imported. It imports what workers need while this process
    imports what a launcher needs.
    """
    if fork and context.find_root().obj is MAY_FORK:
        import_module("torch")
        with fork_server("gossamer.cli.worker", os.environ.get(THREADS)) as begin:
            yield begin
    else:
        yield spawn


def end_imports(context: click.Context) -> None:
    """Undo `prepare_imports`."""
    if THREADS in context.meta:
        del os.environ[THREADS]  # of the workers only
    gc.enable()


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--workers",
    type=WorkerCount(),
    is_eager=True,
    callback=prepare_imports,
    default=2,
    show_default=True,
    metavar="N|MIN:MAX[:FIRST]",
    help="Workers on this machine. MIN:MAX[:FIRST]: an elastic run, which begins with FIRST or MAX workers.",
)
@click.option(
    "--servers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Parameter server processes; then a worker that a signal ends is lost alone. A worker that ends with an "
    "error or an exit code still ends the run. With --workers MIN:MAX for AsyncDiLoCo only.",
)
@click.option("--recipe", callback=check_session_recipe, help="The recipe; overrides the script's own.")
@click.option("--collective", callback=check_collective, help=f"All-reduce algorithm: {WAYS}.")
@click.option(
    "--congestion",
    metavar="NAME",
    callback=check_congestion,
    help="TCP congestion control of this machine's workers, such as bbr for long links that lose packets.",
)
@output_option("json", "Write the run's record as JSON.")
@output_option("plot", "Draw the run's curves (PNG).")
@log_to_option
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with one log file per rank.  [default: runs/TIME]",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Restarts of all workers; in elastic runs, with --servers or Gossip('pairwise'), of each lost worker.",
)
@click.option(
    "--grace-seconds",
    type=FiniteRange(0),
    default=30.0,
    show_default=True,
    help="Time for workers to save after Ctrl-C (KeyboardInterrupt in SCRIPT) or SIGTERM.",
)
@click.option(
    "--preemption-notice",
    metavar="aws|gce|azure|COMMAND",
    callback=check_notices,
    help="Stop as on Ctrl-C once this cloud announces that it takes the machine away, or once COMMAND ends with exit "
    "code 0.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    callback=check_token,
    help="The secret of servers and workers, mode 0600, the same on all machines.  [default: a new one]",
)
@click.option(
    "--tls",
    type=click.Path(path_type=Path),
    callback=check_certificates,
    help="Encrypt connections between workers and servers, but not the rendezvous and torch.distributed: a folder with "
    "cert.pem, key.pem, ca.pem.",
)
@click.option("--as-horovod", is_flag=True, help="In SCRIPT, `import horovod` imports gossamer.horovod.")
@click.option("--watch", is_flag=True, callback=check_watch, help="Serve a page of this run, and print its link.")
@forecast_option
@emulation_option
@click.option(
    "--fault",
    "fault_texts",
    metavar="FAULT",
    multiple=True,
    help='Inject a fault, such as "cut(1, at=10, for_seconds=5)"; may be repeated.',
)
@elastic_options
@limit_options
@trace_options
@click.option("--dry-run", is_flag=True, help="Print the plan of the run, and start nothing.")
@machine_options
@program_argument
def run(**options: Any) -> None:
    """Run SCRIPT on several workers. Arguments after SCRIPT are passed to it. For a module write -m package.train.

    With --network, each worker and server has its own host on an emulated network. Faults (cut, slow, stop, kill) name
    a host or worker by number, servers after the workers, and a time in seconds after training began.

    With --workers MIN:MAX, workers can fail and join while the others train; other machines join with --join.
    `gossamer resize` changes MAX. With fewer than MIN workers, training waits for GOSSAMER_TIMEOUT; then the run ends
    with exit code 75, and can be resumed.
    """
    context = click.get_current_context()
    restarts = options["network_text"] is not None and not system.is_root()  # in a user namespace, to emulate hosts
    with worker_starter(context, fork=not options["dry_run"] and not restarts) as begin:
        from gossamer.cli.run_training import run_training

        end_imports(context)
        sys.exit(run_training(**options, begin=begin))
