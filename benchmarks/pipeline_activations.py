"""Pipeline activations: step time, bytes and loss of four pipeline stages on a slow network, by codec.

Each row is one run a seed of benchmarks/pipeline_stage.py, every stage on an emulated host. Prints a page with machine,
command and spread. Needs root or user namespaces for the emulated network.

    python benchmarks/pipeline_activations.py [--network 100mbit,20ms] [--steps 64] [--seeds 3] [--output FILE.md]
    python benchmarks/pipeline_activations.py --quick     # a few steps of two rows, to see that it runs
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance  # found only after the line above

STAGES = 4
WARMUP = 3
LAST = 8  # steps whose mean loss is shown: one epoch of 256 windows in batches of 32
DIFFERENCE = ["--feedback", "difference"]
ROWS: dict[str, list[str]] = {
    "no boundary": [],
    "`Dense('bfloat16')`": ["--codec", "Dense('bfloat16')"],
    "`Int8()`": ["--codec", "Int8()"],
    "`Float4()`": ["--codec", "Float4()"],
    '`Float4()`, `feedback="difference"`': ["--codec", "Float4()", *DIFFERENCE],
    "`SignMagnitude()`": ["--codec", "SignMagnitude()"],
    '`SignMagnitude()`, `feedback="difference"`': ["--codec", "SignMagnitude()", *DIFFERENCE],
}


def run(options: Sequence[str], seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """What the first stage printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gossamer", "run", "--workers", str(STAGES), "--network", args.network]
        script = ["benchmarks/pipeline_stage.py", *options, "--steps", str(args.steps), "--seed", str(seed)]
        done = subprocess.run(
            [*command, "--logs", folder, *script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=args.patience_seconds,
        )
    said = done.stdout + done.stderr
    for line in said.splitlines():
        _, found, text = line.partition("RESULT ")
        if found:
            return json.loads(text)  # type: ignore[no-any-return]
    sys.exit(f"{' '.join(script)} ended with {done.returncode}:\n{said[-3000:]}")


def row(name: str, runs: Sequence[dict[str, Any]]) -> str:
    seconds = [each for found in runs for each in found["seconds"][WARMUP:]]
    deciles = statistics.quantiles(seconds, n=10)
    losses = [statistics.mean(found["losses"][-LAST:]) for found in runs]
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    cells = [
        name,
        f"{1000 * statistics.median(seconds):.0f} ms",
        f"{1000 * deciles[0]:.0f} to {1000 * deciles[-1]:.0f} ms",
        f"{statistics.mean(found['step_bytes'] for found in runs) / 1e6:.2f} MB",
        f"{statistics.mean(losses):.3f}{spread}",
        f"{runs[0]['memory_bytes'] / 1e6:.1f} MB",
    ]
    return f"| {' | '.join(cells)} |"


def main(args: argparse.Namespace) -> None:
    rows = ROWS
    if args.quick:
        args.steps, args.seeds = WARMUP + 3, 1
        rows = {name: ROWS[name] for name in ("no boundary", '`Float4()`, `feedback="difference"`')}
    lines = [
        "| what crosses | step | 10 % to 90 % | bytes a step | loss | memory a side |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, options in rows.items():
        lines.append(row(name, [run(options, seed, args) for seed in range(args.seeds)]))
        print(lines[-1], file=sys.stderr, flush=True)
    about = (
        f"benchmarks/pipeline_stage.py, {STAGES} stages by Schedule1F1B, each on a host of its own at {args.network}; "
        f"{args.steps} steps, {args.seeds} seed(s), the first {WARMUP} steps not timed. Bytes are what the hosts' "
        f"interfaces sent; loss is the mean over the last {LAST} steps, in nats a byte, of 256 windows that come again "
        "and again."
    )
    text = "\n\n".join([about, provenance(), "\n".join(lines)]) + "\n"
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="What crosses between pipeline stages, compressed.")
    options.add_argument("--network", default="100mbit,20ms")
    options.add_argument("--steps", type=int, default=64)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--patience-seconds", type=float, default=900)
    options.add_argument("--output", type=Path)
    options.add_argument("--quick", action="store_true", help="a few steps of two rows")
    main(options.parse_args())
