"""`gossamer trace`: writes the operations of all ranks of a run on one clock, for Perfetto, Chrome or as a picture."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from gossamer.base.spans.record_format import SpanKind, Untraced
from gossamer.base.spans.step_range import StepRange
from gossamer.cli.console import echo
from gossamer.cli.options import check_parent, check_steps
from gossamer.errors import GossamerError
from gossamer.observe.trace import chrome
from gossamer.observe.trace.clock_alignment import describe
from gossamer.observe.trace.picture import draw
from gossamer.observe.trace.span_files import ProcessSpans, missing_ranks, newest_run, read_run
from gossamer.observe.trace.timeline import Timeline, build

WRITERS: Mapping[str, Callable[[Timeline], bytes]] = {
    ".json": chrome.pack,
    ".json.gz": lambda timeline: gzip.compress(chrome.pack(timeline), mtime=0),
    ".png": draw,
}
NOT_TRACED = {
    Untraced.SERVERS: "not traced: server processes; pushes and pulls of workers are traced",
    Untraced.PAIRS: "not traced: exchanges of two workers (Gossip('pairwise')), which run concurrently with training",
}
OPEN_IT = "Open it in https://ui.perfetto.dev, which reads it in the browser without uploading it."


def check_output(context: click.Context, option: click.Parameter, path: Path) -> Path:
    if path.suffix == ".pftrace":
        instead = path.with_suffix(".json.gz").name
        raise click.BadParameter(
            f"{path.name}: Perfetto's own format is no longer written. Write -o {instead}: ui.perfetto.dev opens it as "
            "well, and it is smaller"
        )
    if suffix(path) is None:
        raise click.BadParameter(f"{path.name} has no known format: end it with {', '.join(WRITERS)}")
    if path.exists():
        raise click.BadParameter(f"{path} exists and is not overwritten: name another file, or delete it")
    checked = check_parent(context, option, path)
    assert checked is not None
    return checked


def suffix(path: Path) -> str | None:
    return next((each for each in WRITERS if path.name.endswith(each) and path.name != each), None)


@click.command("trace")
@click.option("--steps", callback=check_steps, metavar="FIRST:LAST", help="Only these steps.  [default: all]")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=check_output,
    required=True,
    metavar="FILE",
    help=f"The format follows from its suffix: {', '.join(WRITERS)}.",
)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
def trace_command(run: Path, steps: StepRange | None, output: Path) -> None:
    """Write a trace of all ranks of RUN, on one clock.

    RUN is the folder of a run that was started with --trace. If machines have their own folders, copy their *.spans
    files into one.
    """
    found = read_run(run)
    processes = newest_run(found)
    timeline = build(processes, steps)
    content = WRITERS[str(suffix(output))](timeline)
    write(output, content)
    slices = sum(1 for _ in timeline.slices())
    echo(f"{output}: {len(timeline.processes)} processes, {slices} slices, {timeline.arrows} arrows")
    if (earlier := len(found) - len(processes)) > 0:
        echo(f"left out: {earlier} files of earlier runs in this folder")
    for line in (*describe(timeline.clocks, processes), *_lacks(processes)):
        echo(line)
    if output.suffix != ".png":
        echo(OPEN_IT)


def _lacks(processes: list[ProcessSpans]) -> list[str]:
    lines = []
    if missing := missing_ranks(processes):
        ranks = ", ".join(map(str, missing))
        lines.append(f"missing: ranks {ranks}, probably on other machines: copy their files into the same folder")
    found = {int(number) for each in processes for number in each.of(SpanKind.NOT_TRACED)["number"]}
    lines += [line for what, line in NOT_TRACED.items() if what in found]
    lines += [
        f"{each.path.name} is truncated, because its process was killed or its disk was full: all complete spans are "
        "shown"
        for each in processes
        if each.torn_bytes
    ]
    return lines


def write(output: Path, content: bytes) -> None:
    """Write the whole file or none of it. A file that exists by then is not replaced."""
    try:
        with output.open("xb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                output.unlink()
                raise
    except OSError as error:
        raise GossamerError(f"{output} could not be written ({error.strerror}): name another file") from None
