"""`gossamer checkpoint`: lists what a directory of checkpoints holds, and writes it in torch's format."""

from __future__ import annotations

from pathlib import Path

import click

from gossamer.base.units import bytes_text
from gossamer.cli.console import say, table, wide_console
from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.listing import CheckpointSummary, summaries

COLUMNS = ("step", "workers", "size", "run", "recipe", "state")


@click.command("checkpoint")
@click.option("--verify", is_flag=True, help="Read every file, and compare it with its digest.")
@click.option("--export-dcp", type=click.Path(path_type=Path), help="Write the newest to this new folder, for torch.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
def checkpoint_command(directory: Path, verify: bool, export_dcp: Path | None) -> None:
    """Show the checkpoints in DIRECTORY: steps, workers, sizes, and which of them can be loaded.

    With --export-dcp the newest one's model and optimizer are written as a checkpoint of torch.distributed.checkpoint,
    which torch's own tools read.
    """
    found = summaries(directory, verify=verify)
    if not found:
        raise CheckpointError(f"{directory} holds no checkpoint. Name a directory that was given to session.save.")
    shown = table(COLUMNS, left=("run", "recipe", "state"))
    for each in found:
        shown.add_row(*_row(each, directory))
    wide_console(200).print(shown)
    if export_dcp is not None:
        from gossamer.train.checkpoint import dcp  # which takes torch a second to import

        step = dcp.export(directory, export_dcp).step
        say(f"step {step} is in {export_dcp}, as model and optimizer of a torch.distributed.checkpoint.")


def _row(each: CheckpointSummary, directory: Path) -> tuple[str, ...]:
    aside = Path(each.directory).relative_to(directory)
    state = "complete" if each.complete else f"not complete: {each.problem}"
    where = f", in {aside}" if aside.parts else ""
    return str(each.step), str(each.world), bytes_text(each.nbytes), each.run, each.recipe, state + where
