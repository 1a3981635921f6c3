"""Distance to consensus over bytes: changing groups, gossip over fixed graphs, and a full mean, in one process.

Workers begin with independent normal vectors and average by the real rule over the real topologies; nothing is sent,
bytes are those of the rule's messages. Writes a part of docs/benchmarks/many-members.md, and many-members.png.

    python benchmarks/group_consensus.py [--workers 1000] [--seeds 3] [--quick]
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.page import put_between  # found only after the line above
from benchmarks.provenance import ROOT, provenance, scratch

from gossamer.algorithms.gossip.rules import Averaging, NeighborMessage
from gossamer.algorithms.topologies import Exponential, Groups, Ring, Topology
from gossamer.algorithms.topologies.base import Weights
from gossamer.algorithms.topologies.random_peers import SAMPLED_ROUNDS
from gossamer.base import figures
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout

PAGE, PICTURE = ROOT / "docs" / "benchmarks" / "many-members.md", ROOT / "docs" / "benchmarks" / "many-members.png"
TOPOLOGIES = (Groups(size=8), Groups(size=10), Exponential(), Exponential(one_peer=True), Ring())
ENTRIES, MOST_MODELS, GOAL = 32, 60, 1e-3


@dataclass(frozen=True)
class Curve:
    """One seed: after each round, the models that a worker has sent at most, and the distance to the mean.

    The distance is the root of mean_i |x_i - mean|^2, relative to that of the beginning.
    """

    models: tuple[float, ...]
    distances: tuple[float, ...]

    def needed(self, goal: float = GOAL) -> tuple[int, float] | None:
        """Rounds and models sent until the distance is at most `goal`; None if it never is."""
        for number, (models, distance) in enumerate(zip(self.models, self.distances, strict=True)):
            if distance <= goal:
                return number, models
        return None


def distance(xs: Sequence[Tensor], mean: Tensor) -> float:
    return float(torch.stack([(x - mean).square().sum() for x in xs]).mean().sqrt())


def curve(topology: Topology, workers: int, seed: int, most_models: float = MOST_MODELS) -> Curve:
    """Average round by round, until a worker has sent `most_models` vectors or all have the mean."""
    rule, layout = Averaging(), Layout.of({"x": (ENTRIES,)})
    draw = torch.Generator().manual_seed(seed)
    xs = list(torch.randn(workers, ENTRIES, dtype=torch.float64, generator=draw))
    mean = torch.stack(xs).mean(0)
    period, is_random = topology.rounds(workers), topology.rounds(workers) == SAMPLED_ROUNDS
    first = distance(xs, mean)
    models, distances, number = [0.0], [1.0], 0
    while models[-1] < most_models and distances[-1] > 1e-12:
        at = [AggregationContext(step=number, seed=seed, rank=rank, world=workers) for rank in range(workers)]
        told = [len(topology.sends_to(rank, workers, number, seed)) for rank in range(workers)]
        turn = (number, seed) if is_random else (number % period, 0)
        weights = partial(_weights, topology, workers, *turn)
        offers = [rule.offer(FlatTensors(x, layout), {}, State(), at[r], told[r]) for r, x in enumerate(xs)]
        heard = [
            [NeighborMessage(weight, offers[peer].payload, at[peer]) for peer, weight in weights(rank) if peer != rank]
            for rank in range(workers)
        ]
        xs = [rule.land(x, layout, {}, offers[rank], heard[rank]) for rank, x in enumerate(xs)]
        sent = max(many * sum(each.nbytes for each in offer.payload) for many, offer in zip(told, offers, strict=True))
        models.append(models[-1] + sent / (xs[0].nbytes))
        distances.append(distance(xs, mean) / first)
        number += 1
    return Curve(tuple(models), tuple(distances))


@lru_cache(maxsize=20_000)  # of a period, for all seeds
def _weights(topology: Topology, workers: int, number: int, seed: int, rank: int) -> Weights:
    return topology.weights(rank, workers, number, seed)


def full_mean(workers: int) -> float:
    """Models that each worker sends for the exact mean by a ring of chunks: 2 (n - 1) messages of 1/n of the model."""
    return 2 * (workers - 1) / workers


def table(curves: dict[str, list[Curve]], workers: int) -> Iterator[str]:
    goal = f"{GOAL:g}"
    heads = ("models sent a round", "after 1 round", "10 models sent", f"rounds to {goal}", f"models sent to {goal}")
    yield f"| averaging over {workers:,} workers | {' | '.join(heads)} |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, seeds in curves.items():
        needed = [each.needed() for each in seeds]
        rounds, models = "-", f"> {MOST_MODELS}"
        found = [each for each in needed if each is not None]
        if len(found) == len(needed):
            rounds, models = (_range([each[column] for each in found]) for column in (0, 1))
        cells = [
            f"`{name}`",
            f"{seeds[0].models[1]:g}",
            _spread([each.distances[1] for each in seeds]),
            _spread([_at(each, 10) for each in seeds]),
            rounds,
            models,
        ]
        yield f"| {' | '.join(cells)} |"
    exact, messages = f"{full_mean(workers):.4g}", 2 * (workers - 1)
    yield f"| full mean, ring of chunks | {exact} | exact | exact | 1, of {messages:,} messages in turn | {exact} |"


def _at(found: Curve, models: float) -> float:
    """Distance after the last round within so many models sent."""
    return [distance for sent, distance in zip(found.models, found.distances, strict=True) if sent <= models][-1]


def _spread(values: Sequence[float]) -> str:
    if max(values) < 1e-9:
        return "exact"
    return f"{fmean(values):.2g}" + (f" ± {stdev(values):.1g}" if len(values) > 1 else "")


def _range(values: Sequence[float]) -> str:
    return f"{min(values):g}" if min(values) == max(values) else f"{min(values):g} to {max(values):g}"


def plot(curves: dict[str, list[Curve]], workers: int, path: Path) -> None:
    """Lines with a marker for each round, the first seed of each topology; the full mean is a vertical line."""
    figure = figures.figure(7.6, 4.4, dpi=110)
    axes = figure.subplots()
    for color, (name, seeds) in zip(figures.COLORS, curves.items(), strict=False):
        points = [
            (models, max(distance, 1e-7)) for models, distance in zip(seeds[0].models, seeds[0].distances, strict=True)
        ]
        axes.plot(*zip(*points, strict=True), color=color, label=name, marker="o", markersize=3.5, linewidth=1.4)
    exact = full_mean(workers)
    axes.plot(
        [exact, exact], [1, 1e-7], color="#000000", linestyle="--", linewidth=1.2, label="full mean (ring of chunks)"
    )
    axes.set(yscale="log", xlabel="models that a worker has sent", xlim=(0, MOST_MODELS), ylim=(8e-8, 1.5))
    axes.set_ylabel("distance to the mean, relative (less is drawn at 1e-7)")
    figures.title(axes, f"{workers:,} workers; a marker is a round")
    figures.light_grid(axes)
    figures.open_frame(axes)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="64 workers, one seed, into runs/quick")
    parser.add_argument("--picture", action="store_true", help="draw the picture only, from the first seed")
    args = parser.parse_args()
    args.seeds = 1 if args.picture else args.seeds
    if args.quick:
        args.workers, args.seeds = 64, 1
    curves: dict[str, list[Curve]] = {}
    for topology in TOPOLOGIES:
        curves[repr(topology)] = [curve(topology, args.workers, seed) for seed in range(args.seeds)]
        print(f"{topology!r}: {curves[repr(topology)][0].needed()}", file=sys.stderr, flush=True)
    page = scratch(PAGE) if args.quick else PAGE
    if not args.picture:
        put_between(page, "consensus", f"{provenance()}\n\n" + "\n".join(table(curves, args.workers)))
    plot(curves, args.workers, page.with_suffix(".png"))
    print(page)


if __name__ == "__main__":
    main()
