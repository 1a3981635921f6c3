"""Workers of AsyncDiLoCo in virtual time: each trains at its own speed, while its messages are on their way.

A worker is several peers that share its memory: a trainer, which only computes; the worker, whose pushes are answered
at once; and one caller for each server, which waits for merges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch
from support.machine_faults import TRAINER
from support.server_runs import CALM, Run, flat
from torch import Tensor

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.peer_ops import SERVER, WORKER, Peer, PeerScript, Pull
from gossamer.comm.simulation import Trace, compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Cut, Fault, Kill, VirtualNetwork
from gossamer.train.parameter_server.client.periodic_client import PeriodicClient
from gossamer.train.parameter_server.shard_spec import ELASTIC

POLL_SECONDS = 0.01
Step = Callable[[Mapping[str, Tensor], int, int], None]


def caller(server: int) -> str:
    return f"caller {server}"


@dataclass
class Desk:
    """What the peers of one worker share. A restarted worker has a new one."""

    client: PeriodicClient | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    pushes: dict[int, PeerScript] = field(default_factory=dict)  # by server, scripts of exchanges that begin
    pulls: dict[int, tuple[PeerScript, Pull]] = field(default_factory=dict)  # exchanges that wait for a merge
    landed: list[int] = field(default_factory=list)  # servers whose exchange has ended
    trained: bool = False
    ended: bool = False


@dataclass
class LocalRun(Run):
    """A job of AsyncDiLoCo. `steps` are local steps of each worker; `local_step` changes the parameters.

    In an elastic run (`numbers`), workers come and go, and end once their session has made `steps` steps.
    """

    local_step: Step = lambda tensors, worker, step: None
    numbers: dict[int, int] = field(default_factory=dict)  # by worker, its number in an elastic run; else empty
    arrivals: dict[int, float] = field(default_factory=dict)  # by worker, when it comes; without one, at once
    departures: dict[int, float] = field(default_factory=dict)  # by worker, when it is killed for good
    first_steps: dict[int, int] = field(default_factory=dict)  # by worker, the local steps that it began with
    desks: dict[int, Desk] = field(default_factory=dict)
    counted: Counter[int] = field(default_factory=Counter)  # local steps by worker, of all its incarnations
    finished: dict[int, float] = field(default_factory=dict)  # by worker, when its trainer had made all steps
    waits: dict[int, list[float]] = field(default_factory=dict)  # by worker, seconds from each message to its answer

    def local_client(self, worker: int) -> tuple[PeriodicClient, dict[str, Any]]:
        tensors = self.make()
        options = {"shards": self.servers, "seed": self.seed, "within_seconds": self.within_seconds}
        number, world = (self.numbers[worker], ELASTIC) if self.numbers else (worker, self.world)
        client = PeriodicClient(number, world, tensors, self.recipe, **options)
        self.clients[worker] = client
        return client, tensors

    def at_once(self, worker: int) -> PeerScript:
        """A worker that receives every answer before its next step. Returns its final parameters."""
        client, tensors = self.local_client(worker)
        path = self.paths.setdefault(worker, [])
        yield from client.begin()
        client.apply_pull()
        for step in range(self.steps):
            yield from compute(self.seconds(worker, step))
            self.local_step(tensors, worker, step)
            client.count(self.weight(worker, step))
            for number in client.due():
                self.done.setdefault(worker, []).append((yield from client.exchange(number)))
                client.take_up(number)
            path.append(flat(tensors))
        yield from client.send_rest()
        yield from client.end()
        client.apply_final()
        return flat(tensors)

    # -- in the background

    def train(self, worker: int) -> PeerScript:
        desk = self.desks.setdefault(worker, Desk())
        while desk.client is None or not desk.tensors:
            yield from compute(POLL_SECONDS)
        client, sent = desk.client, dict[int, float]()
        now = yield from compute(0.0)
        step = 0
        while (client.local_steps if self.numbers else step) < self.steps:
            now = yield from compute(self.seconds(worker, step))
            self.local_step(desk.tensors, worker, self.counted[worker])
            client.count(self.weight(worker, step))
            self.counted[worker] += 1
            while desk.landed:
                number = desk.landed.pop()
                client.take_up(number)
                self.waits.setdefault(worker, []).append(now - sent[number])
            for number in client.due():
                desk.pushes[number], sent[number] = client.exchange(number), now
            step += 1
        self.finished[worker] = now
        desk.trained = True
        while not desk.ended:  # a fault restarts only peers that have not ended
            yield from compute(POLL_SECONDS)

    def worker(self, worker: int) -> PeerScript:
        desk = self.desks[worker] = Desk()
        client, tensors = self.local_client(worker)
        yield from compute(self.arrivals.get(worker, 0.0))
        yield from client.begin()
        client.apply_pull()
        self.first_steps[worker] = client.local_steps
        desk.client, desk.tensors = client, tensors
        while not desk.trained or desk.pushes:
            if not desk.pushes:
                yield from compute(POLL_SECONDS)
                continue
            number, script = desk.pushes.popitem()
            push = next(script)
            desk.pulls[number] = script, script.send((yield push))
        yield from client.send_rest()
        yield from client.end()
        client.apply_final()
        desk.ended = True
        return flat(tensors)

    def call(self, worker: int, server: int) -> PeerScript:
        yield from compute(POLL_SECONDS)
        desk = self.desks.setdefault(worker, Desk())
        while not desk.ended or server in desk.pulls:
            desk = self.desks[worker]  # a restarted worker has another one
            if server not in desk.pulls:
                yield from compute(POLL_SECONDS)
                continue
            script, pull = desk.pulls.pop(server)
            pulled = yield pull
            try:
                script.send(pulled)
            except StopIteration as done:
                self.done.setdefault(worker, []).append(done.value)
            desk.landed.append(server)

    def in_background(self, net: VirtualNetwork = CALM, **options: Any) -> Trace:
        """Run the job. checks are off: gradient buffers are used again after the receipt."""
        scripts = {Peer(SERVER, number): partial(self.server, number) for number in range(self.servers)}
        for worker in range(self.world):
            number = self.numbers.get(worker, worker)
            scripts[Peer(WORKER, number)] = partial(self.worker, worker)
            scripts[Peer(TRAINER, number)] = partial(self.train, worker)
            for server in range(self.servers):
                scripts[Peer(caller(server), number)] = partial(self.call, worker, server)
        ends = {self.numbers.get(worker, worker): at for worker, at in self.departures.items()}
        kept = [each for each in net.faults if not _is_after(each, ends)]
        faults = (*kept, *(Kill(Peer(WORKER, number), at) for number, at in ends.items()))
        net = replace(net, faults=tuple(each for fault in faults for each in self._of_machines(fault)))
        servers = [peer for peer in scripts if peer.kind == SERVER or peer.number in ends]  # those that need not end
        return simulate_peers(scripts, net, self.seed, servers=servers, **options)

    def _of_machines(self, fault: Fault) -> Iterator[Fault]:
        match fault:
            case Cut(peers_a, peers_b):
                yield replace(fault, peers_a=self._roles(*peers_a), peers_b=self._roles(*peers_b))
            case _:
                yield from (replace(fault, peer=peer) for peer in self._roles(fault.peer))

    def _roles(self, *peers: Peer) -> tuple[Peer, ...]:
        roles = (WORKER, TRAINER, *map(caller, range(self.servers)))
        return tuple(
            Peer(role, peer.number) for peer in peers for role in (roles if peer.kind == WORKER else [peer.kind])
        )


def _is_after(fault: Fault, ends: Mapping[int, float]) -> bool:
    """Whether a fault would restart a worker that is killed for good."""
    return not isinstance(fault, Cut) and fault.peer.kind == WORKER and ends.get(fault.peer.number, inf) < inf


def local_run(text: str, **options: Any) -> LocalRun:
    return LocalRun(resolve(text), **options)


def ballots(world: int, columns: int, tensors: int = 1) -> Callable[[], dict[str, Any]]:
    """One place in each tensor for each local step that there may be."""

    def make() -> dict[str, Any]:
        names = [f"ballots {number}" for number in range(tensors)]
        return {name: torch.nn.Parameter(torch.zeros(2, world * columns, dtype=torch.float64)) for name in names}

    return make


def vote(columns: int) -> Step:
    """Every local step leaves a mark at a place of its own."""

    def step(tensors: Mapping[str, Tensor], worker: int, number: int) -> None:
        assert number < columns
        for tensor in tensors.values():
            tensor.detach()[:, worker * columns + number] -= 1

    return step
