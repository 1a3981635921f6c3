"""Topology description: a table of its rate of averaging, and a picture.

Run as `python -m gossamer.algorithms.topologies.ring`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from math import dist, hypot, log
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.algorithms.topologies.base import Topology
from gossamer.base.figures import check_matplotlib, figure
from gossamer.errors import GossamerError

TABLE_WORLDS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32)
PICTURE_WORLDS = (4, 7, 8, 12, 16)
SHOWN_ROUNDS = 3
EXACT = 1e-12  # rounding error of a distance
# Distinguishable with any color vision (Okabe and Ito)
COLORS = ("#0072B2", "#D55E00", "#009E73")
HEADER = ("workers", "receivers", "|lambda_2|", "gap", "rounds to halve the distance")


class Edge(NamedTuple):
    """An edge of a picture, in the first of the shown rounds that has it; mutual edges are drawn once."""

    tail: int
    head: int
    round: int


def draw(*topologies: Topology) -> None:
    """Print a table of each topology and save a picture: the command line of the topology modules."""
    name = type(topologies[0]).__name__
    parser = argparse.ArgumentParser(description=f"Print how fast {name} averages, and save a picture of it.")
    parser.add_argument("picture", type=Path, nargs="?", default=Path(f"topology-{name.lower()}.png"))
    path = parser.parse_args().picture
    for topology in topologies:
        print(f"{topology!r}\n{table(topology)}\n")
    try:
        picture(topologies, path)
    except (GossamerError, OSError) as error:
        parser.exit(1, f"{error}\n")
    print(f"Saved {path}")


def table(topology: Topology, worlds: Sequence[int] = TABLE_WORLDS) -> str:
    """Return one line per world size: the number of receivers of a rank in a round, and the rate of convergence to the
    mean.
    """
    lines = [HEADER, *(_line(topology, world) for world in worlds)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)) for line in lines)


def _line(topology: Topology, world: int) -> tuple[str, ...]:
    every = [(rank, round_) for round_ in range(topology.rounds(world)) for rank in range(world)]
    receivers = {len(topology.sends_to(rank, world, round_)) for rank, round_ in every}
    shown = str(min(receivers)) if len(receivers) == 1 else f"{min(receivers)} to {max(receivers)}"
    left = topology.second_eigenvalue(world)
    return str(world), shown, f"{left:.6f}", f"{1 - left:.6f}", _halving(topology, world, left)


def _halving(topology: Topology, world: int, left: float) -> str:
    """Return the number of rounds after which half of the distance is left, given the factor `left` per round."""
    return f"exact after {_exact_after(topology, world)}" if left < EXACT else f"{log(0.5) / log(left):.1f}"


def _exact_after(topology: Topology, world: int) -> int:
    """Return the first round after which every rank has the mean, within the period."""
    product = topology.mixing(world)
    rounds = 1
    while rounds < topology.rounds(world) and (product - 1 / world).abs().max() > EXACT:
        product = topology.mixing(world, rounds) @ product
        rounds += 1
    return rounds


def edges(topology: Topology, world: int) -> Iterator[Edge]:
    """Return the edges of the first rounds, for a picture."""
    seen: set[tuple[int, int]] = set()
    for round_ in range(min(topology.rounds(world), SHOWN_ROUNDS)):
        for tail in range(world):
            for head in topology.sends_to(tail, world, round_):
                if (tail, head) not in seen:
                    seen |= {(tail, head), (head, tail)} if topology.mutual else {(tail, head)}
                    yield Edge(tail, head, round_)


def picture(topologies: Sequence[Topology], path: Path, worlds: Sequence[int] = PICTURE_WORLDS) -> None:
    """Draw a row for each topology, with a graph for each world size, into the PNG file `path`."""
    check_matplotlib("; the table needs nothing")
    drawn = figure(3.1 * len(worlds), 3.9 * len(topologies), dpi=110)
    for part, topology in zip(drawn.subfigures(len(topologies), 1, squeeze=False)[:, 0], topologies, strict=True):
        part.suptitle(repr(topology), fontsize=14, fontweight="bold")
        for axes, world in zip(part.subplots(1, len(worlds), squeeze=False)[0], worlds, strict=True):
            _graph(axes, topology, world)
        _legend(part, min(max(map(topology.rounds, worlds)), SHOWN_ROUNDS))
    drawn.savefig(path, format="png")


def _graph(axes: Any, topology: Topology, world: int) -> None:
    places = [topology.place(rank, world) for rank in range(world)]
    for edge in edges(topology, world):
        _arrow(axes, places, edge, topology.mutual)
    for rank, place in enumerate(places):
        axes.plot(*place, "o", markersize=13, color="white", markeredgecolor="#333333", zorder=3)
        axes.text(*place, str(rank), ha="center", va="center_baseline", fontsize=8, zorder=4)
    left = topology.second_eigenvalue(world)
    rounds = _halving(topology, world, left)
    unit = "round" if rounds.endswith(" 1") else "rounds"
    halved = f"{rounds} {unit}" if left < EXACT else f"distance halved in {rounds} {unit}"
    axes.set_title(f"{world} workers", fontsize=10)
    axes.text(0, -1.42, f"spectral gap {1 - left:.3f}\n{halved}", ha="center", va="center", fontsize=9)
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.65, 1.25), aspect="equal")
    axes.axis("off")


def _arrow(axes: Any, places: Sequence[tuple[float, float]], edge: Edge, mutual: bool) -> None:
    from matplotlib.patches import FancyArrowPatch

    tail, head = places[edge.tail], places[edge.head]
    bend = 0.22 if _crosses_another(places, tail, head) else 0.0 if mutual else 0.12
    axes.add_patch(
        FancyArrowPatch(
            tail,
            head,
            arrowstyle="-" if mutual else "-|>",
            mutation_scale=8,
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=0 if mutual else 8,
            shrinkB=0 if mutual else 8,
            color=COLORS[edge.round],
            linewidth=1.1,
            alpha=0.8,
        )
    )


def _crosses_another(
    places: Sequence[tuple[float, float]], tail: tuple[float, float], head: tuple[float, float], near: float = 0.08
) -> bool:
    """Whether the straight line from `tail` to `head` passes over a third place."""
    across, up = head[0] - tail[0], head[1] - tail[1]
    length = hypot(across, up)
    return any(
        abs(across * (y - tail[1]) - up * (x - tail[0])) < near * length
        and max(dist((x, y), tail), dist((x, y), head)) < length - near
        for x, y in places
    )


def _legend(part: Any, rounds: int) -> None:
    if rounds == 1:
        return
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=color, label=f"round {number}") for number, color in enumerate(COLORS[:rounds])]
    part.legend(handles=lines, loc="upper right", ncols=rounds, frameon=False, fontsize=9)
