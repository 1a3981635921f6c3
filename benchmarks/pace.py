"""Pace on a long, slow network: recipes there beside plain DDP without any limit.

Rounds of one run each, one after the other on the same machine; a step's time is the mean over whole periods, so that
the steps that talk count as much as those that do not. Writes docs/benchmarks/pace.md.

    python benchmarks/pace.py [--network 10mbit,100ms] [--recipes RECIPE ...] [--rounds 3] [--output FILE.md]
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
DDP = "plain DDP, no limit"
WARM_UP = 10
RECIPES = [
    "DiLoCo(period=50, fragments=4, delay=5) + Int8()",
    "DelayedAveraging(delay=4) + TopK(density=0.001)",
    "DelayedAveraging(delay=4, period=2) + TopK(density=0.001)",
]


def run(options: Sequence[str], script: Sequence[str], args: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gossamer", "run", "--workers", str(args.workers), "--logs", folder]
        done = subprocess.run([*command, *options, *script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{shlex.join([*command, *options, *script])} failed:\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout + done.stderr


def ddp_seconds(args: argparse.Namespace) -> float:
    """Of a step, on average."""
    said = run([], ["benchmarks/ddp.py", "--steps", str(WARM_UP + args.steps)], args)
    (text,) = [line.partition("RESULT ")[2] for line in said.splitlines() if "RESULT " in line]
    return statistics.fmean(json.loads(text)["seconds"][WARM_UP:])


def seconds(recipe: str, args: argparse.Namespace) -> float:
    """Of a step, on average."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        options = ["--network", args.network, "--recipe", recipe, "--json", str(record)]
        run(options, ["examples/bytelm.py", "--size", "base", "--steps", str(WARM_UP + args.steps)], args)
        moments = [moment for _, moment, _ in json.loads(record.read_text())["metrics"]["loss"]]
    return float(moments[-1] - moments[WARM_UP - 1]) / (len(moments) - WARM_UP)


def main(args: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {name: [] for name in (DDP, *args.recipes)}
    for number in range(args.rounds):
        for name, taken in found.items():
            taken.append(ddp_seconds(args) if name == DDP else seconds(name, args))
            print(
                f"round {number + 1} of {args.rounds}: {name}: {1000 * taken[-1]:.0f} ms", file=sys.stderr, flush=True
            )
    lines = [
        "# Pace on a long, slow network\n",
        f"examples/bytelm.py, base (3.3 million parameters), batch 8, {args.workers} workers on a machine of "
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}. Recipes run on `{args.network}`, "
        "an emulated host for every worker; DDP runs without a limit. A step is the mean of "
        f"{args.steps} after {WARM_UP}; of {args.rounds} rounds that take turns the median, the least and the most. "
        "Pace is DDP's step over the recipe's, by rounds.\n",
        f"Command: `{shlex.join(['python', *sys.argv])}`\n",
        "| | step | least to most | pace |",
        "|---|---:|---:|---:|",
    ]
    for name, taken in found.items():
        pace = statistics.median(plain / ours for plain, ours in zip(found[DDP], taken, strict=True))
        spread = f"{1000 * min(taken):.0f} to {1000 * max(taken):.0f} ms"
        shown = f"`{name}`" if name != DDP else name
        lines.append(f"| {shown} | {1000 * statistics.median(taken):.0f} ms | {spread} | {pace:.2f} |")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Pace on a long, slow network.")
    options.add_argument("--network", default="10mbit,100ms")
    options.add_argument("--recipes", nargs="+", default=RECIPES)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "pace.md")
    main(options.parse_args())
