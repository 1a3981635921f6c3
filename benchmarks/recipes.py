"""Recipes: what compression costs in loss, and what Dense() reaches for the same bytes.

Four workers on this machine train examples/bytelm.py with each recipe, with its twin that forgets what it lost
(feedback=False), and with Dense() for as many steps as the recipe's bytes would have paid for. Bytes per step are
compared with what `gossamer explain` foretells.

    python benchmarks/recipes.py [--steps 300] [--seeds 0 1 2] [--size small] [--json FILE]
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gossamer.environment.host_info import machine

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "examples/bytelm.py"
RECIPES = {
    "TopK(density=0.01)": "TopK(density=0.01, feedback=False)",
    "PowerSGD(rank=4)": "PowerSGD(rank=4, feedback=False)",
    "Int8()": "Int8(feedback=False)",
}


def gossamer(*arguments: str) -> str:
    command = [sys.executable, "-m", "gossamer", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def train(recipe: str, steps: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run's record."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        options = ["--workers", str(args.workers), "--recipe", recipe, "--json", str(record), "--logs", folder]
        training = ["--size", args.size, "--steps", str(steps), "--seed", str(seed)]
        gossamer("run", *options, SCRIPT, *training)
        found: dict[str, Any] = json.loads(record.read_text())
    print(f"  {recipe:38} {steps:5} steps  seed {seed}  loss {loss(found):.3f}", file=sys.stderr, flush=True)
    return found


def loss(record: dict[str, Any]) -> float:
    return float(record["final"]["validation_loss"])


def sent(record: dict[str, Any]) -> float:
    return float(record["bytes_sent_per_step"]["accounted"])


def foretold(recipe: str, args: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        forecast = Path(folder) / "forecast.json"
        options = ["--workers", str(args.workers), "--json", str(forecast)]
        gossamer("explain", recipe, *options, SCRIPT, "--size", args.size)
        return float(json.loads(forecast.read_text())["bytes_sent_per_step"])


def compare(recipe: str, dense: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """A recipe beside Dense() at equal steps and at equal bytes, and beside its twin; losses by seed."""
    ours = [train(recipe, args.steps, seed, args) for seed in args.seeds]
    affordable = max(1, round(args.steps * sent(ours[0]) / sent(dense[0])))
    return {
        "recipe": recipe,
        "loss": [loss(record) for record in ours],
        "loss_without_feedback": [loss(train(RECIPES[recipe], args.steps, seed, args)) for seed in args.seeds],
        "dense_steps_for_equal_bytes": affordable,
        "dense_loss_at_equal_bytes": [loss(train("Dense()", affordable, seed, args)) for seed in args.seeds],
        "bytes_sent_per_step": sent(ours[0]),
        "foretold_bytes_sent_per_step": foretold(recipe, args),
        "workers_agree": all(record["workers_agree"] for record in ours),
    }


def show(report: dict[str, Any]) -> None:
    def middle(losses: list[float]) -> str:
        spread = f" +- {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        return f"{statistics.mean(losses):.3f}{spread}"

    print("machine ", ", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    print("command ", report["command"])
    print("held-out loss in nats per byte, mean over seeds +- standard deviation\n")
    dense = report["dense"]
    print(f"{'Dense()':20} {middle(dense['loss']):16} {dense['bytes_sent_per_step']:>12,.0f} bytes a step and worker")
    base = statistics.mean(dense["loss"])
    for row in report["rows"]:
        gap = 100 * (statistics.mean(row["loss"]) / base - 1)
        told = row["foretold_bytes_sent_per_step"]
        print(
            f"{row['recipe']:20} {middle(row['loss']):16} {row['bytes_sent_per_step']:>12,.0f} bytes"
            f"  ({'as' if told == row['bytes_sent_per_step'] else 'NOT as'} foretold: {told:,.0f})  gap {gap:+.1f} %\n"
            f"{'':20} {middle(row['loss_without_feedback']):16} without feedback\n"
            f"{'':20} {middle(row['dense_loss_at_equal_bytes']):16} Dense() for the same bytes:"
            f" {row['dense_steps_for_equal_bytes']} steps"
        )


def main(args: argparse.Namespace) -> None:
    dense = [train("Dense()", args.steps, seed, args) for seed in args.seeds]
    report = {
        "machine": machine(),
        "command": shlex.join(["python", *sys.argv]),
        "dense": {"loss": [loss(record) for record in dense], "bytes_sent_per_step": sent(dense[0])},
        "rows": [compare(recipe, dense, args) for recipe in RECIPES],
    }
    show(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Recipes beside Dense() at equal steps and at equal bytes.")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--size", default="small")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--json", metavar="FILE")
    main(options.parse_args())
