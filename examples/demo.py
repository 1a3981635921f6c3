"""One small model, trained three ways on this machine: by one worker, by four, and by four who talk less.

python examples/demo.py [--steps 400]
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().with_name("bytelm.py")
RECORDS = Path("runs", "demo")
BITS_PER_SECOND = 10e6
WAYS = {  # name: (recipe, workers, batch); every way learns from 32 windows a step
    "one worker": ("Dense()", 1, 32),
    "four workers": ("Dense()", 4, 8),
    "four who talk less": ("TopK(density=0.01)", 4, 8),
}


def train(name: str, steps: int) -> dict[str, Any]:
    """Train as somebody at a terminal would; returns the run's record."""
    recipe, workers, batch = WAYS[name]
    record = RECORDS / f"{name.replace(' ', '-')}.json"
    command = ["gossamer", "run", "--workers", str(workers), "--recipe", recipe, "--json", str(record)]
    command += [str(SCRIPT), "--steps", str(steps), "--batch", str(batch)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    subprocess.run([Path(sys.executable).with_name("gossamer"), *command[1:]], check=True)
    return dict(json.loads(record.read_text()))


def row(name: str, record: dict[str, Any]) -> str:
    bytes_sent = record["bytes_sent_per_step"]["accounted"]
    sending_seconds = 8 * bytes_sent / BITS_PER_SECOND
    return (
        f"{name:20}{WAYS[name][0]:20}{record['final']['validation_loss']:10.3f}{bytes_sent / 1000:12,.0f} kB"
        f"{1000 * record['seconds_per_step']['median']:9.0f} ms{1000 * sending_seconds:13,.0f} ms"
    )


def main(steps: int) -> None:
    RECORDS.mkdir(parents=True, exist_ok=True)
    records = {name: train(name, steps) for name in WAYS}
    print(f"\nAfter {steps} steps of 32 windows each:\n")
    print(f"{'':40}{'held-out':>10}{'sent a step':>15}{'a step':>12}{'sending at':>16}")
    print(f"{'':20}{'recipe':20}{'loss':>10}{'by each':>15}{'here':>12}{'10 Mbit/s':>16}")
    for name, record in records.items():
        print(row(name, record))
    print("\nHere the workers share one machine: bytes are free and the processor is not. The last column is")
    print(f"arithmetic, the time that a step's bytes would take on a slow line. Records: {RECORDS}/")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="One small model, trained three ways on this machine.")
    options.add_argument("--steps", type=int, default=400)
    main(options.parse_args().steps)
