"""Step times on emulated networks: torch's DistributedDataParallel and its hooks beside Gossamer's recipes.

One run after the other on the same emulated hosts, the same model, batch and number of workers; every row's ratio is to
plain DDP without a network limit. Writes docs/benchmarks/network.md.

    python benchmarks/network.py [--networks SPEC ...] [--steps 12] [--output FILE.md]
    python benchmarks/network.py --quick        # a minute, into runs/quick, to see that it runs
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance, scratch  # found only after the line above

UNLIMITED = "none"
TODAY = {
    "DDP": ["--hook", "none"],
    "DDP + fp16 hook": ["--hook", "fp16"],
    "DDP + PowerSGD hook": ["--hook", "powersgd"],
    "DDP + PowerSGD hook, one bucket": ["--hook", "powersgd", "--one-bucket"],
}
RECIPES = ["Dense()", "Dense(dtype='bfloat16')", "Int8()", "TopK(density=0.01)", "PowerSGD(rank=4)"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds per step after warm-up; an error's last line where there are none."""

    median: float = 0.0
    p10: float = 0.0
    p90: float = 0.0
    error: str = ""


def launch(network: str, options: Sequence[str], script: Sequence[str], args: argparse.Namespace) -> tuple[int, str]:
    lab = [] if network == UNLIMITED else ["--network", network]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gossamer", "run", "--workers", str(args.workers), *lab, "--logs", folder]
        try:
            run = subprocess.run(
                [*command, *options, *script], cwd=ROOT, capture_output=True, text=True, timeout=args.patience_seconds
            )
        except subprocess.TimeoutExpired:
            return 1, f"not done after {args.patience_seconds} s"
    return run.returncode, run.stdout + run.stderr


def today(network: str, name: str, args: argparse.Namespace, model: Sequence[str] = ()) -> Result:
    script = ["benchmarks/ddp.py", *TODAY[name], *model, "--steps", str(args.steps + 3)]
    code, said = launch(network, [], script, args)
    for line in said.splitlines():
        _, found, text = line.partition("RESULT ")
        if found:
            return result(json.loads(text)["seconds"][3:])
    return Result(error=cause(said) or f"ended with {code}")


def ours(network: str, recipe: str, args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        options = ["--recipe", recipe, "--json", str(record)]
        script = ["examples/bytelm.py", "--size", "base", "--steps", str(args.steps + 3)]
        code, said = launch(network, options, script, args)
        if code or not record.exists():
            return Result(error=cause(said) or f"ended with {code}")
        losses = json.loads(record.read_text())["metrics"]["loss"]
    moments = [seconds for _, seconds, _ in losses]
    return result([late - early for early, late in pairwise(moments[2:])])


def result(seconds: Sequence[float]) -> Result:
    deciles = statistics.quantiles(seconds, n=10)
    return Result(median=statistics.median(seconds), p10=deciles[0], p90=deciles[-1])


def cause(said: str) -> str:
    """The line of an error's output that names its cause."""
    telling = [line for line in said.splitlines() if "Error" in line or "op.preamble" in line or "not done" in line]
    return telling[-1].strip()[:110] if telling else ""


def table(network: str, rows: dict[str, Result], floor: float) -> str:
    lines = [f"\n## {'No limit' if network == UNLIMITED else network}\n"]
    lines += ["| | step | 10 % to 90 % | over plain DDP without a limit |", "|---|---:|---:|---:|"]
    for name, row in rows.items():
        if row.error:
            lines.append(f"| {name} | - | - | {row.error} |")
        else:
            spread = f"{1000 * row.p10:.0f} to {1000 * row.p90:.0f} ms"
            lines.append(f"| {name} | {1000 * row.median:.0f} ms | {spread} | {row.median / floor:.2f} |")
    return "\n".join(lines)


def quick(args: argparse.Namespace) -> None:
    """A row of each kind on one network, in a file of its own."""
    args.networks, args.rows, args.steps = ["100mbit,5ms"], ["DDP", "TopK(density=0.01)"], 4
    args.output = scratch(args.output)


def main(args: argparse.Namespace) -> None:
    if args.quick:
        quick(args)
    found: dict[str, dict[str, Result]] = {}
    for network in [UNLIMITED, *args.networks]:
        found[network] = {}
        for name in args.rows:
            row = today(network, name, args) if name in TODAY else ours(network, name, args)
            found[network][name] = row
            shown = row.error or f"{1000 * row.median:.0f} ms"
            print(f"{network:24} {name:34} {shown}", file=sys.stderr, flush=True)
    floor = found[UNLIMITED]["DDP"].median
    text = (
        "# Step times on emulated networks\n\n"
        f"examples/bytelm.py, base (3.3 million parameters), batch 8, {args.workers} workers; median of "
        f"{args.steps} steps after three. Every worker has its own host on an emulated network; rates are per host "
        "and direction. The workers share the cores, so computing takes as long as without a network.\n\n"
        f"{provenance()}\n"
    )
    text += "".join(table(network, rows, floor) + "\n" for network, rows in found.items())
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    print(text)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Step times on emulated networks.")
    options.add_argument("--networks", nargs="+", default=["1gbit,20ms", "100mbit,20ms", "10mbit,20ms"])
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--patience-seconds", type=float, default=400)
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "network.md")
    options.add_argument("--rows", nargs="+", choices=[*TODAY, *RECIPES], default=[*TODAY, *RECIPES], metavar="NAME")
    options.add_argument("--quick", action="store_true", help="a few steps, in a file of their own")
    main(options.parse_args())
