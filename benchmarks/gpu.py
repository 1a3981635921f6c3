"""GPU benchmark: encoders, a training step, and two workers over a slow network; writes docs/benchmarks/gpu.md.

    python benchmarks/gpu.py [--device cuda:0] [--only encoders step network] [--rounds 9]
    python benchmarks/gpu.py --device cpu --small       # a minute, into runs/quick, to see that it runs

Prints the device, versions, this command, medians and spreads, and puts them between the page's markers. `network`
needs root or user namespaces, as every --network does.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import gpu_encoders, gpu_network, gpu_step  # found only after the line above
from benchmarks.gpu_device import about, refuse_missing
from benchmarks.page import put_between
from benchmarks.provenance import ROOT, provenance, scratch

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
PARTS = ("encoders", "step", "network")
ELEMENTS, SMALL_ELEMENTS = 25 * 2**20, 2**14  # of 100 MB of float32


def parts(args: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], str]]:
    """What measures each part of the page."""
    elements = SMALL_ELEMENTS if args.small else ELEMENTS
    shape, steps = (gpu_step.SMALL, 2) if args.small else (gpu_step.Shape(), 10)
    return {
        "encoders": lambda: gpu_encoders.measure(elements, args.rounds, device, few=args.small),
        "step": lambda: gpu_step.measure(shape, args.rounds, steps, device),
        "network": lambda: gpu_network.measure(1 if args.small else 3, 2 * steps, device, small=args.small),
    }


def main(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    refuse_missing(device)
    torch.set_num_threads(1)
    page = scratch(PAGE) if args.small or device.type == "cpu" else PAGE
    measuring = parts(args, device)
    print(f"{about(device)}\nCommand: {shlex.join(['python', *sys.argv])}", flush=True)
    for name in args.only:
        text = f"{provenance()} {about(device)}\n\n{measuring[name]()}"
        put_between(page, name, text)
        print(f"\n{name}, {args.rounds} rounds:\n\n{text}", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Cost of Gossamer on a GPU, compared with torch.")
    options.add_argument("--device", default="cuda:0")
    options.add_argument("--small", action="store_true", help="small tensors and few rounds, in a copy of the page")
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--rounds", type=int, default=9, help="of which medians and spreads are taken")
    main(options.parse_args())
