"""Staleness: steps of workers on one parameter server in virtual time, where one is slow or all are now and then.

Every step takes 100 ms, a slow one 500 ms; a round trip takes 10 ms. "Of the sum": steps of all workers, over those of
the same that wait for nobody. Prints Markdown; the same numbers on every machine.

    python benchmarks/staleness.py [--workers 4] [--seconds 60]
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import torch
from torch.nn import Parameter

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.peer_ops import SERVER, WORKER, Peer, PeerScript
from gossamer.comm.simulation import compute, simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.train.parameter_server import Client, host

STEP_SECONDS, TIMES_SLOWER, ROUND_TRIP_SECONDS = 0.1, 5, 0.01
ONE_IN = 8  # steps is slow, where all workers are now and then
RECIPES = (
    "ParameterServer('sync')",
    "ParameterServer('stale', staleness=1)",
    "ParameterServer('stale', staleness=4)",
    "ParameterServer('stale', staleness=16)",
    "ParameterServer('async')",
)
Seconds = Callable[[int, int], float]  # of a worker's step


def one_slow(workers: int, worker: int, step: int) -> float:
    return STEP_SECONDS * (TIMES_SLOWER if worker == workers - 1 else 1)


def now_and_then(workers: int, worker: int, step: int) -> float:
    return STEP_SECONDS * (TIMES_SLOWER if Random(worker * 1_000_003 + step).randrange(ONE_IN) == 0 else 1)


def train(text: str, workers: int, worker: int, seconds: Seconds, until: float, steps: Counter[int]) -> PeerScript:
    tensors = {"weight": Parameter(torch.zeros(4))}
    client = Client(worker, workers, tensors, torch.optim.SGD(tensors.values(), 0.1), resolve(text), shards=1)
    yield from client.begin()
    while True:
        moment = yield from compute(seconds(worker, client.step))
        if moment >= until:
            break
        client.gather({"weight": torch.ones(4)})
        yield from client.push_pull()
        client.apply_pull()
        steps[worker] += 1
    yield from client.end()


def measured(text: str, workers: int, seconds: Seconds, until: float) -> list[int]:
    """Steps by worker."""
    steps: Counter[int] = Counter()
    scripts: dict[Peer, Callable[[], Any]] = {
        Peer(WORKER, worker): partial(train, text, workers, worker, seconds, until, steps) for worker in range(workers)
    }
    scripts[Peer(SERVER, 0)] = partial(host, 0, keep_serving=True)
    simulate_peers(scripts, VirtualNetwork(round_trip_seconds=ROUND_TRIP_SECONDS), 0)
    return [steps[worker] for worker in range(workers)]


def alone(workers: int, seconds: Seconds, until: float) -> list[int]:
    """Steps by worker, where nobody waits and nothing travels."""
    found = []
    for worker in range(workers):
        moment, step = seconds(worker, 0), 0
        while moment < until:
            step += 1
            moment += seconds(worker, step)
        found.append(step)
    return found


def rows(workers: int, until: float) -> Iterator[str]:
    yield "| | one is slow: steps of each | of the sum | all are, now and then: steps of each | of the sum |"
    yield "|---|---|---:|---|---:|"
    cases = [partial(one_slow, workers), partial(now_and_then, workers)]
    sums = [alone(workers, case, until) for case in cases]
    cells = [f"{', '.join(map(str, each))} | 1.00" for each in sums]
    yield f"| alone | {' | '.join(cells)} |"
    for text in RECIPES:
        found = [measured(text, workers, case, until) for case in cases]
        cells = [
            f"{', '.join(map(str, each))} | {sum(each) / sum(whole):.2f}"
            for each, whole in zip(found, sums, strict=True)
        ]
        yield f"| `{text}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="of virtual time")
    chosen = parser.parse_args()
    for line in rows(chosen.workers, chosen.seconds):
        print(line)
