"""Two workers on one GPU over an emulated network: a step of each recipe there over the same one without a network.

Rounds of one run each, one after the other. A step's time is the mean over whole periods.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import torch
from benchmarks.provenance import ROOT
from benchmarks.report import markdown

RECIPES = ("Dense()", "TopK(density=0.01)", "DiLoCo(period=20) + Int8()")
NETWORK, WARM_UP = "1gbit", 4


def seconds(recipe: str, network: str | None, device: torch.device, steps: int, *, small: bool) -> float | str:
    """Of a step, on average; or the line that names why there is none."""
    script = ["benchmarks/gpu_worker.py", "--device", str(device), "--steps", str(WARM_UP + steps)]
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "2", "--recipe", recipe]
    command += ["--network", network] if network else []
    with tempfile.TemporaryDirectory() as folder:
        whole = [*command, "--logs", folder, *script, *(["--small"] if small else [])]
        done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    said = (done.stdout + done.stderr).splitlines()
    found = [line.partition("RESULT ")[2] for line in said if "RESULT " in line]
    if done.returncode or not found:
        return next((line.strip()[:100] for line in reversed(said) if "Error" in line), f"ended with {done.returncode}")
    return statistics.fmean(json.loads(found[0])[WARM_UP:])


def measure(rounds: int, steps: int, device: torch.device, *, small: bool) -> str:
    """The page's part: by recipe, a step without a network, with one, and their ratio by round."""
    recipes = RECIPES[1:2] if small else RECIPES
    found: dict[str, list[tuple[float | str, float | str]]] = {recipe: [] for recipe in recipes}
    for _ in range(rounds):
        for recipe, pairs in found.items():
            plain = seconds(recipe, None, device, steps, small=small)
            pairs.append((plain, seconds(recipe, NETWORK, device, steps, small=small)))
    return markdown([_line(recipe, pairs) for recipe, pairs in found.items()])


def _line(recipe: str, pairs: Sequence[tuple[float | str, float | str]]) -> dict[str, str]:
    problem = next((each for pair in pairs for each in pair if isinstance(each, str)), None)
    if problem is not None:
        return {"recipe": f"`{recipe}`", "no network": problem, NETWORK: "", "ratio": ""}
    plain, slow = zip(*[(float(one), float(other)) for one, other in pairs], strict=True)
    ratios = sorted(late / early for early, late in zip(plain, slow, strict=True))
    return {
        "recipe": f"`{recipe}`",
        "no network": f"{1000 * statistics.median(plain):.3g} ms",
        NETWORK: f"{1000 * statistics.median(slow):.3g} ms",
        "ratio": f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
    }
