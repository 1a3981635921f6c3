"""`gossamer checkpoint`: lists the checkpoints in a directory, and exports one in torch's format."""

from __future__ import annotations

from pathlib import Path

import click

from gossamer.base.units import bytes_text
from gossamer.cli.console import print_text, table, wide_console
from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.listing import CheckpointSummary, summaries

COLUMNS = ("step", "workers", "size", "run", "recipe", "state")


@click.command("checkpoint")
@click.option("--verify", is_flag=True, help="Read every file, and compare it with its digest.")
@click.option("--export-dcp", type=click.Path(path_type=Path), help="Export the newest for torch to this new folder.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
def checkpoint_command(directory: Path, verify: bool, export_dcp: Path | None) -> None:
    """Show the checkpoints in DIRECTORY: steps, workers, sizes, and whether each can be loaded.

    --export-dcp writes model and optimizer of the newest one as a checkpoint of torch.distributed.checkpoint, for
    torch's own tools.
    """
    found = summaries(directory, verify=verify)
    if not found:
        raise CheckpointError(f"{directory} contains no checkpoint. Name a directory that was passed to session.save.")
    shown = table(COLUMNS, left=("run", "recipe", "state"))
    for each in found:
        shown.add_row(*_row(each, directory))
    wide_console(200).print(shown)
    if export_dcp is not None:
        from gossamer.train.checkpoint import dcp  # imported late: it takes a second

        step = dcp.export(directory, export_dcp).step
        print_text(f"step {step} is in {export_dcp}, as model and optimizer of a torch.distributed.checkpoint.")


def _row(each: CheckpointSummary, directory: Path) -> tuple[str, ...]:
    aside = Path(each.directory).relative_to(directory)
    state = "complete" if each.complete else f"not complete: {each.problem}"
    where = f", in {aside}" if aside.parts else ""
    return str(each.step), str(each.world), bytes_text(each.nbytes), each.run, each.recipe, state + where
