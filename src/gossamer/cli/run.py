"""`gossamer run`: runs a script on several workers, records it, and explains a failure.

This is the command with its options; run_training.py does the work, and imports torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from gossamer.algorithms.collectives import COLLECTIVES
from gossamer.cli.foretold import foretold_option
from gossamer.cli.options import (
    WorkerCount,
    check_certificates,
    check_collective,
    check_session_recipe,
    check_token,
    check_watch,
    emulation_option,
    join_option,
    listen_option,
    log_to_option,
    machine_options,
    output_option,
    trace_options,
)
from gossamer.cli.program import program_argument

WAYS = ", ".join(("auto", "engine", *COLLECTIVES))


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--workers",
    type=WorkerCount(),
    default=2,
    show_default=True,
    metavar="N|MIN:MAX[:FIRST]",
    help="Workers on this machine. MIN:MAX: an elastic run, whose workers come and go; it begins with FIRST, or MAX.",
)
@click.option(
    "--servers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Processes of their own that hold the parameters; a worker that a signal ends is then lost alone. One that "
    "ends with an error or an exit code still ends all.",
)
@click.option("--recipe", callback=check_session_recipe, help="How the workers talk; beats the script's own.")
@click.option("--collective", callback=check_collective, help=f"How means are taken: {WAYS}.")
@output_option("json", "Write the run's record there.")
@output_option("plot", "Draw the run's curves (PNG).")
@log_to_option
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="One log file a rank.  [default: runs/TIME]",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Restart all workers so often; in elastic runs, with --servers or Gossip('pairwise'), each lost one alone.",
)
@click.option(
    "--grace-seconds",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="How long workers may save after Ctrl-C (KeyboardInterrupt in SCRIPT) or SIGTERM.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    callback=check_token,
    help="The secret of servers and workers, mode 0600; several machines need the same.  [default: a new one]",
)
@click.option(
    "--tls",
    type=click.Path(path_type=Path),
    callback=check_certificates,
    help="Encrypt what workers and servers tell each other: a folder with cert.pem, key.pem, ca.pem.",
)
@click.option("--as-horovod", is_flag=True, help="In SCRIPT, `import horovod` finds gossamer.horovod.")
@click.option("--watch", is_flag=True, callback=check_watch, help="Serve a page of this run, and print its link.")
@foretold_option
@emulation_option
@click.option("--fault", "fault_texts", metavar="FAULT", multiple=True, help='Such as "cut(1, at=10, for_seconds=5)".')
@join_option
@listen_option
@trace_options
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@machine_options
@program_argument
def run(**options: Any) -> None:
    """Run SCRIPT on several workers. What follows SCRIPT belongs to it. For a module write -m package.train.

    With --network each worker and server has a host of its own on an emulated network. Faults (cut, slow, stop, kill)
    happen to hosts and workers by number, servers after the workers, in seconds after training began.

    With --workers MIN:MAX workers may be lost and join while the others train on: from other machines by --join.
    `gossamer resize` changes MAX. Fewer than MIN wait for others as long as GOSSAMER_TIMEOUT says; then the run ends
    with exit code 75, and may be resumed.
    """
    from gossamer.cli.run_training import run_training

    sys.exit(run_training(**options))
