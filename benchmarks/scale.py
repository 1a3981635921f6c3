"""Scale: what recipes would send, and how long a step would take, with up to 10,000 workers.

Nothing is run: operations of the real compressors over meta tensors, priced on networks that are not there; only
encoding and decoding are timed on this machine. Writes docs/benchmarks/scale.md between its markers, and scale.png
next to it.

    python benchmarks/scale.py [--workers N ...] [--parameters N ...] [--networks SPEC ...] [--recipes RECIPE ...]
    python benchmarks/scale.py --quick          # 16 and 64 workers and two recipes, into runs/quick
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.page import put_between  # found only after the line above
from benchmarks.provenance import ROOT, provenance, scratch

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import figures
from gossamer.base.units import bytes_text, count_text, seconds_text, share_text
from gossamer.comm.network import read_network
from gossamer.errors import GossamerError
from gossamer.plan.estimate.step_cost import StepCost, step_cost
from gossamer.plan.estimate.workload_profile import WorkloadProfile
from gossamer.plan.profile.profile_runs import assume_profile
from gossamer.plan.profile.synthetic_shapes import assumed

PAGE, PICTURE = ROOT / "docs" / "benchmarks" / "scale.md", ROOT / "docs" / "benchmarks" / "scale.png"
WORKERS, PARAMETERS = [16, 100, 1000, 10_000], [100_000_000, 1_000_000_000]
NETWORKS = ["10gbit,1ms", "1gbit,10ms", "100mbit,50ms"]
STEP_SECONDS = {100_000_000: 0.3, 1_000_000_000: 2.0}
RECIPES = [
    'Dense(dtype="bfloat16")',
    "Dense() + Ring()",
    "Int8()",
    "OneBit()",
    "TopK(density=0.001)",
    "DGC(density=0.001)",
    "PowerSGD(rank=4)",
    "ParameterServer(shards=16)",
    "Gossip() + Exponential()",
    "DiLoCo(period=100) + Int8()",
    "DiLoCo(period=100, fragments=4, delay=5) + Int8()",
]
HEADINGS = ("recipe", "workers", "step", "waiting", "compressing", "sent by each", "busiest sends", "messages", "held")

Costs = dict[tuple[str, int], StepCost]  # by recipe and workers


@cache
def profiled(text: str, parameters: int, workers: int) -> WorkloadProfile:
    recipe = resolve(text, workers)
    return assume_profile(assumed(parameters, recipe), recipe, STEP_SECONDS.get(parameters, 0.3), workers)


def costs(network: str, parameters: int, args: argparse.Namespace) -> Costs:
    found: Costs = {}
    for text in args.recipes:
        for workers in args.workers:
            recipe, there = resolve(text, workers), read_network(network, workers)
            profile, seconds = partial(profiled, text, parameters, workers), STEP_SECONDS.get(parameters, 0.3)
            try:
                cost = step_cost(recipe, assumed(parameters, recipe), there, workers, seconds, profile)
            except GossamerError as error:
                print(f"{text}, {workers}: {error}", file=sys.stderr)
                continue
            found[text, workers] = cost
            print(f"{network} {parameters} {text} {workers}: {cost.seconds:.4g} s", file=sys.stderr, flush=True)
    return found


def table(found: Costs) -> Iterator[str]:
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|---|{'---:|' * (len(HEADINGS) - 1)}"
    for (text, workers), cost in found.items():
        least = ">= " * cost.at_least
        cells = [
            f"`{text}`",
            f"{workers:,}",
            least + seconds_text(cost.seconds),
            least + share_text(cost.waiting_share),
            seconds_text(cost.codec_seconds),
            bytes_text(cost.bytes_sent),
            bytes_text(cost.load.bytes_sent),
            count_text(cost.load.messages),
            bytes_text(cost.load.received_bytes),
        ]
        yield f"| {' | '.join(cells)} |"


def draw(panels: dict[str, Costs], path: Path) -> None:
    """A panel for each network and model: seconds of a step over the number of workers, a line for each recipe."""
    from matplotlib import colormaps

    figure = figures.figure(4.6 * len(panels) + 3.6, 4.4, dpi=110)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    colors: Any = colormaps["tab20"]
    for axes, (title, found) in zip(grid[0], panels.items(), strict=True):
        for number, text in enumerate(dict.fromkeys(name for name, _ in found)):
            points = [(workers, cost.seconds) for (name, workers), cost in found.items() if name == text]
            dashed = any(cost.at_least for (name, _), cost in found.items() if name == text)
            style = {"color": colors(number), "linestyle": "--" if dashed else "-", "marker": "o", "markersize": 4}
            axes.plot(*zip(*points, strict=True), label=text, **style)
        axes.set(xscale="log", yscale="log", xlabel="workers")
        axes.set_title(title, loc="left", fontsize=10)
        figures.light_grid(axes)
        figures.open_frame(axes)
    grid[0][0].set_ylabel("seconds a step (dashed: at least)")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--parameters", type=int, nargs="+", default=PARAMETERS)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(given)
    if args.quick:
        args.workers, args.parameters, args.networks, args.recipes = [16, 64], [1_000_000], ["1gbit,10ms"], RECIPES[:2]
    return args


def main() -> None:
    args = arguments()
    parts, panels = [provenance()], {}
    for parameters in args.parameters:
        for network in args.networks:
            found = costs(network, parameters, args)
            title = f"{count_text(parameters)} parameters, {network}"
            panels[title] = found
            parts += [f"### {title}", "\n".join(table(found))]
    page = scratch(PAGE) if args.quick else PAGE
    put_between(page, "scale", "\n\n".join(parts))
    draw(panels, page.with_suffix(".png"))
    print(page)


if __name__ == "__main__":
    main()
