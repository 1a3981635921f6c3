"""`gossamer trace`: writes what all ranks of a run did on one clock, for Perfetto, Chrome's viewer or a page."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from gossamer.cli.console import echo
from gossamer.cli.options import check_parent
from gossamer.errors import GossamerError
from gossamer.session.operator_profile import PROFILED, read_ranks
from gossamer.trace import chrome, perfetto
from gossamer.trace.clock_alignment import describe
from gossamer.trace.picture import draw
from gossamer.trace.span_files import ProcessSpans, missing_ranks, read_run
from gossamer.trace.timeline import Timeline, build
from gossamer.tracing import active
from gossamer.tracing.record_format import SpanKind, Untraced
from gossamer.tracing.step_range import StepRange, read_steps

WRITERS: Mapping[str, Callable[[Timeline], bytes]] = {
    ".pftrace": perfetto.pack,
    ".json": chrome.pack,
    ".json.gz": lambda timeline: gzip.compress(chrome.pack(timeline), mtime=0),
    ".png": draw,
}
NOT_TRACED = {
    Untraced.SERVERS: "not traced: what servers in processes of their own do; pushes and pulls of workers are",
    Untraced.PAIRS: "not traced: exchanges of two workers (Gossip('pairwise')), which go on beside training",
}
Command = Callable[..., Any]
OPEN_IT = "Open it in https://ui.perfetto.dev, which reads it in the browser and sends it nowhere."


def check_steps(context: click.Context, option: click.Parameter, text: str | None) -> StepRange | None:
    try:
        return None if text is None else read_steps(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def check_output(context: click.Context, option: click.Parameter, path: Path) -> Path:
    if suffix(path) is None:
        raise click.BadParameter(f"{path.name} names no format that is known here: end it with {', '.join(WRITERS)}")
    if path.exists():
        raise click.BadParameter(f"{path} is there already, and is not overwritten: name another, or delete it")
    checked = check_parent(context, option, path)
    assert checked is not None
    return checked


def suffix(path: Path) -> str | None:
    return next((each for each in WRITERS if path.name.endswith(each) and path.name != each), None)


trace_option = click.option(
    "--trace",
    metavar="STEPS",
    callback=check_steps,
    help='Record what every rank does in these steps, such as 100:110, or "all", for `gossamer trace`.',
)


def check_ranks(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    try:
        if text is not None:
            read_ranks(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return text


profiler_option = click.option(
    "--torch-profiler",
    metavar="RANKS",
    callback=check_ranks,
    help='With --trace: the operators of these ranks as well, by torch.profiler, such as 0,2, or "all".',
)


def trace_options(command: Command) -> Command:
    """Both of them, --trace first."""
    return trace_option(profiler_option(command))


def check_profiled(steps: StepRange | None, profiled: str | None, world: int | None) -> None:
    """Before anything is made. world: how many ranks there will be; None where workers come and go. Raises UsageError
    where operators are asked for, but no steps, or of ranks that there will not be."""
    if profiled is None:
        return
    if steps is None:
        raise click.UsageError(
            "--torch-profiler profiles the steps that --trace names, and it names none: add --trace 100:102"
        )
    ranks = read_ranks(profiled) or frozenset()
    if world is not None and (beyond := sorted(rank for rank in ranks if rank >= world)):
        there = ",".join(map(str, sorted(ranks.difference(beyond)) or range(min(world, 2))))
        raise click.UsageError(
            f"--torch-profiler {profiled} names ranks that this run does not have ({', '.join(map(str, beyond))}): it "
            f"counts them from 0 to {world - 1}. Write --torch-profiler {there}, or all"
        )


def trace_settings(steps: StepRange | None, profiled: str | None, logs: Path) -> dict[str, str]:
    """What the environment of workers says of it."""
    if steps is None:
        return {}
    told = {active.TRACE: str(logs.resolve()), active.STEPS: str(steps)}
    return told if profiled is None else told | {PROFILED: profiled}


@click.command("trace")
@click.option("--steps", callback=check_steps, metavar="FIRST:LAST", help="Only these steps.  [default: all]")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=check_output,
    required=True,
    metavar="FILE",
    help=f"The format follows its end: {', '.join(WRITERS)}.",
)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
def trace_command(run: Path, steps: StepRange | None, output: Path) -> None:
    """Write what all ranks of RUN did, on one clock.

    RUN is the folder of a run that was started with --trace; where machines have folders of their own, copy their files
    *.spans into one.
    """
    processes = read_run(run)
    timeline = build(processes, steps)
    content = WRITERS[str(suffix(output))](timeline)
    write(output, content)
    slices = sum(1 for _ in timeline.slices())
    echo(f"{output}: {len(timeline.processes)} processes, {slices} slices, {timeline.arrows} arrows")
    for line in (*describe(timeline.clocks, processes), *_lacks(processes)):
        echo(line)
    if output.suffix != ".png":
        echo(OPEN_IT)


def _lacks(processes: list[ProcessSpans]) -> list[str]:
    said = []
    if missing := missing_ranks(processes):
        ranks = ", ".join(map(str, missing))
        said.append(f"missing: ranks {ranks}, whose files may lie on other machines: copy them into the same folder")
    found = {int(number) for each in processes for number in each.of(SpanKind.NOT_TRACED)["number"]}
    said += [line for what, line in NOT_TRACED.items() if what in found]
    said += [
        f"{each.path.name} is torn at its end, where its process was killed or its disk was full: "
        "all before that is shown"
        for each in processes
        if each.torn_bytes
    ]
    return said


def write(output: Path, content: bytes) -> None:
    """Whole or not at all; what another has put there meanwhile stays."""
    try:
        with output.open("xb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                output.unlink()
                raise
    except OSError as error:
        raise GossamerError(f"{output} could not be written ({error.strerror}): name another") from None
