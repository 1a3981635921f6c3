"""gossamer explain: what a recipe means, sends, remembers and takes, before anything runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gossamer.errors import GossamerError
from gossamer.events import Attached
from gossamer.forecast import Forecast, assumed, attached_by, forecast
from gossamer.foretell import Foretold, foretell
from gossamer.measure import assume, measure
from gossamer.network import read_network
from gossamer.recipe import Recipe, resolve

ASSUMED_PARAMETERS = 10_000_000
MOST_PARAMETERS = 10**12
FLAGS = ("--help", "-h", "--own-machines")


class _OptionsUntilScript(click.Command):
    """Options may stand on both sides of RECIPE; whatever follows SCRIPT is the script's."""

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        recipe = _first_positional(args, 0)
        script = _first_positional(args, recipe + 1)
        return super().parse_args(
            ctx, args[:recipe] + args[recipe + 1 : script] + args[recipe : recipe + 1] + args[script:]
        )


def _first_positional(args: list[str], start: int) -> int:
    """Its place. Every option but the flags takes a value."""
    at = start
    while at < len(args) and args[at].startswith("-"):
        at += 1 if "=" in args[at] or args[at] in FLAGS else 2
    return min(at, len(args))


@click.command(cls=_OptionsUntilScript)
@click.argument("recipe")
@click.argument("script", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.option("--workers", default=4, show_default=True, type=click.IntRange(min=1), help="How many take part.")
@click.option(
    "--parameters",
    type=click.IntRange(1, MOST_PARAMETERS),
    help=f"Assume a model of this size, if no SCRIPT has one. [default: {ASSUMED_PARAMETERS}]",
)
@click.option("--network", metavar="SPEC", help="Foretell a step's time there: 100mbit,20ms or a TOML file.")
@click.option(
    "--step-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="How long a worker computes in a step, if no SCRIPT shows it.",
)
@click.option(
    "--own-machines",
    is_flag=True,
    help="Each worker has a machine like this one.  [default: all share this one, as with gossamer run]",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write it here.")
def explain(
    recipe: str,
    script: Path | None,
    arguments: tuple[str, ...],
    workers: int,
    parameters: int | None,
    network: str | None,
    step_seconds: float | None,
    own_machines: bool,
    json_file: Path | None,
) -> None:
    """Show what RECIPE means, what one step sends, and what it remembers.

    SCRIPT is run with its ARGS until it calls gossamer.attach: its model is then priced, and nothing is sent. With
    --network it also makes some steps, alone, and how long they will take on that network is foretold.
    """
    _refuse_contradictions(recipe, script, parameters, network, step_seconds)
    try:
        resolved = resolve(recipe, workers)
        model, attached = _model(resolved, script, arguments, parameters)
        said = forecast(resolved, attached, workers=workers)
        foretold = None
        if network is not None:
            there = read_network(network, workers)  # before anything is measured, since it may be misspelt
            if script is not None:
                measured = measure(script, arguments, resolved, workers, copies=1 if own_machines else workers)
            else:
                measured = assume(attached, resolved.compressor, step_seconds or 0.0, workers)
            foretold = foretell(resolved, measured, there, workers)
    except GossamerError as error:
        raise click.ClickException(str(error)) from error
    for line in _lines(resolved, model, said):
        click.echo(line)
    for line in _time_lines(foretold) if foretold is not None else ():
        click.echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps(_record(resolved, model, said, foretold), indent=2) + "\n")


def _refuse_contradictions(
    recipe: str, script: Path | None, parameters: int | None, network: str | None, step_seconds: float | None
) -> None:
    if script is not None and parameters is not None:
        raise click.UsageError(
            "SCRIPT has a model, so --parameters would contradict it. Leave out one of the two: "
            f"gossamer explain '{recipe}' {script}"
        )
    if script is not None and step_seconds is not None:
        raise click.UsageError(
            "SCRIPT shows how long a step takes, so --step-seconds would contradict it. Leave it out."
        )
    if network is not None and script is None and step_seconds is None:
        raise click.UsageError(
            "how long a worker computes in a step is not known, and the time of a step follows from it. Name a SCRIPT, "
            f"or say it: gossamer explain '{recipe}' --network {network} --step-seconds 0.2"
        )
    if network is None and step_seconds is not None:
        raise click.UsageError("--step-seconds is for foretelling a step on a network: add --network 100mbit,20ms.")


def _model(
    recipe: Recipe, script: Path | None, arguments: tuple[str, ...], parameters: int | None
) -> tuple[str, Attached]:
    """What is priced, in words and as a session announces it."""
    if script is not None:
        return str(script), attached_by(script, arguments, recipe)
    return "shapes assumed, like a transformer's", assumed(parameters or ASSUMED_PARAMETERS, recipe)


def _lines(recipe: Recipe, model: str, said: Forecast) -> Iterator[str]:
    yield f"recipe      {recipe!r}"
    yield f"workers     {said.workers}"
    yield f"parameters  {said.parameters:,} in {said.tensors:,} tensors ({model})"
    yield f"batch       {said.workers} workers x the batch your loop draws on each"
    yield ""
    yield "One step sends, in bytes per worker:"
    for where, word, sent in _table(said):
        yield f"  {where:<18}{word:<10}{sent:>20,.0f}"
    yield f"  {'total':<28}{said.bytes_sent:>20,.0f}{_comparison(said)}"
    yield f"  {'dense float32 ring':<28}{said.dense_bytes_sent:>20,.0f}"
    yield ""
    yield "Between steps each worker remembers, in bytes:"
    yield f"  {'residuals':<28}{said.residual_bytes:>20,}"
    yield f"  {'other state':<28}{said.other_state_bytes:>20,}"


def _time_lines(foretold: Foretold) -> Iterator[str]:
    inputs = foretold.inputs
    copies = inputs["copies_measured_side_by_side"]
    computing = f"measured in {copies} at once on this machine" if copies else "as given; compressing measured here"
    yield ""
    yield f"One step takes, in seconds, foretold for {inputs['network']}:"
    yield f"  {'computing':<28}{foretold.step_seconds - foretold.waiting_seconds:>20.4f}   {computing}"
    yield f"  {'waiting':<28}{foretold.waiting_seconds:>20.4f}   {foretold.waiting_share:.1%} of the step"
    yield f"  {'total':<28}{foretold.step_seconds:>20.4f}"
    yield (
        f"beside or after computing: {foretold.wire_seconds:.4f} on the wire, {foretold.codec_seconds:.4f} compressing "
        f"{inputs['buckets']} bucket{'s' * (inputs['buckets'] != 1)}"
    )


def _table(said: Forecast) -> Iterator[tuple[str, str, float]]:
    """(where, word, bytes); buckets that send the same share their lines."""
    for words, count in Counter(said.buckets).items():
        where = f"bucket {said.buckets.index(words)}" if count == 1 else f"{count} buckets, each"
        for word in words:
            yield where, word.word, word.bytes_sent
    yield "control", "Gather", said.control_bytes_sent
    if said.buffer_bytes_sent:
        yield "buffers", "broadcast", said.buffer_bytes_sent


def _comparison(said: Forecast) -> str:
    if said.share_of_dense is None:
        return "   a world of one sends nothing"
    return f"   {said.share_of_dense:.2%} of the ring's"


def _record(recipe: Recipe, model: str, said: Forecast, foretold: Foretold | None) -> dict[str, Any]:
    return {
        "recipe": repr(recipe),
        "model": model,
        "workers": said.workers,
        "parameters": said.parameters,
        "words": [
            {"where": f"bucket {number}", "word": word.word, "bytes_sent": word.bytes_sent}
            for number, words in enumerate(said.buckets)
            for word in words
        ]
        + [
            {"where": "control", "word": "Gather", "bytes_sent": said.control_bytes_sent},
            {"where": "buffers", "word": "broadcast", "bytes_sent": said.buffer_bytes_sent},
        ],
        "bytes_sent_per_step": said.bytes_sent,
        "dense_bytes_sent_per_step": said.dense_bytes_sent,
        "share_of_dense": said.share_of_dense,
        "memory_bytes": {"residuals": said.residual_bytes, "other_state": said.other_state_bytes},
        "foretold": None if foretold is None else asdict(foretold) | {"waiting_share": foretold.waiting_share},
    }
