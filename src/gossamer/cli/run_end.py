"""End of a run: its record, table and picture; why it did not finish, and how to go on."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

import click

from gossamer.base.run_files import RunFiles, Stage
from gossamer.cli.console import say
from gossamer.cli.program import with_misplaced_options
from gossamer.events import Ended
from gossamer.launch.failure import Failure, Origin, Outcome
from gossamer.launch.job import Job
from gossamer.launch.process_logs import log_path
from gossamer.observe import record as records
from gossamer.observe.control_sequences import without_controls
from gossamer.observe.plot import plot
from gossamer.observe.terminal import Terminal

USAGE_ERROR = 2  # the exit code of argparse and click for unknown arguments
NEVER_ATTACHED = (
    "{script} never called gossamer.attach, so there are no numbers to show. Add this line before the "
    "training loop: session = gossamer.attach(model, optimizer)"
)
WITHOUT_SESSION = (
    "{script} ran without a session, so there are no numbers to show: they come from gossamer.attach(model, "
    "optimizer), which remote modules, pipeline boundaries and gossamer.ddp_hook do not need"
)
NOT_WRITTEN = (
    "the record could not be written to {file} ({reason}), so this table is all there is of it yet. What was logged is "
    "kept beside the logs; once there is room, `gossamer record {logs}` makes the record of it."
)
REMOVED = (
    "{logs} was removed while the run went on, and with it what its ranks had told, so there is no record of it. "
    "Training was not held up."
)


def report(
    job: Job,
    directory: Path,
    network: records.Record,
    ended: Ended,
    terminal: Terminal,
    json_file: Path | None,
    plot_file: Path | None,
) -> records.Record | None:
    """Write the run's record, draw its picture, and show its table; the record, where there is one."""
    if not directory.exists():
        terminal.note(REMOVED.format(logs=job.logs))
        return None
    ranks = records.read_ranks(directory)
    if not ranks:
        if ended == "finished":
            text = WITHOUT_SESSION if _communicated(job, directory) else NEVER_ATTACHED
            terminal.note(text.format(script=job.script))
        records.discard_logs(directory)
        return None
    record = records.merge(ranks, network, ended)
    kept = job.logs / "record.json"
    files = {"record": str(json_file or kept), "logs": str(job.logs)}
    try:
        for file in {kept, json_file or kept}:
            records.write(file, record)
        records.discard_logs(directory)
    except OSError as error:
        terminal.note(NOT_WRITTEN.format(file=files.pop("record"), reason=error.strerror, logs=job.logs))
    if plot_file is not None:
        plot([record], plot_file)
        files["picture"] = str(plot_file)
    terminal.table(record, files)
    return record


def _communicated(job: Job, directory: Path) -> bool:
    """Whether a worker of this machine used Gossamer without a session."""
    files, stages = RunFiles(directory), (Stage.OTHERWISE, Stage.CALLED)
    return any(files.has_ever_reached(stage, rank) for stage in stages for rank in job.local_ranks)


def explain_end(job: Job, outcome: Outcome, checkpoint: dict[str, object] | None) -> None:
    """Say why a run did not finish, and how to go on from its checkpoint, where there is one."""
    if outcome.failure is not None:
        _explain_failure(job, outcome.failure)
    elif outcome.signal is not None:
        say(f"\nStopped by {signal.Signals(outcome.signal).name}; all workers have ended.\nLogs: {job.logs}")
    elif outcome.resumable:
        say(f"\n{outcome.resumable}. The workers that were left have ended.\nLogs: {job.logs}", error=True)
        if checkpoint is None:
            say("No checkpoint was saved, so the same command begins anew: session.save(DIRECTORY) saves one.")
    say_how_to_go_on(checkpoint)


def say_how_to_go_on(checkpoint: dict[str, object] | None) -> None:
    if checkpoint is not None:
        where, step = checkpoint["directory"], checkpoint["step"]
        say(
            f"A checkpoint of step {step} is in {where}. A script that calls session.load({str(where)!r}) goes on from "
            "it when the same command is run again:"
        )
        click.echo(f"  {shlex.join(['gossamer', *sys.argv[1:]])}", err=True)


def _explain_failure(job: Job, failure: Failure) -> None:
    text = str(failure)
    if failure.origin is Origin.ENDED and failure.exit_code == USAGE_ERROR:
        text = with_misplaced_options(text, job.arguments)
    say(f"\n{without_controls(text)}", error=True)
    if failure.traceback:
        click.echo(f"\n{without_controls(failure.traceback)}", err=True)
    others = job.workers - 1
    if others:
        text = f"The other {others} workers were" if others > 1 else "The other worker was"
        say(f"{text} stopped, where still at work.")
    say(f"Log of rank {failure.rank}: {log_path(job.logs, failure.rank)}")
