"""Flower beside Gossamer: the same clients, FedAvg and data on both, and Gossamer's compression on Flower.

Contestants take turns; each round's time is the time between two versions, the first round's left out (imports, first
calls). All train alike, so what differs is what stands around training; "training alone" is the same work in a loop.
Processor time is of this process, on one thread: other work on the machine changes it little. Ray trains in others.
Parameters at the end are compared: uncompressed ones are the same within 1e-6. Compressed ones differ where float32
rounds sums differently and TopK then takes another entry; in float64 they are the same.

    python benchmarks/federated_flower.py [--clients 10 100] [--rounds 10] [--turns 3] [--ray]
    python benchmarks/federated_flower.py --quick             # one turn of few rounds, to see that it runs

Flower's own simulation (--ray) needs `pip install 'flwr[simulation]'` and takes a minute to start.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import itertools

from benchmarks.federated_flower_program import accuracy, flower_app, make_model, train
from benchmarks.provenance import ROOT, provenance  # found only after the line above
from benchmarks.report import markdown

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.base.peer_ops import Peer
from gossamer.comm.simulation import simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.federated.client.functions import Round
from gossamer.federated.client.local_training import Trainer, answered
from gossamer.federated.client.script import ClientRecipe, participate
from gossamer.federated.client.store import MemoryStore
from gossamer.federated.messages import CLIENT, THE_SERVER
from gossamer.federated.model_state import ModelState
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.rounds import serve
from gossamer.federated.server.selection import Uniform
from gossamer.federated.server.synchronous import SynchronousRounds

UP, DOWN = "Chain(TopK(0.05), Int8())", "Int8()"
OWN, GRID, RAY = "Gossamer", "Flower on Gossamer's grid", "Flower's simulation (Ray)"


class Run(NamedTuple):
    """What came of one contestant's turn."""

    seconds: list[float]  # of each round but the first
    processor: list[float]  # likewise, of this process
    up: float  # bytes of a round's contributions, on average
    down: float
    parameters: Tensor


class Stopwatch:
    """When versions were made, on the wall and of this process's processor time."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, float]] = []

    def __call__(self, *_: object) -> None:
        self._moments.append((time.perf_counter(), time.process_time()))

    def rounds(self) -> tuple[list[float], list[float]]:
        """Seconds of each round but the first."""
        pairs = [*itertools.pairwise(self._moments)][1:]
        return [end[0] - begin[0] for begin, end in pairs], [end[1] - begin[1] for begin, end in pairs]


# -- contestants -------------------------------------------------------------------------------------------------------


def on_gossamer(clients: int, rounds: int, up: str, down: str | None) -> Run:
    """Gossamer's own server and devices, in one process."""
    inside = "" if down is None else f", pull={down}"
    resolved = resolve(f"FedAvg(fraction=1.0{inside}) + {up}")
    strategy = resolved.strategy
    assert isinstance(strategy, FederatedStrategy)
    pull = strategy.pull_compressor
    model = make_model()
    state = ModelState.of(model)
    recipe = ClientRecipe(strategy=strategy, compressor=resolved.compressor, pull=pull, state=state)
    watch = Stopwatch()
    watch()
    held = SynchronousRounds(
        GlobalModel(strategy, resolved.compressor, pull, state, state.read(model).flat),
        clients=clients,
        rounds=rounds,
        selection=Uniform(),
        on_commit=watch,
    )
    scripts: dict[Peer, Any] = {THE_SERVER: lambda: serve(held)}
    trainer = Trainer(model, state, strategy, partial(train, clients=clients))
    for number in range(clients):
        scripts[Peer(CLIENT, number)] = lambda number=number: answered(
            participate(number, recipe, MemoryStore()), trainer
        )
    trace = simulate_peers(scripts, VirtualNetwork(), 0)
    sent = trace.sent_bytes
    ups = sum(nbytes for (_, to), nbytes in sent.items() if to == THE_SERVER)
    return Run(*watch.rounds(), ups / rounds, (sum(sent.values()) - ups) / rounds, held.model.parameters)


def on_flower(clients: int, rounds: int, up: str, down: str | None, ray: bool) -> Run:
    """Flower's FedAvg, on a grid of ours or in its own simulation."""
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    from gossamer.federated.flower import CompressedStrategy, compression_mod, simulate

    compressed = up != "Dense()"
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients)  # else a simulation begins without some
    if compressed:
        strategy = CompressedStrategy(strategy, up, pull=down)
    watch = Stopwatch()
    found: list[Any] = []

    def main(grid: Any, context: Any) -> None:
        first = ArrayRecord(make_model().state_dict())
        found.append(strategy.start(grid, first, num_rounds=rounds, evaluate_fn=watch).arrays)

    server = ServerApp()
    server.main()(main)
    app = flower_app(clients, [compression_mod(up)] if compressed else [])
    if ray:
        run_ray(server, app, clients)
        plain = float(sum(len(array.data) for array in found[0].values()) * clients)
        ups, downs = plain, plain
    else:
        traffic = simulate(server, app, clients).traffic
        ups, downs = (sum(getattr(each, name) for each in traffic) / rounds for name in ("up_bytes", "down_bytes"))
    if compressed:
        ups, downs = (
            sum(getattr(each, name) for each in strategy.traffic) / rounds for name in ("up_bytes", "down_bytes")
        )
    flat = torch.cat([torch.from_numpy(array.numpy()).reshape(-1) for array in found[0].values()])
    return Run(*watch.rounds(), ups, downs, flat)


def run_ray(server: Any, app: Any, clients: int) -> None:
    from flwr.simulation import run_simulation

    resources = {"num_cpus": 1, "num_gpus": 0}
    init = {"include_dashboard": False, "object_store_memory": 100_000_000, "log_to_driver": False}
    run_simulation(
        server, app, num_supernodes=clients, backend_config={"client_resources": resources, "init_args": init}
    )


def alone(clients: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a round's training, by all clients in a loop."""
    model, watch = make_model(), Stopwatch()
    watch()
    for _ in range(rounds):
        for client in range(clients):
            train(model, Round(index=0, client=client, local_epochs=1), clients)
        watch()
    return watch.rounds()


# -- the page ----------------------------------------------------------------------------------------------------------


def shown(seconds: list[float]) -> str:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{middle * 1e3:.0f} ({low * 1e3:.0f} to {high * 1e3:.0f})"


def rows(clients: int, rounds: int, turns: int, ray: bool) -> list[list[str]]:
    contestants: dict[tuple[str, str], Callable[[], Run]] = {}
    for up, down in (("Dense()", None), (UP, DOWN)):
        contestants[OWN, up] = partial(on_gossamer, clients, rounds, up, down)
        contestants[GRID, up] = partial(on_flower, clients, rounds, up, down, ray=False)
        if ray:
            contestants[RAY, up] = partial(on_flower, clients, rounds, up, down, ray=True)
    runs: dict[tuple[str, str], list[Run]] = {key: [] for key in contestants}
    bare: list[float] = []
    bare_processor: list[float] = []
    for turn in range(turns + 1):  # the first warms up
        for key, contestant in contestants.items():
            if key[0] == RAY and turn == 0:
                continue
            run = contestant()
            print(f"{clients} clients, turn {turn}: {key}", file=sys.stderr, flush=True)
            if turn:
                runs[key].append(run)
        if turn:
            seconds, processor = alone(clients, rounds)
            bare += seconds
            bare_processor += processor
    unit = statistics.median(bare_processor)
    page = [[str(clients), "training alone", "", shown(bare), f"{unit * 1e3:.0f}", "1", "", "", "", ""]]
    for (name, up), found in runs.items():
        own = runs[OWN, up][0].parameters
        apart = max(float((each.parameters - own).abs().max()) for each in found)
        seconds = [second for each in found for second in each.seconds]
        own_processor = statistics.median(second for each in found for second in each.processor)
        page.append(
            [
                str(clients),
                name,
                "dense" if up == "Dense()" else f"{up}, down {DOWN}",
                shown(seconds),
                "" if name == RAY else f"{own_processor * 1e3:.0f}",
                "" if name == RAY else f"{own_processor / unit:.2f}",
                f"{found[0].up / clients:,.0f}",
                f"{found[0].down / clients:,.0f}",
                f"{apart:.1e}",
                f"{accuracy(found[0].parameters):.3f}",
            ]
        )
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="Flower's own simulation too")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=paths)  # Ray's workers' too
    torch.set_num_threads(1)
    if chosen.quick:
        chosen.clients, chosen.rounds, chosen.turns = [4], 4, 1
    import flwr

    logging.getLogger("flwr").setLevel(logging.ERROR)
    heads = [
        "clients",
        "system",
        "messages",
        "ms per round (quartiles)",
        "CPU ms",
        "x training alone",
        "bytes up",
        "bytes down",
        "largest difference",
        "accuracy",
    ]
    found = [row for clients in chosen.clients for row in rows(clients, chosen.rounds, chosen.turns, chosen.ray)]
    lines = [dict(zip(heads, row, strict=True)) for row in found]
    print(markdown(lines, texts=3))
    print(f"\nflwr {flwr.__version__}; bytes are those of a client and round. {provenance()}")


if __name__ == "__main__":
    main()
