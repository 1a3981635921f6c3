"""Train one small model on a slow network for the same time, with plain DDP and with three recipes.

python examples/demo.py [--seconds 25] [--seeds 1] [--network 100mbit,20ms] [--size small]

Every worker has its own emulated host and link. If the kernel cannot emulate them, Gossamer delays its own messages by
the same time, and Dense(), which sends the same bytes as DDP, replaces DDP.
"""

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from gossamer.comm.network import read_network
from gossamer.plan.emulation import plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.demo_report import Record, Runs, draw, losses, table  # found only after the line above

HERE, RECORDS = Path(__file__).resolve().parent, Path("runs", "demo")
WORKERS = 4


@dataclass(frozen=True)
class Way:
    """One line of the comparison."""

    name: str
    recipe: str | None  # None: torch's DistributedDataParallel
    evaluate_every: int  # steps

    def command(self, args: argparse.Namespace, seed: int, record: Path) -> list[str]:
        command = ["gossamer", "run", "--workers", str(WORKERS), "--network", args.network]
        if self.recipe is None:
            script = [str(HERE / "bytelm_ddp.py"), "--json", str(record)]
        else:
            script = ["--recipe", self.recipe, "--json", str(record), str(HERE / "bytelm.py")]
        script += ["--size", args.size, "--seed", str(seed), "--seconds", f"{args.seconds:g}", "--steps", "100000"]
        script += ["--learning-rate", f"{args.learning_rate:g}", "--evaluate-every", str(self.evaluate_every)]
        return [*command, *script]


DDP, STAND_IN = Way("plain DDP", None, 10), Way("the bytes of DDP", "Dense()", 10)
RECIPES = (
    Way("4 bits", "Float4()", 20),
    Way("a late mean", "DelayedAveraging(delay=4) + Float4()", 40),
    Way("local steps", "LocalSGD(period=8) + Float4()", 40),
)


def train(way: Way, args: argparse.Namespace, seed: int, console: Console) -> Record:
    """Run the command, show its latest line of output, and return its record."""
    file, said = RECORDS / f"{way.name.replace(' ', '-')}-{seed}.json", list[str]()
    command = way.command(args, seed, file)
    console.print(f"\n$ {shlex.join(command)}", highlight=False, markup=False, soft_wrap=True)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        console.status(f"{way.name}: starting") as status,
        subprocess.Popen([sys.executable, "-m", *command], **pipes) as run,
    ):
        for line in run.stdout or ():
            said.append(line)
            status.update(escape(f"{way.name}: {line.strip()[:100]}"))
    if run.returncode:
        raise SystemExit(f"It ended with {run.returncode}:\n{''.join(said)}")
    record: Record = json.loads(file.read_text())
    console.print(f"{way.name}: held-out loss {losses(record)[-1]:.3f} after {record['steps']} steps", highlight=False)
    return record


def main(args: argparse.Namespace) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    emulated = plan(read_network(args.network, WORKERS)).emulation != "paced"
    ways, console = (DDP if emulated else STAND_IN, *RECIPES), Console()
    print(f"{WORKERS} workers, on lines of {args.network}, learn {args.seconds:g} s to guess the next byte of code.")
    seeds = range(args.seeds)
    runs = [Runs(way.name, way.recipe, [train(way, args, seed, console) for seed in seeds]) for way in ways]
    print(f"\n{table(runs)}\n")
    print(f"Held-out loss when {args.seconds:g} s were up, and the seconds until it was where {runs[0].name}'s ended.")
    draw(runs, f"{WORKERS} workers, each on a line of {args.network}", args.seconds, args.picture)
    print(f"Picture: {args.picture}    Records: {RECORDS}/")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="One small model on a slow network, four ways.")
    options.add_argument("--seconds", type=float, default=25.0, help="of training, each way")
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--network", default="100mbit,20ms", help="RATE,ROUND_TRIP of every worker's line")
    options.add_argument("--size", default="small", help="of the model: small, base, large")
    options.add_argument("--learning-rate", type=float, default=0.008, help="every way's best of 0.002 to 0.016")
    options.add_argument("--picture", type=Path, default=RECORDS / "demo.png")
    main(options.parse_args())
