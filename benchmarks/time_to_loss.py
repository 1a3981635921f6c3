"""Time to a loss: hours on a slow network until a recipe is where plain DDP ends without a network's limit.

Both halves are measured apart. How many steps a recipe needs: benchmarks/front.py trains four workers in one process,
with real sessions, and follows the held-out loss. How long a step takes: real workers on emulated hosts, and plain DDP
without a limit in turns with them. Their product is the time. Writes docs/benchmarks/time-to-loss.md.

    python benchmarks/front.py --tasks bytelm-base ...          # first: the losses, kept in runs/front.json
    python benchmarks/time_to_loss.py [--networks SPEC ...] [--recipes RECIPE ...] [--rounds 2] [--output FILE.md]
    python benchmarks/time_to_loss.py --quick                   # a minute, into runs/quick, to see that it runs
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.kept import read  # found only after the line above
from benchmarks.network import today
from benchmarks.pace import ddp_seconds, quick, seconds
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import markdown, write_page

DENSE = "Dense()"
NO_LIMIT, DDP, HOOK = "plain DDP, no limit", "plain DDP", "DDP + PowerSGD hook"
STEPS_AS = {NO_LIMIT: DENSE, DDP: DENSE, HOOK: "PowerSGD(rank=4)"}  # whose steps these need
PEERS = {DDP: "DDP", HOOK: "DDP + PowerSGD hook, one bucket"}  # as benchmarks/network.py calls them

Curve = Sequence[tuple[int, float, float | None]]  # (steps made, bytes sent, held-out loss)


def steps_to(loss: float, curve: Curve) -> float | None:
    """Steps after which a curve is first at a loss, between its points on a straight line; None: it never is."""
    before: tuple[int, float] | None = None
    for step, _, here in curve:
        if here is None:
            return None
        if here <= loss:
            if before is None or before[1] == here:
                return float(step)
            first, above = before
            return first + (step - first) * (above - loss) / (above - here)
        before = step, here
    return None


@dataclass(frozen=True)
class Curves:
    """Curves of one task by recipe and seed, with the learning rate that its family was tuned to."""

    curves: dict[str, dict[int, Curve]]

    @classmethod
    def of(cls, runs: Sequence[dict[str, Any]], task: str) -> "Curves":
        """Of every recipe the runs with the learning rate that ended lowest with the first seed."""
        chosen: dict[str, tuple[float, float]] = {}
        mine = [run for run in runs if run["task"] == task and run["held_out"] is not None]
        for run in mine:
            best = chosen.get(run["recipe"])
            if best is None or run["held_out"] < best[0]:
                chosen[run["recipe"]] = run["held_out"], run["learning_rate"]
        curves: dict[str, dict[int, Curve]] = {}
        for run in mine:
            if run["learning_rate"] == chosen[run["recipe"]][1]:
                curves.setdefault(run["recipe"], {})[run["seed"]] = run["curve"]
        return cls(curves)

    def steps(self, recipe: str) -> list[float | None]:
        """Steps to the end of Dense(), by the seeds that both were trained with."""
        dense = self.curves[DENSE]
        mine = self.curves.get(recipe, {})
        return [steps_to(dense[seed][-1][2] or 0.0, mine[seed]) for seed in sorted(dense.keys() & mine.keys())]

    def dense_steps(self) -> int:
        return next(iter(self.curves[DENSE].values()))[-1][0]


def measure(network: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step by round."""
    found: dict[str, list[float]] = {name: [] for name in (NO_LIMIT, *PEERS, *args.recipes)}
    for number in range(args.rounds):
        for name, taken in found.items():
            if name == NO_LIMIT:
                taken.append(ddp_seconds(args))
            elif name in PEERS:
                result = today(network, PEERS[name], args)
                if result.error:
                    print(f"{network}: {name}: {result.error}", file=sys.stderr, flush=True)
                    continue
                taken.append(result.median)
            else:
                taken.append(seconds(name, network, args))
            shown = f"{network}: round {number + 1} of {args.rounds}: {name}: {1000 * taken[-1]:.0f} ms"
            print(shown, file=sys.stderr, flush=True)
    return found


def table(taken: dict[str, list[float]], losses: Curves) -> str:
    """A row for each: seconds of a step and steps to the loss, both over plain DDP's without a limit."""
    plain, least = statistics.median(taken[NO_LIMIT]), losses.dense_steps()
    lines = []
    for name, rounds in taken.items():
        steps = losses.steps(STEPS_AS.get(name, name))
        line = {"": name if name in STEPS_AS else f"`{name}`", "step": "failed", "steps": "", "time": "", "seeds": ""}
        if rounds:
            step = statistics.median(rounds)
            line["step"] = f"{1000 * step:.0f} ms ({1000 * min(rounds):.0f} to {1000 * max(rounds):.0f})"
        if not steps:
            line["steps"] = "not trained"
        elif any(each is None for each in steps):
            line["steps"] = f"not within {least} (of {len(steps)}: {sum(each is None for each in steps)})"
        elif rounds:
            known = [each for each in steps if each is not None]
            line["steps"] = f"{statistics.fmean(known):.0f}"
            line["time"] = f"**{statistics.fmean(known) * step / (least * plain):.2f}**"
        line["seeds"] = str(len(steps))
        lines.append(line)
    return markdown(lines)


def main(args: argparse.Namespace) -> None:
    losses = Curves.of(read(args.json), args.task)
    if DENSE not in losses.curves:
        sys.exit(f"{args.json} has no run of {DENSE} for {args.task}: python benchmarks/front.py --tasks {args.task}")
    if args.quick:
        quick(args)
    parts = [
        "# Time to a loss",
        f"examples/bytelm.py, base (3.3 million parameters), AdamW, batch 8, {args.workers} workers. Recipes run on "
        f"the network named, an emulated host for every worker. The loss is the one that {DENSE} ends at after "
        f"{losses.dense_steps()} steps, held out, of the same seed. A step's time is the median over rounds (least to "
        "most). Time is steps times their length over those of plain DDP without a network's limit: 1.00 would be a "
        f"network that costs nothing. Steps of the PowerSGD hook are taken to be as many as those of "
        f"`{STEPS_AS[HOOK]}`.",
        provenance(),
        *(f"## {network}\n\n{table(measure(network, args), losses)}" for network in args.networks),
    ]
    write_page(args.output, parts)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Time to a loss on slow networks.")
    options.add_argument("--networks", nargs="+", default=["100mbit,20ms", "10mbit,100ms"], metavar="SPEC")
    options.add_argument("--recipes", nargs="+", default=["DiLoCo(period=50, fragments=4, delay=5) + Int8()"])
    options.add_argument("--task", default="bytelm-base", help="of benchmarks/front.py")
    options.add_argument("--json", type=Path, default=Path("runs/front.json"), metavar="FILE", help="its losses")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--patience-seconds", type=float, default=300, help="for a peer's run")
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "time-to-loss.md")
    options.add_argument("--quick", action="store_true", help="a few steps, in a file of its own")
    main(options.parse_args())
