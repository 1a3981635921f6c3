"""Federated scale: seconds of a round and memory, with 1,000 and with 10,000 devices of which 100 train in a round.

Each device holds handwritten digits of its own taste (Dirichlet 0.1 over the ten), drawn when it is chosen; its line
and its speed are drawn, too. Every number of devices is a process of its own, so that its memory is measured alone.

    python benchmarks/federated_scale.py [--clients N ...] [--rounds N] [--recipe RECIPE] [--loop]
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy
import torch
from benchmarks.provenance import provenance  # found only after the line above
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer.base.units import bytes_text, seconds_text
from gossamer.federated import Round, SGDSteps, Update, client
from gossamer.federated.population import drawn_profiles
from gossamer.federated.virtual.simulate import Simulation, SimulationSettings

COHORT, TEST = 100, 360
WARM_UP = 3  # rounds


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip


@cache
def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(found.target)[order]


@cache
def places() -> list[numpy.ndarray]:
    """Of the training digits, by label."""
    labels = digits()[1][TEST:].numpy()
    return [numpy.flatnonzero(labels == label) + TEST for label in range(10)]


def own(number: int) -> tuple[Tensor, Tensor]:
    """A device's digits, 16 to 80."""
    random = numpy.random.default_rng(number)
    labels = random.choice(10, size=random.integers(16, 81), p=random.dirichlet([0.1] * 10))
    at = torch.tensor([random.choice(places()[label]) for label in labels])
    images, all_labels = digits()
    return images[at], all_labels[at]


def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(images), labels)


def train(model: nn.Module, told: Round) -> SGDSteps:
    assert told.client is not None
    images, labels = own(told.client)
    batches = list(zip(images.split(16), labels.split(16), strict=True))
    return SGDSteps(loss=loss, batches=list(told.batches(batches)), learning_rate=0.05, samples=len(labels))


def loop(model: nn.Module, told: Round) -> Update:
    steps = train(model, told)
    return Update(samples=steps.samples, metrics=steps.run(model))


@torch.no_grad()
def evaluate(model: nn.Module, told: Round) -> Update:
    images, labels = digits()
    right = (model(images[:TEST]).argmax(1) == labels[:TEST]).float().mean()
    return Update(samples=TEST, metrics={"accuracy": right.item()})


def measure(clients: int, args: argparse.Namespace) -> dict[str, Any]:
    digits()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    profiles = drawn_profiles(clients, present_seconds=86_400, samples_per_step=16)
    events: list[int] = []
    with tempfile.TemporaryDirectory() as states:
        simulation = Simulation(
            loop if args.loop else client(vectorized=True)(train), conv,
            args.recipe.replace("FRACTION", str(COHORT / clients)),
            SimulationSettings(
                clients=clients, rounds=args.rounds, evaluate=evaluate, profiles=profiles, states=states,
                on_round=lambda record: events.append(simulation.engine.events),
            ),
        )  # fmt: skip
        run = simulation.run()
        on_disk = sum(file.stat().st_size for file in Path(states).iterdir())
    return {
        "clients": clients,
        "cohort": simulation.cohort,
        "parameters": simulation.parameters,
        "seconds": time.perf_counter() - began,
        "round": statistics.median(each.seconds for each in run.rounds[WARM_UP:]),
        "first": run.rounds[0].seconds,
        "events": (events[-1] - events[0]) / max(len(events) - 1, 1),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "before": before,
        "on_disk": on_disk,
        "virtual": run.virtual_seconds,
        "up": run.up_bytes / len(run.rounds),
        "down": run.down_bytes / len(run.rounds),
        "accuracy": run.rounds[-1].metrics["accuracy"],
        "training": run.training,
        "recipe": run.recipe,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000])
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--recipe", default="FedAvg(fraction=FRACTION)", help="FRACTION: 100 devices a round")
    options.add_argument("--loop", action="store_true", help="devices one after another")
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.child:
        print(json.dumps(measure(args.clients[0], args)))
        return
    for clients in args.clients:
        command = [sys.executable, __file__, "--child", "--clients", str(clients), "--rounds", str(args.rounds)]
        command += ["--recipe", args.recipe, *["--loop"] * args.loop]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(
            f"{clients:,} devices, {args.rounds} rounds, {found['cohort']} devices train at once: {found['recipe']}, "
            f"{found['parameters']:,} numbers, trained {found['training']}\n"
            f"  {seconds_text(found['seconds'])} in all; {found['round']:.3f} s a round (median after {WARM_UP}), the "
            f"first {found['first']:.2f} s; {found['events']:.0f} events a round\n"
            f"  peak memory {bytes_text(found['memory'])}, of which {bytes_text(found['before'])} are torch, sklearn "
            f"and the digits; {bytes_text(found['on_disk'])} on disk\n"
            f"  {seconds_text(found['virtual'])} of virtual time, {bytes_text(found['up'])} up and "
            f"{bytes_text(found['down'])} down a round, accuracy {found['accuracy']:.3f}",
            flush=True,
        )
    print(provenance())


if __name__ == "__main__":
    main()
