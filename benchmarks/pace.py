"""Pace on a long, slow network: recipes there beside plain DDP without any limit.

Rounds of one run each, one after the other on the same machine; a step's time is the mean over whole periods, so that
the steps that talk count as much as those that do not. Writes docs/benchmarks/pace.md.

    python benchmarks/pace.py [--networks SPEC ...] [--recipes RECIPE ...] [--rounds 3] [--output FILE.md]
    python benchmarks/pace.py --quick           # a minute, into runs/quick, to see that it runs
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance, scratch  # found only after the line above
from benchmarks.report import markdown, write_page

DDP = "plain DDP, no limit"
WARM_UP = 10
MODEL = "--size", "base", "--batch", "8"  # options of examples/bytelm.py and benchmarks/ddp.py
RECIPES = [
    "TopK(density=0.001)",
    "PowerSGD(rank=4)",
    "DiLoCo(period=50, fragments=4, delay=5) + Int8()",
]


def run(options: Sequence[str], script: Sequence[str], args: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gossamer", "run", "--workers", str(args.workers), "--logs", folder]
        done = subprocess.run([*command, *options, *script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{shlex.join([*command, *options, *script])} failed:\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout + done.stderr


def ddp_seconds(args: argparse.Namespace, model: Sequence[str] = MODEL) -> float:
    """Of a step, on average."""
    said = run([], ["benchmarks/ddp.py", *model, "--steps", str(WARM_UP + args.steps)], args)
    (text,) = [line.partition("RESULT ")[2] for line in said.splitlines() if "RESULT " in line]
    return statistics.fmean(json.loads(text)["seconds"][WARM_UP:])


def seconds(recipe: str, network: str, args: argparse.Namespace, model: Sequence[str] = MODEL) -> float:
    """Of a step, on average."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        options = ["--network", network, "--recipe", recipe, "--json", str(record)]
        run(options, ["examples/bytelm.py", *model, "--steps", str(WARM_UP + args.steps)], args)
        moments = [moment for _, moment, _ in json.loads(record.read_text())["metrics"]["loss"]]
    return float(moments[-1] - moments[WARM_UP - 1]) / (len(moments) - WARM_UP)


def measure(network: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step by round, of DDP and each recipe."""
    found: dict[str, list[float]] = {name: [] for name in (DDP, *args.recipes)}
    for number in range(args.rounds):
        for name, taken in found.items():
            taken.append(ddp_seconds(args) if name == DDP else seconds(name, network, args))
            shown = f"{network}: round {number + 1} of {args.rounds}: {name}: {1000 * taken[-1]:.0f} ms"
            print(shown, file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[float]]) -> str:
    lines = [
        {
            "": f"`{name}`" if name != DDP else name,
            "step": f"{1000 * statistics.median(taken):.0f} ms",
            "least to most": f"{1000 * min(taken):.0f} to {1000 * max(taken):.0f} ms" if len(taken) > 1 else "",
            "pace": f"{statistics.median(plain / ours for plain, ours in zip(found[DDP], taken, strict=True)):.2f}",
        }
        for name, taken in found.items()
    ]
    return markdown(lines)


def quick(args: argparse.Namespace) -> None:
    """One recipe, a few steps of one round, in a file of its own."""
    args.networks, args.recipes, args.steps, args.rounds = ["100mbit,5ms"], ["DiLoCo(period=4) + Int8()"], 8, 1
    args.output = scratch(args.output)


def main(args: argparse.Namespace) -> None:
    if args.quick:
        quick(args)
    several = f": the median, the least and the most of {args.rounds} rounds, in which all take turns"
    rounds = several if args.rounds > 1 else ""
    parts = [
        "# Pace on a long, slow network",
        "Can training on a slow network keep the pace of DDP on a fast one?",
        f"examples/bytelm.py, base (3.3 million parameters), batch 8, {args.workers} workers. Recipes run on the "
        "network of the heading, an emulated host for every worker; DDP runs without a limit. A step is the mean of "
        f"{args.steps} after {WARM_UP}{rounds}. Pace is DDP's step over the recipe's of the same round (median).",
        provenance(),
        *(f"## {network}\n\n{table(measure(network, args))}" for network in args.networks),
    ]
    write_page(args.output, parts)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Pace on a long, slow network.")
    options.add_argument("--networks", nargs="+", default=["100mbit,20ms", "10mbit,20ms"], metavar="SPEC")
    options.add_argument("--recipes", nargs="+", default=RECIPES)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "pace.md")
    options.add_argument("--quick", action="store_true", help="a few steps, in a file of their own")
    main(options.parse_args())
