"""Workers and servers in virtual time, with gradients that are easy to add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.base.peer_ops import SERVER, WORKER, Peer, PeerScript, Push, Receipt
from gossamer.comm.simulation import Trace, compute, simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.train.parameter_server import (
    AsynchronousPolicy,
    Client,
    ServerShard,
    StepResult,
    UpdatePolicy,
    host,
    serve,
)
from gossamer.train.parameter_server.server import _begin

Shapes = Mapping[str, tuple[int, ...]]
Gradient = Callable[[Mapping[str, Tensor], int, int], Mapping[str, Tensor]]
SHAPES: Shapes = {"embedding": (12, 4), "weight": (5, 6), "bias": (5,), "scale": ()}
TINY: Shapes = {"weight": (4,)}
CALM = VirtualNetwork(round_trip_seconds=0.01)


def parameters(shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float64) -> dict[str, Parameter]:
    """Whole numbers, so that sums are exact."""
    return {name: Parameter(values) for name, values in whole(shapes, 0, dtype).items()}


def whole(shapes: Shapes, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-9, 10, shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def whole_gradient(tensors: Mapping[str, Tensor], worker: int, step: int) -> Mapping[str, Tensor]:
    """Whole numbers that depend on who and when only."""
    return whole({name: tuple(tensor.shape) for name, tensor in tensors.items()}, 1000 * worker + step + 1)


def sgd(lr: float = 1.0, **options: Any) -> Callable[[Any], Optimizer]:
    return lambda tensors: SGD(tensors, lr, **options)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()]).clone()


@dataclass
class Run:
    """A job and its outcome."""

    recipe: Recipe
    world: int = 3
    servers: int = 2
    steps: int = 6
    seed: int = 0
    optimizer: Callable[[Any], Optimizer] = field(default_factory=sgd)
    gradient: Gradient = whole_gradient
    seconds: Callable[[int, int], float] = lambda worker, step: 0.1
    weight: Callable[[int, int], float] = lambda worker, step: 1.0
    make: Callable[[], dict[str, Parameter]] = parameters
    barrier_after: int | None = None  # steps
    policy: Callable[[ServerShard], UpdatePolicy] | None = None  # instead of the recipe's
    directory: Path | None = None
    within_seconds: float | None = None
    clients: dict[int, Client] = field(default_factory=dict)
    shards: dict[int, ServerShard] = field(default_factory=dict)
    begun: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by worker, the versions it began from
    done: dict[int, list[StepResult]] = field(default_factory=dict)  # by worker
    paths: dict[int, list[Tensor]] = field(default_factory=dict)  # by worker, parameters before and after each step

    def client(self, worker: int) -> tuple[Client, dict[str, Parameter]]:
        tensors = self.make()
        client = Client(
            worker,
            self.world,
            tensors,
            self.optimizer(tensors.values()),
            self.recipe,
            shards=self.servers,
            seed=self.seed,
            within_seconds=self.within_seconds,
        )
        self.clients[worker] = client
        return client, tensors

    def worker(self, worker: int) -> PeerScript:
        client, tensors = self.client(worker)
        done, path = self.done.setdefault(worker, []), self.paths.setdefault(worker, [])
        yield from client.begin()
        client.apply_pull()
        self.begun[worker] = tuple(shard_client.applied_version for shard_client in client.shard_clients)
        path.append(flat(tensors))
        while client.step < self.steps and not client.stopping:
            step = client.step
            yield from compute(self.seconds(worker, step))
            client.gather(self.gradient(tensors, worker, step), self.weight(worker, step))
            done.append((yield from client.push_pull()))
            client.apply_pull()
            path.append(flat(tensors))
            if client.step == self.barrier_after:
                yield from client.barrier()
                client.apply_pull()
        yield from client.end()
        client.apply_final()
        return flat(tensors)

    def server(self, number: int) -> PeerScript:
        if self.policy is None:
            return host(
                number, self.directory, absent_after_seconds=2.0, keep_serving=True, on_shard=partial(self.show, number)
            )
        return self._other(number, self.policy)

    def _other(self, number: int, policy: Callable[[ServerShard], UpdatePolicy]) -> PeerScript:
        shard, queued = yield from _begin(number)
        self.show(number, shard)
        yield from serve(shard, policy(shard), queued)

    def show(self, number: int, shard: ServerShard) -> None:
        self.shards[number] = shard

    def go(self, net: VirtualNetwork | None = None, **options: Any) -> list[Tensor]:
        """The parameters with which each worker ended."""
        trace = self.trace(net, **options)
        return [trace.result(Peer(WORKER, worker)) for worker in range(self.world)]

    def trace(self, net: VirtualNetwork | None = None, **options: Any) -> Trace:
        net = net or CALM
        # A message that comes a second time after its answer carries what the sender's memory holds by then.
        options["checks"] = not net.duplicate
        return self.simulate({number: partial(self.worker, number) for number in range(self.world)}, net, **options)

    def simulate(
        self, workers: Mapping[int, Callable[[], PeerScript]], net: VirtualNetwork = CALM, **options: Any
    ) -> Trace:
        """Scripts of workers, with this job's servers."""
        scripts = {Peer(WORKER, number): script for number, script in workers.items()}
        servers = {Peer(SERVER, number): partial(self.server, number) for number in range(self.servers)}
        return simulate_peers({**scripts, **servers}, net, self.seed, **options)


@dataclass(frozen=True)
class NoDeduplication(AsynchronousPolicy):
    """The broken twin of a server that answers a duplicate as before."""

    def receive_gradient(self, shard: ServerShard, push: Push) -> Receipt:
        shard.take(push.stamp, shard.version + 1, push.about, push.payload)
        return Receipt(version=shard.version)


def run(text: str, **options: Any) -> Run:
    return Run(resolve(text), **options)
