"""Step times on emulated networks: torch's DistributedDataParallel and its hooks beside Gossamer's recipes.

One run after the other on the same emulated hosts, the same model, batch and number of workers; every row's ratio is to
plain DDP without a network limit. Every step's seconds are appended to a file after each run; the page is written from
that file, so an interrupted program continues where it stopped.

    python benchmarks/network.py [--networks SPEC ...] [--steps 12] [--rounds 1] [--times FILE.jsonl] [--output FILE.md]
    python benchmarks/network.py --quick        # a minute, into runs/quick, to see that it runs
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, commit, provenance, scratch  # found only after the line above

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

    seconds: tuple[float, ...] = ()
    median: float = 0.0
    p10: float = 0.0
    p90: float = 0.0
    error: str = ""

    @property
    def text(self) -> str:
        """Median and deciles, or the error."""
        if self.error:
            return self.error
        return f"{1000 * self.median:.0f} ms ({1000 * self.p10:.0f} to {1000 * self.p90:.0f})"


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
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return Result(seconds=tuple(seconds), median=statistics.median(seconds), p10=deciles[0], p90=deciles[-1])


def cause(said: str) -> str:
    """The line of an error's output that names its cause."""
    telling = [line for line in said.splitlines() if "Error" in line or "op.preamble" in line or "not done" in line]
    return telling[-1].strip()[:110] if telling else ""


Times = dict[tuple[str, str], list[Result]]  # one per run, by network and row


def stored(file: Path, args: argparse.Namespace) -> Times:
    """Runs of a file with as many workers and steps as `args` says."""
    found: Times = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        each = json.loads(line)
        if (each["workers"], each["steps"]) == (args.workers, args.steps):
            one = Result(error=each["error"]) if each["error"] else result(each["seconds"])
            found.setdefault((each["network"], each["row"]), []).append(one)
    return found


def store(file: Path, network: str, name: str, row: Result, args: argparse.Namespace) -> None:
    about = {"network": network, "row": name, "workers": args.workers, "steps": args.steps}
    load = round(os.getloadavg()[0], 1)
    line = {**about, "seconds": row.seconds, "error": row.error, "load": load, "commit": commit()}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as writing:
        writing.write(json.dumps(line) + "\n")


def joint(runs: Sequence[Result]) -> Result:
    """The steps of all runs of a row; the last run's error if none was complete."""
    seconds = [each for run in runs for each in run.seconds]
    return result(seconds) if seconds else replace(runs[-1], seconds=())


def tables(times: Times, networks: Sequence[str], rows: Sequence[str]) -> str:
    """Milliseconds of a step, and ratios to plain DDP without a limit if that row was measured."""
    found = {(network, name): joint(runs) for (network, name), runs in times.items()}
    titles = ["no limit" if network == UNLIMITED else network for network in networks]
    head = [f"| | {' | '.join(titles)} |", f"|---|{'---:|' * len(titles)}"]

    def line(name: str, cells: Sequence[str]) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    def cells(name: str, text: Callable[[Result], str]) -> list[str]:
        rows_of_all = [found.get((network, name)) for network in networks]
        return ["-" if each is None else each.error or text(each) for each in rows_of_all]

    lines = ["Median of all steps, with 10 % to 90 %:\n", *head]
    lines += [line(name, cells(name, lambda each: each.text)) for name in rows]
    floor = found.get((UNLIMITED, "DDP"))
    if floor is not None and floor.median:
        unit = floor.median
        lines += ["\nThe medians over plain DDP without a limit:\n", *head]
        lines += [line(name, cells(name, lambda each: f"{each.median / unit:.2f}")) for name in rows]
    return "\n".join(lines)


def quick(args: argparse.Namespace) -> None:
    """A row of each kind on one network, in files of their own."""
    args.networks, args.rows, args.steps, args.rounds = ["100mbit,5ms"], ["DDP", "TopK(density=0.01)"], 4, 1
    args.output = scratch(args.output)
    args.times = args.output.with_suffix(".jsonl")
    args.times.unlink(missing_ok=True)


def main(args: argparse.Namespace) -> None:
    if args.quick:
        quick(args)
    networks = [*dict.fromkeys([UNLIMITED, *args.networks])]
    times = stored(args.times, args)
    for number in range(args.rounds):
        for network in networks:
            for name in args.rows:
                if len(times.get((network, name), [])) > number:
                    continue
                row = today(network, name, args) if name in TODAY else ours(network, name, args)
                store(args.times, network, name, row, args)
                times.setdefault((network, name), []).append(row)
                print(f"{network:24} {name:34} {row.text}", file=sys.stderr, flush=True)
    text = (
        "# Step times on emulated networks\n\n"
        f"examples/bytelm.py, base (3.3 million parameters), batch 8, {args.workers} workers; {args.rounds} runs of "
        f"{args.steps} steps after three. Every worker has its own host on an emulated network; rates are per host "
        "and direction. The workers share the cores, so computing takes as long as without a network.\n\n"
        f"{provenance()}\n\n{tables(times, networks, args.rows)}\n"
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    print(text)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Step times on emulated networks.")
    options.add_argument("--networks", nargs="+", default=["1gbit,20ms", "100mbit,20ms", "10mbit,20ms"])
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--rounds", type=int, default=1, help="runs of each row, in turns")
    options.add_argument("--patience-seconds", type=float, default=400)
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "network.md")
    options.add_argument("--times", type=Path, default=ROOT / "runs" / "network.jsonl", help="every step's seconds")
    options.add_argument("--rows", nargs="+", choices=[*TODAY, *RECIPES], default=[*TODAY, *RECIPES], metavar="NAME")
    options.add_argument("--quick", action="store_true", help="a few steps, in a file of their own")
    main(options.parse_args())
