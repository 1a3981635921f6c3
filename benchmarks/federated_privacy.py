"""Federated privacy: what clipping, noise and accounting cost in seconds, and what rounds on digits cost in epsilon.

First the parts: noise of a million numbers, a clipped sum, integers for a secure sum, epsilon of one more round. Then
digits on 400 devices, a quarter of them a round, over simulated peers: accuracy and epsilon by rounds for each recipe.

    python benchmarks/federated_privacy.py [--devices 400] [--rounds 40] [--entries 1000000]
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import CentralPrivacy, DistributedPrivacy, FederatedStrategy
from gossamer.algorithms.strategies.federated_rules.privacy.epsilon import sampled_gaussian_epsilon
from gossamer.base.peer_ops import Peer
from gossamer.comm.environment.host_info import machine
from gossamer.comm.simulation import simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.federated.client.functions import Round, Update
from gossamer.federated.client.local_training import Trainer, answered
from gossamer.federated.client.script import ClientRecipe, participate
from gossamer.federated.client.store import MemoryStore
from gossamer.federated.messages import CLIENT, THE_SERVER
from gossamer.federated.model_state import ModelState
from gossamer.federated.privacy.accountant import PrivacyAccountant
from gossamer.federated.privacy.clipping_and_noise import PrivateSum, integers
from gossamer.federated.privacy.noise_sampling import SystemBits, gaussian
from gossamer.federated.server.aggregation import WeightedSum
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.rounds import serve
from gossamer.federated.server.selection import Uniform
from gossamer.federated.server.synchronous import SynchronousRounds

RECIPES = (
    "FedAvg(fraction=0.25, local_epochs=5)",
    "FedAvg(fraction=0.25, local_epochs=5, privacy=CentralPrivacy(noise=1.0, clip=0.5, delta=1e-3))",
    "FedAvg(fraction=0.25, local_epochs=5, privacy=CentralPrivacy(noise=1.0, delta=1e-3))",
    "FedAvg(fraction=0.25, local_epochs=5, privacy=CentralPrivacy(noise=1.0, clip=0.5, delta=1e-3))"
    " + Int8(stochastic=True)",
    "FedAvg(fraction=0.25, local_epochs=5, privacy=CentralPrivacy(noise=1.0, clip=0.5, delta=1e-3)) + TopK(0.1)",
    "FedAvg(fraction=0.25, local_epochs=5, privacy=LocalPrivacy(noise=1.0, clip=0.5, delta=1e-3))",
)


def seconds_of(call: Callable[[], Any], times: int = 3) -> float:
    """The least of so many calls, after one that does not count."""
    call()
    taken: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def parts(entries: int) -> None:
    privacy, block = CentralPrivacy(noise=1.0, clip=1.0), torch.randn(entries)
    kept = PrivacyAccountant(privacy, cohort=100, clients=10_000, feedback=False, blank=[block])
    plain, private = WeightedSum(), PrivateSum(kept, privacy)
    rounds = iter(range(100, 200))
    timed: dict[str, Callable[[], Any]] = {
        "Gaussian noise": lambda: gaussian(entries, 1.0, SystemBits()),
        "one contribution, plain sum": lambda: plain.add((block,), 1.0, 1),
        "one contribution, clipped sum": lambda: private.add((block,), 1.0, 1),
    }
    for mechanism in ("skellam", "discrete-gaussian"):
        grid = DistributedPrivacy(noise=1.0, mechanism=mechanism).grid(entries, 16, 60)
        timed[f"one contribution as integers, {mechanism}"] = partial(integers, (block,), grid, mechanism)
    print(f"seconds for {entries:,} numbers")
    for name, call in timed.items():
        print(f"  {name:48} {seconds_of(call):8.3f}")
    print("seconds of accounting for one more round, noise 1, rate 0.01, after 100 rounds")
    for accountant in ("pld", "rdp"):
        taken = seconds_of(lambda by=accountant: sampled_gaussian_epsilon(1.0, 0.01, next(rounds), 1e-5, by))  # type: ignore[misc]
        print(f"  {accountant:48} {taken:8.3f}")


def federation(text: str, devices: int, rounds: int) -> None:
    """Run it, and print accuracy and epsilon at a quarter, a half and the end."""
    digits = load_digits()
    mixed = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(digits.data, dtype=torch.float32) / 16)[mixed]
    labels = torch.tensor(digits.target)[mixed]
    learn, tested = slice(0, 1437), slice(1437, None)
    own = torch.arange(1437).tensor_split(devices)

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def train(model: nn.Module, told: Round) -> Update:
        assert told.client is not None
        places = own[told.client]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in told.batches([places]):
            optimizer.zero_grad()
            cross_entropy(model(images[learn][batch]), labels[learn][batch]).backward()
            optimizer.step()
        return Update(samples=len(places))

    def accuracy(flat: Tensor) -> float:
        state.write(flat, model)
        with torch.no_grad():
            return float((model(images[tested]).argmax(1) == labels[tested]).float().mean())

    resolved, model = resolve(text), make_model()
    strategy, state = resolved.strategy, ModelState.of(model)
    assert isinstance(strategy, FederatedStrategy)
    everyone = ClientRecipe(strategy=strategy, compressor=resolved.compressor, pull=None, state=state)
    held = GlobalModel(strategy, resolved.compressor, None, state, state.read(model).flat)
    shown = {max(rounds // 4, 1), max(rounds // 2, 1), rounds}

    def committed(made: Any) -> None:
        if made.version in shown:
            spent = "" if made.epsilon is None else f"epsilon {made.epsilon:8.2f}"
            print(f"  round {made.version:4}  accuracy {accuracy(held.parameters):6.3f}  {spent}")

    server = SynchronousRounds(held, clients=devices, rounds=rounds, selection=Uniform(0), on_commit=committed)
    trainer = Trainer(make_model(), state, strategy, train)
    scripts: dict[Peer, Any] = {THE_SERVER: lambda: serve(server)}
    for number in range(devices):
        scripts[Peer(CLIENT, number)] = lambda number=number: answered(
            participate(number, everyone, MemoryStore()), trainer
        )
    began = time.perf_counter()
    simulate_peers(scripts, VirtualNetwork(), 0)
    taken = time.perf_counter() - began
    print(f"  {taken / rounds:.3f} s a round, training included; {server.why_exhausted or 'all rounds were made'}")


def main(devices: int, rounds: int, entries: int) -> None:
    torch.set_num_threads(1)
    print("machine ", ", ".join(f"{name} {value}" for name, value in machine().items()))
    print("command ", shlex.join(["python", *sys.argv]), " load", os.getloadavg()[0])
    parts(entries)
    for text in RECIPES:
        print(text)
        federation(text, devices, rounds)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Seconds and epsilon of differential privacy.")
    options.add_argument("--devices", type=int, default=400)
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--entries", type=int, default=1_000_000)
    given = options.parse_args()
    main(given.devices, given.rounds, given.entries)
