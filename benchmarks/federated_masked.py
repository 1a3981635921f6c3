"""What a federation under masks learns for its bytes: directions and places that all draw alike, beside every entry.

A hundred devices of examples/federated_digits.py, divided by Dirichlet 0.1, ten of them a round, five passes over their
data. Each compressor is tuned alike: every learning rate of the grid on a seed of its own, and the one with the best
accuracy is then run on other seeds. Accuracy is on unseen digits, the mean of the last five rounds.

    python benchmarks/federated_masked.py [--rounds 60]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from benchmarks.provenance import ROOT, provenance  # found only after the line above

import gossamer.federated
from gossamer.federated.client.functions import load_script

SCRIPT = ROOT / "examples" / "federated_digits.py"
CLIENTS, SMOOTHED = 100, 5
RATES, TUNING_SEED, SEEDS = (0.25, 0.5, 1.0), 100, (0, 1, 2, 3, 4)
RECIPE = "FedAvg(fraction=0.1, local_epochs=5, secure=SecureAggregation())"
COMPRESSORS = (  # the matrices are 256 x 64 and 10 x 256: of either pair below, one sends as many numbers as the other
    "Dense()",
    "RandomProjection(rank=4)",
    "RandomK(density=0.108)",
    "RandomProjection(rank=1)",
    "RandomK(density=0.027)",
)


def trained(compressor: str, rate: float, seed: int, rounds: int) -> tuple[float, float]:
    """(accuracy, kB that a device sent in a round)."""
    script = load_script(SCRIPT, ["--rate", str(rate), "--batch", "64", "--seed", str(seed)])
    run = gossamer.federated.simulate(
        script.train,
        script.model,
        f"{RECIPE} + {compressor}",
        clients=CLIENTS,
        rounds=rounds,
        evaluate=script.evaluate,
        seed=seed,
    )
    accuracies = [each.metrics["accuracy"] for each in run.rounds[-SMOOTHED:]]
    return fmean(accuracies), run.up_bytes / sum(each.counted for each in run.rounds) / 1e3


def row(compressor: str, rounds: int) -> Sequence[str]:
    best = max(RATES, key=lambda rate: trained(compressor, rate, TUNING_SEED, rounds)[0])
    runs = [trained(compressor, best, seed, rounds) for seed in SEEDS]
    found = [100 * accuracy for accuracy, _ in runs]
    told = f"{median(found):.1f} ({min(found):.1f} to {max(found):.1f})"
    return f"`{compressor}`", f"{best:g}", f"{runs[0][1]:.2f}", told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(provenance(), "\n")
    print("| compressor | rate | kB a device and round | accuracy in % |\n|---|---:|---:|---:|")
    for compressor in COMPRESSORS:
        print(f"| {' | '.join(row(compressor, args.rounds))} |", flush=True)


if __name__ == "__main__":
    main()
