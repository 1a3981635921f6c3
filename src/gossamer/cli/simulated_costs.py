"""`gossamer simulate --shapes`: what recipes would cost with thousands of workers, by calculation alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.base.units import bytes_text, count_text, seconds_text, share_text
from gossamer.cli.console import echo, say
from gossamer.comm.network import read_network
from gossamer.events import Attached
from gossamer.plan.cost.step_cost import StepCost, step_cost
from gossamer.plan.profile.profile_runs import assume_profile
from gossamer.plan.profile.synthetic_shapes import assumed, attached_to
from gossamer.plan.rehearse.model_shapes import find_shapes

HEADINGS = ("recipe", "seconds a step", "waiting", "sent by each", "busiest sends", "messages", "held to decode")
SAYS = (
    "Bytes are payload, per step. Seconds are foretold for workers that compute alike on lines of their own; those "
    "with >= are what computing and the busiest machine's line take at least. Held to decode: payloads that a "
    "worker keeps of others at once."
)
ModelFor = Callable[[Recipe], Attached]


def print_costs(
    recipes: Sequence[str],
    *,
    model: ModelFor,
    title: str,
    workers: int,
    network: str,
    step_seconds: float,
    json_file: Path | None = None,
) -> list[StepCost]:
    """Print a row for each recipe, as soon as it is known.

    model: the Attached event of a session with a resolved recipe. Raises GossamerError for a recipe or a network that
    cannot be read, or more unequal hosts than can be played.
    """
    there = read_network(network, workers)
    say(f"{title}, {seconds_text(step_seconds)} a step; {count_text(workers)} workers on {network}")
    found: list[StepCost] = []
    for text in recipes:
        began = perf_counter()
        recipe = resolve(text, workers)
        attached = model(recipe)
        profile = partial(assume_profile, attached, recipe, step_seconds, workers)
        found.append(step_cost(recipe, attached, there, workers, step_seconds, profile))
        say(f"{text}: calculated in {seconds_text(perf_counter() - began)}")
    for line in table(recipes, found):
        echo(line)
    echo(f"\n{SAYS}")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return found


def table(texts: Sequence[str], found: Sequence[StepCost]) -> Iterator[str]:
    rows = [HEADINGS, *(cells(text, each) for text, each in zip(texts, found, strict=True))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        columns = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *columns])


def cells(text: str, cost: StepCost) -> tuple[str, ...]:
    bound = ">= " * cost.at_least
    return (
        text,
        bound + seconds_text(cost.seconds),
        bound + share_text(cost.waiting_share),
        bytes_text(cost.bytes_sent),
        bytes_text(cost.load.bytes_sent),
        count_text(cost.load.messages),
        bytes_text(cost.load.heard_bytes),
    )


def simulate_costs(
    shapes: str | None,
    parameters: int | None,
    *,
    recipes: Sequence[str],
    workers: int,
    network: str,
    step_seconds: float,
    json_file: Path | None,
) -> None:
    """Calculate what recipes would send and how long a step would take, for shapes or a number of parameters."""
    title, model = _model(shapes, parameters)
    print_costs(
        recipes,
        model=model,
        title=title,
        workers=workers,
        network=network,
        step_seconds=step_seconds,
        json_file=json_file,
    )


def _model(shapes: str | None, parameters: int | None) -> tuple[str, ModelFor]:
    if parameters is not None:
        return f"{count_text(parameters)} parameters like a transformer's", partial(assumed, parameters)
    found = find_shapes(str(shapes), ())
    by_name = {each.name: each.shape for each in found.gradients}
    return found.title, partial(attached_to, by_name)
