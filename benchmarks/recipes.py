"""Recipes: the retained benefit of a compressor, and the loss that Dense() reaches for the same bytes.

Four workers on this machine train examples/bytelm.py with each recipe, without its error feedback (feedback=False),
without communication, and with Dense() for as many steps as the recipe's bytes would have paid for. Bytes per step are
compared with those of `gossamer explain`. Writes docs/benchmarks/recipes.md.

    python benchmarks/recipes.py [--steps 300] [--seeds 0 1 2] [--size small] [--json FILE] [--output FILE.md]
    python benchmarks/recipes.py --quick        # a minute, into runs/quick, to see that it runs
    python benchmarks/recipes.py --verify 3     # train the 3 shortest rows again, and note it on the page
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.kept import verify_rows  # found only after the line above
from benchmarks.markdown_tables import named_rows
from benchmarks.provenance import ROOT, provenance, scratch
from benchmarks.report import markdown

from gossamer.algorithms.recipes import retained_benefit
from gossamer.comm.environment.host_info import machine

PAGE = ROOT / "docs" / "benchmarks" / "recipes.md"
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


def estimated(recipe: str, args: argparse.Namespace) -> float:
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
        "estimated_bytes_sent_per_step": estimated(recipe, args),
        "workers_agree": all(record["workers_agree"] for record in ours),
    }


def mean_text(losses: list[float]) -> str:
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"{statistics.mean(losses):.3f}{spread}"


def page(report: dict[str, Any], args: argparse.Namespace) -> str:
    """The page's text. Raises SystemExit where a run did not send the estimate: that is an error, not a result."""
    dense, silent = report["dense"], report["silent"]
    lines = [
        _line("`Dense()`", dense["loss"], f"{dense['bytes_sent_per_step']:,.0f}"),
        _line("`Silent()`", silent["loss"]),
    ]
    for row in report["rows"]:
        if row["bytes_sent_per_step"] != row["estimated_bytes_sent_per_step"]:
            sys.exit(f"{row['recipe']} sent {row['bytes_sent_per_step']} bytes a step, not as estimated: {row}")
        arms = (dict(enumerate(losses)) for losses in (row["loss"], silent["loss"], dense["loss"]))
        share = retained_benefit.text(
            retained_benefit.retained_benefit(next(arms), silent=next(arms), dense=next(arms))
        )
        same = f"... `Dense()` for the same bytes ({row['dense_steps_for_equal_bytes']} steps)"
        lines += [
            _line(f"`{row['recipe']}`", row["loss"], f"{row['bytes_sent_per_step']:,.0f}", share),
            _line("... without feedback", row["loss_without_feedback"]),
            _line(same, row["dense_loss_at_equal_bytes"]),
        ]
    parts = [
        "# Loss of common recipes",
        "How much loss do three common recipes cost, with and without error feedback?",
        f"examples/bytelm.py, {args.size}, {args.workers} workers, AdamW, {args.steps} steps, seeds "
        f"{', '.join(map(str, args.seeds))}; held-out loss in nats per byte, mean and standard deviation over seeds. "
        "Bytes per step equal those of `gossamer explain`, to the byte. `retained` is the benefit of communication "
        "that the recipe keeps: 100 % has the loss of `Dense()`, 0 % that of workers that do not communicate "
        "(`Silent()`), with a 95 % interval over seeds. All arms have the script's learning rate.",
        provenance(),
        markdown(lines),
        *verdict(report["rows"]),
    ]
    return "\n\n".join(parts) + "\n"


def verdict(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For which recipes feedback makes more difference than seeds do; of one seed nothing can be said."""
    if len(rows[0]["loss"]) > 1:
        found: dict[bool, list[str]] = {True: [], False: []}
        for row in rows:
            better = statistics.mean(row["loss_without_feedback"]) - statistics.mean(row["loss"])
            seeds = max(map(statistics.stdev, (row["loss"], row["loss_without_feedback"])))
            found[better > 2 * seeds].append(f"`{row['recipe']}`")
        yes, no = (", ".join(found[is_better]) or "none" for is_better in (True, False))
        yield f"Error feedback makes a larger difference than the seed for {yes}, and not for {no}."


def _line(name: str, losses: list[float], nbytes: str = "", share: str = "") -> dict[str, str]:
    return {"": name, "loss": mean_text(losses), "bytes per step and worker": nbytes, "retained": share}


def trained_by(name: str, steps: int) -> tuple[str, int]:
    """Recipe and steps of a row, by its name."""
    recipe, *texts = re.findall("`([^`]+)`", name)
    if found := re.search(r"for the same bytes \((\d+) steps\)", name):
        return texts[0], int(found[1])
    return RECIPES[recipe] if name.endswith("without feedback") else recipe, steps


def verify(args: argparse.Namespace) -> None:
    """Rows of the fewest steps first; of equal ones in the order of the page."""
    known = [name.partition(" | ")[2] for name in named_rows(args.output.read_text(encoding="utf-8"))]
    chosen = sorted(known, key=lambda name: trained_by(name, args.steps)[1])[: args.verify]
    made: dict[str, dict[str, str]] = {}
    for name in chosen:
        recipe, steps = trained_by(name, args.steps)
        records = [train(recipe, steps, seed, args) for seed in args.seeds]
        made[f"Loss of common recipes | {name}"] = {"loss": mean_text([loss(record) for record in records])}
    verify_rows(args.output, "", made)


def quick(args: argparse.Namespace) -> None:
    """One recipe for a few steps, in a file of its own."""
    args.steps, args.seeds, args.recipes, args.output = 8, [0], ["TopK(density=0.01)"], scratch(args.output)


def main(args: argparse.Namespace) -> None:
    if args.quick:
        quick(args)
    if args.verify:
        verify(args)
        return
    dense = [train("Dense()", args.steps, seed, args) for seed in args.seeds]
    report = {
        "machine": machine(),
        "command": shlex.join(["python", *sys.argv]),
        "dense": {"loss": [loss(record) for record in dense], "bytes_sent_per_step": sent(dense[0])},
        "silent": {"loss": [loss(train("Silent()", args.steps, seed, args)) for seed in args.seeds]},
        "rows": [compare(recipe, dense, args) for recipe in args.recipes],
    }
    text = page(report, args)
    print(text)
    args.output.write_text(text, encoding="utf-8")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Recipes beside Dense() at equal steps and at equal bytes.")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="TEXT")
    options.add_argument("--size", default="small")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--json", metavar="FILE")
    options.add_argument("--output", type=Path, default=PAGE, metavar="FILE.md")
    options.add_argument("--quick", action="store_true", help="a few steps, in a file of their own")
    options.add_argument("--verify", type=int, metavar="N", help="train N rows of --output again and compare them")
    main(options.parse_args())
