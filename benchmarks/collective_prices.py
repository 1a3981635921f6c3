"""Predicted seconds of all-reduce by each collective, on several networks: nothing is sent. Prints a markdown table.

All workers begin at once, over connections that have carried as much before and were silent for a second since. The
lowest price is in bold. Under "auto" is what a session takes that has measured such links; "engine" is Gloo.

    python benchmarks/collective_prices.py [--workers 4 16] [--network SPEC ...] [--picture FILE.png]
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

from gossamer.algorithms.collectives import (
    Collective,
    DirectAllReduce,
    Does,
    HalvingDoubling,
    HierarchicalAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.base import figures
from gossamer.base.units import seconds_text
from gossamer.comm.network import Network, read_network
from gossamer.comm.network.cost.cheapest_collective import (
    candidates,
    fastest,
    ranks_per_site,
    rested_seconds,
    table_seconds,
)
from gossamer.comm.network.cost.message_schedule import Moves
from gossamer.comm.network.cost.op_cost import ENGINE
from gossamer.comm.network.cost.representative_cost import AS_FAST
from gossamer.errors import GossamerError

NETWORKS = ("1gbit,0.2ms", "100mbit,20ms", "examples/networks/two-sites-80ms.toml")
SIZES = {"4 KB": 4_000, "1 MB": 1_000_000, "100 MB": 100_000_000}
ITEMSIZE = 4
COLUMNS = (
    "engine",
    *(each.name for each in (DirectAllReduce, HalvingDoubling, RingAllReduce, HierarchicalAllReduce, TreeAllReduce)),
    "auto",
)


# -- prices


def engine_seconds(nbytes: int, network: Network) -> float:
    world = len(network.hosts)

    def moves() -> list[list[Moves]]:
        return [ENGINE.mean(rank, world, nbytes // ITEMSIZE, ITEMSIZE) for rank in range(world)]

    return rested_seconds(moves, network)


def cells(nbytes: int, network: Network) -> Iterator[str]:
    prices = {each.name: table_seconds(each, nbytes, ITEMSIZE, network) for each in candidates(network)}
    prices["engine"] = engine_seconds(nbytes, network)
    best = min(prices.values())
    for column in COLUMNS[:-1]:
        text = seconds_text(prices[column]) if column in prices else "-"
        yield f"**{text}**" if prices.get(column, inf) <= AS_FAST * best else text
    yield fastest(nbytes, ITEMSIZE, network).name


def rows(specs: Iterable[str], workers: Iterable[int]) -> Iterator[str]:
    yield f"| workers, network | bytes | {' | '.join(COLUMNS)} |"
    yield "|---|---:|" + "---:|" * len(COLUMNS[:-1]) + "---|"
    for count in workers:
        for spec in specs:
            try:
                network = read_network(spec, count)
            except GossamerError as problem:
                print(f"left out: {problem}", file=sys.stderr)
                continue
            nodes = f", sites of {ranks_per_site(network)}" if ranks_per_site(network) else ""
            for size, nbytes in SIZES.items():
                yield f"| {count}, {Path(spec).name}{nodes} | {size} | {' | '.join(cells(nbytes, network))} |"


# -- a picture of the tables


DRAWN = (DirectAllReduce(), HalvingDoubling(), RingAllReduce(), HierarchicalAllReduce(per_node=2), TreeAllReduce())
COLORS = {Does.ADD: "#0072B2", Does.KEEP: "#D55E00"}  # safe for color-blind readers


def picture(path: Path, world: int = 4) -> None:
    """Time to the right, ranks one below the other; the thicker an arrow, the more of the tensor goes along it."""
    from matplotlib.lines import Line2D

    rounds = [1 + max(hop.round for rank in range(world) for hop in each.hops(rank, world)) for each in DRAWN]
    figure = figures.figure(14, 3.2, dpi=110)
    for axes, each, count in zip(figure.subplots(1, len(DRAWN), width_ratios=rounds), DRAWN, rounds, strict=True):
        axes.set_title(each.name if each.name != HierarchicalAllReduce.name else "hierarchical(2)", fontsize=10)
        _draw(axes, each, world, count)
    lines = [
        Line2D([], [], color=color, label=f"what comes is {does}")
        for does, color in zip(("added", "kept"), COLORS.values(), strict=True)
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _draw(axes: Any, collective: Collective, world: int, rounds: int) -> None:
    shares: list[set[str]] = [set() for _ in range(rounds)]
    for rank in range(world):
        for hop in collective.hops(rank, world):
            if hop.does is not Does.SEND:
                share = len(hop.pieces) / collective.pieces(world)
                shares[hop.round].add("all" if share == 1 else f"1/{round(1 / share)}")
                style = {"arrowstyle": "-|>", "color": COLORS[hop.does], "linewidth": 0.8 + 2 * share, "alpha": 0.85}
                axes.annotate("", (hop.round + 0.95, rank), (hop.round + 0.05, hop.peer), arrowprops=style)
    for moment in range(rounds + 1):
        axes.plot([moment] * world, range(world), "o", color="#333333", markersize=4)
    for round_, found in enumerate(shares):
        axes.text(round_ + 0.5, world - 0.45, " ".join(sorted(found)), ha="center", va="top", fontsize=8)
    axes.set(xlim=(-0.15, rounds + 0.15), ylim=(world - 0.2, -0.4), yticks=range(world), xticks=[])
    figures.open_frame(axes, without=("top", "right", "bottom", "left"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--network", nargs="+", default=list(NETWORKS))
    parser.add_argument("--picture", type=Path, help="draw the tables of 4 ranks into this file, and price nothing")
    args = parser.parse_args(arguments)
    if args.picture:
        picture(args.picture)
        return
    for line in rows(args.network, args.workers):
        print(line, flush=True)


if __name__ == "__main__":
    main()
