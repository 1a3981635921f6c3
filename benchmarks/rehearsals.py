"""Rehearsals: `gossamer rehearse` on models and GPUs that are not here, beside what was estimated.

Four workers on emulated hosts, published step times of a 2080 Ti with batch 32, real bytes. Writes
docs/benchmarks/rehearsals.md. Needs root for the emulated networks.

    python benchmarks/rehearsals.py [--steps 10] [--output FILE.md]
    python benchmarks/rehearsals.py --quick     # a minute, into runs/quick, to see that it runs
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance, scratch  # found only after the line above

WORKERS = 4
STEP_SECONDS = {"resnet18": 0.137, "resnet50": 0.330, "swin-large": 0.940}  # of a 2080 Ti, batch 32
PATIENCE_SECONDS = 1800
CORES = "Encoding and decoding ran on "  # how the line begins that the page says once for all


class Rehearsal(NamedTuple):
    """One command."""

    shapes: str
    network: str
    recipes: tuple[str, ...]

    def arguments(self, steps: int) -> list[str]:
        """What follows `gossamer rehearse`."""
        options = ["--workers", str(WORKERS), "--shapes", self.shapes, "--network", self.network]
        options += ["--step-seconds", str(STEP_SECONDS[self.shapes]), "--steps", str(steps)]
        return [*options, *(part for recipe in self.recipes for part in ("--recipe", recipe))]


DENSE, HALF, TOP_K, DGC = "Dense()", 'Dense(dtype="bfloat16")', "TopK(0.01)", "DGC(0.001)"
REHEARSALS = (
    Rehearsal("resnet18", "1gbit,1ms", (DENSE, HALF, TOP_K, DGC)),
    Rehearsal("resnet50", "1gbit,1ms", (DENSE, DGC)),
    Rehearsal("swin-large", "1gbit,1ms", (DENSE, DGC)),
    Rehearsal("resnet18", "100mbit,1ms", (DENSE, DGC)),
    Rehearsal("resnet50", "100mbit,1ms", (DENSE, DGC)),
    Rehearsal("resnet50", "5gbit", (HALF, DGC)),
    Rehearsal("resnet50", "10gbit", (HALF, DGC)),
)


def rehearse(rehearsal: Rehearsal, steps: int) -> str:
    """The command and what it printed, as a part of the page."""
    arguments = rehearsal.arguments(steps)
    command = [sys.executable, "-m", "gossamer", "rehearse", *arguments]
    shown = shlex.join(["gossamer", "rehearse", *arguments])
    print(shown, file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    if done.returncode:
        sys.exit(f"{shown} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    title, *rest = section(done.stdout)
    return "\n\n".join([title, f"    {shown}", *rest])


def section(printed: str) -> list[str]:
    """What `gossamer rehearse` printed, as parts of a page: a heading, what was rehearsed, a table, and remarks."""
    about, table, *remarks = printed.strip().split("\n\n")
    told = [re.split(r"  +", line, maxsplit=1) for line in about.splitlines()]
    (_, model), (_, size), (_, step), (_, workers) = told
    name, _, variant = model.partition(", ")
    workers, _, network = re.sub(r" \(emulated: (switch|kernel)\)$", "", workers).partition(", network ")
    head, *rows = (columns(line) for line in table.splitlines())
    _, *ends = head
    lines = [list(head.values()), ["---", *["---:"] * len(ends)]]
    lines += [[f"`{row[min(row)]}`", *(row.get(end, "") for end in ends)] for row in rows]
    said = [line for part in remarks for line in part.splitlines() if not line.startswith(CORES)]
    return [
        f"## {name}, {network}",
        f"{variant[:1].upper()}{variant[1:]}. {size}; a step is {step}; {workers} workers.",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
        *said,
    ]


def columns(line: str) -> dict[int, str]:
    """The cells of a printed line by where they end: all columns but the first are flush right."""
    return {found.end(): found[0] for found in re.finditer(r"\S+(?: \S+)*", line)}


def ratios(rehearsed: Sequence[str]) -> str:
    """For example: `DGC(0.001)` 1.1 to 1.4 times, with `Dense()` 4.3 to 44 times"""
    said = []
    for recipe in (DGC, DENSE):
        cells = re.compile(rf"^\| `{re.escape(recipe)}` \|[^|]*\|[^|]*\| ([0-9.]+) \|", re.MULTILINE)
        found = [float(each) for text in rehearsed for each in cells.findall(text)]
        if found:
            said.append(f"`{recipe}` {min(found):.3g} to {max(found):.3g} times")
    return ", with ".join(said)


def main(args: argparse.Namespace) -> None:
    rehearsals: tuple[Rehearsal, ...] = REHEARSALS
    if args.quick:
        rehearsals, args.steps, args.output = (Rehearsal("resnet18", "1gbit,1ms", (DGC,)),), 3, scratch(args.output)
    rehearsed = [rehearse(each, args.steps) for each in rehearsals]
    parts = [
        "# Rehearsals of larger models on GPUs",
        f"How long would a step of larger models take on GPUs? With {ratios(rehearsed)} as long as alone. "
        f"`gossamer rehearse` sleeps instead of computing, and sends real bytes: {WORKERS} workers on emulated hosts, "
        "published step times of a 2080 Ti with batch 32. "
        "**Ratio** is relative to a step without communication; the column before it was estimated before each run. "
        f"One run per row, {args.steps} steps and more, medians. {CORES}the {os.cpu_count()} cores of this machine, "
        "which all workers share. Nothing was trained, so this page has no losses.",
        provenance(),
        *rehearsed,
    ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Rehearsals of models and GPUs that are not here.")
    options.add_argument("--steps", type=int, default=10, help="of each recipe, at least")
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "rehearsals.md")
    options.add_argument("--quick", action="store_true", help="a few steps of one, in a file of its own")
    main(options.parse_args())
