"""Sparse all-reduce: bytes that a worker sends a step by all-gather, and where each worker adds up a part.

Prices, by arithmetic on shapes: nothing is trained. The choice is the same everywhere, a share of one tensor's entries;
what agrees on the mean of everything stands beside it.

    python benchmarks/sparse_sum.py [--numel 25000000] [--density 0.01] [--workers 4 16 64 256] [--picture FILE.png]
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from gossamer.algorithms.compressors import Compressor, Dense, Sharded, SparseSum, TopK
from gossamer.base import figures
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import price
from gossamer.base.units import bytes_text

Curves = Mapping[str, Sequence[float]]  # bytes a worker sends, by number of workers


def bytes_sent(compressor: Compressor, numel: int, workers: int) -> float:
    x = FlatTensors.zeros(Layout.of({"weight": (numel,)}), dtype=torch.float32, device=torch.device("meta"))
    at = AggregationContext(world=workers)
    said = price(compressor.aggregate(x, compressor.init(x, at), at), workers)
    return sum(op.bytes_sent for op in said)


def curves(numel: int, density: float, workers: Sequence[int]) -> Curves:
    choice = TopK(density=density)
    ways = {
        "dense mean": Dense(),
        "gather": choice,
        "sparse sum": SparseSum(choice),
        "a choice in every part": Sharded(choice),
    }
    return {name: [bytes_sent(way, numel, count) for count in workers] for name, way in ways.items()}


def table(found: Curves, workers: Sequence[int]) -> str:
    rows = [[name, *map(bytes_text, sent)] for name, sent in found.items()]
    times = [gather / summed for gather, summed in zip(found["gather"], found["sparse sum"], strict=True)]
    rows.append(["gather / sparse sum", *(f"{each:.1f}" for each in times)])
    head = ["bytes per worker and step", *(f"{count} workers" for count in workers)]
    rule = ["---", *["---:"] * len(workers)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def picture(found: Curves, workers: Sequence[int], path: Path) -> None:
    figure = figures.figure(6, 4, dpi=120)
    axes = figure.subplots()
    for name, sent in found.items():
        axes.plot(workers, sent, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(workers, [str(count) for count in workers])
    axes.set_xlabel("workers")
    axes.set_ylabel("bytes per worker and step")
    figures.open_frame(axes)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    found = curves(args.numel, args.density, args.workers)
    print(f"TopK(density={args.density}) of {args.numel:,} entries of float32\n")
    print(table(found, args.workers))
    if args.picture is not None:
        picture(found, args.workers, args.picture)


if __name__ == "__main__":
    main()
