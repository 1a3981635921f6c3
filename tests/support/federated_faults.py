"""Federations whose devices give whole numbers, over networks that lose and double messages, with servers that die."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from support.rounds_by_hand import rounds_made
from torch import Tensor, nn

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, TopK
from gossamer.algorithms.strategies.federated_rules import CohortSummary, FedAvg, FederatedStrategy, LocalWork
from gossamer.algorithms.strategies.federated_rules.base import Memory
from gossamer.base import rng
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Peer, PeerScript, Stamp
from gossamer.comm.simulation import Trace, compute, simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.federated.client.local_training import Answer
from gossamer.federated.client.script import ClientRecipe, ClientScript, Train, Trained, participate
from gossamer.federated.client.store import MemoryStore
from gossamer.federated.messages import CLIENT, THE_SERVER, Report
from gossamer.federated.model_state import ModelState
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.journal import RoundsJournal
from gossamer.federated.server.roster import RosterChange
from gossamer.federated.server.rounds import Committed, Rounds, serve

FEATURES = 39
SAMPLES = (1, 3, 2, 5)  # by device


def whole_step(parameters: Tensor, means: Sequence[Tensor]) -> None:
    """The server's step, in whole numbers, so that sums of all that was ever added are exact."""
    parameters.sub_(means[0].round())


def sparse() -> Compressor:
    """A tenth of the entries, and feedback for the others."""
    return Feedback(TopK(density=0.1))


@dataclass(frozen=True, repr=False)
class WholeSteps(FedAvg):
    """FedAvg whose parameters stay whole."""

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        whole_step(parameters, means)


@dataclass(frozen=True, repr=False)
class WholeMomentum(WholeSteps):
    """The same with a memory on the server, which it publishes."""

    @property
    def shared_keys(self) -> Sequence[str]:
        return ("velocity",)

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        memory["velocity"].add_(means[0].round())
        parameters.sub_(memory["velocity"])


@dataclass(frozen=True, repr=False)
class Buffered(WholeSteps):
    """The same without rounds."""

    buffer: int = 2
    staleness: int | None = None

    @property
    def asynchronous(self) -> bool:
        return True

    def contributions_per_version(self, clients: int) -> int:
        return self.buffer

    @property
    def oldest_staleness(self) -> int | None:
        return self.staleness

    def weight(self, work: LocalWork, staleness: int) -> float:
        return float(work.samples) / (1 + staleness)


class MemoryJournal(RoundsJournal):
    """A journal that outlives its server, in this process's memory."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self.changes: list[RosterChange] = []

    def changed(self, change: RosterChange) -> None:
        self.changes.append(replace(change, ended=tuple(change.ended)))

    def committed(self, rounds: Rounds) -> None:
        self.state, self.changes = copy.deepcopy(rounds.state_dict()), []

    def keep(self, rounds: Rounds) -> None:
        """As `journal.keep`."""
        rounds.journal = self
        if self.state is None:
            self.committed(rounds)
            return
        rounds.load_state_dict(copy.deepcopy(self.state))
        for change in self.changes:
            rounds.change(change)


def answered(script: ClientScript, train: Answer, seconds: Callable[[Train], float]) -> PeerScript:
    """A device's script whose Train takes so many virtual seconds."""
    answer: Any = None
    try:
        while True:
            op = script.send(answer)
            if isinstance(op, Train):
                if seconds(op):
                    yield from compute(seconds(op))
                answer = train(op)
            else:
                answer = yield op
    except StopIteration as stop:
        return stop.value


def some_seconds(op: Train) -> float:
    """Between a fifth of a second and more than one, drawn for each task."""
    return 0.2 + Random(rng.address("training", op.client, op.task.round)).random()


@dataclass
class Ledger:
    """What devices gave, and what was counted."""

    given: dict[Stamp, Tensor] = field(default_factory=dict)  # pseudo-gradients
    versions: dict[int, list[tuple[Stamp, Tensor]]] = field(default_factory=dict)  # what each was last made of, decoded
    commits: list[Committed] = field(default_factory=list)

    @property
    def counted(self) -> list[tuple[Stamp, Tensor]]:
        return [each for made_of in self.versions.values() for each in made_of]


@dataclass
class WholeNumbers:
    """A federation of four devices that take part, and its outcome."""

    strategy: FederatedStrategy = WholeSteps(fraction=1.0)
    compressor: Compressor = Dense()  # as it is: a recipe would send tensors as small as these whole
    rounds: int = 3
    clients: int = len(SAMPLES)  # of the federation
    seed: int = 0
    part_bytes: int = 1 << 20
    options: dict[str, Any] = field(default_factory=dict)  # of the rounds
    change: Callable[[Rounds], None] = lambda rounds: None  # after each start of the server
    train_seconds: Callable[[Train], float] = lambda op: 0.0
    keep: Callable[[Rounds], Any] | None = None  # instead of a journal in memory
    ledger: Ledger = field(default_factory=Ledger)
    stores: list[MemoryStore] = field(default_factory=lambda: [MemoryStore() for _ in SAMPLES])
    held: Rounds | None = None  # of the last start

    def __post_init__(self) -> None:
        self.model = nn.Linear(FEATURES, 1, dtype=torch.float64)
        self.state = ModelState.of(self.model)
        self.keep = self.keep or MemoryJournal().keep

    def start(self) -> Rounds:
        """A new process of the server."""
        assert self.keep is not None
        model = GlobalModel(
            self.strategy,
            self.compressor,
            self.strategy.pull,
            self.state,
            torch.zeros(FEATURES + 1).double(),
            self.seed,
        )
        rounds = self.held = rounds_made(
            model, clients=self.clients, rounds=self.rounds, on_commit=self.ledger.commits.append, **self.options
        )
        self._record(rounds)
        self.change(rounds)
        self.keep(rounds)
        return rounds

    def _record(self, rounds: Rounds) -> None:
        """Note what each version is made of. One that a killed server had not journaled is made again."""
        taken: dict[int, tuple[Stamp, Tensor]] = {}
        take, apply = rounds.take, rounds.model.apply

        def noted(client: int, stamp: Stamp, report: Report, payload: Payload) -> None:
            take(client, stamp, report, payload)
            taken[client] = stamp, rounds.model.decode(stamp, payload, report.counts)[0]

        def counted(means: Sequence[Tensor], cohort: CohortSummary) -> int:
            version = apply(means, cohort)
            self.ledger.versions[version] = [taken[client] for client in rounds.reported]
            return version

        rounds.take, rounds.model.apply = noted, counted  # type: ignore[method-assign]

    def train(self, op: Train) -> Trained:
        """Whole numbers that depend on the device and on the parameters that it begins from."""
        draw = torch.Generator().manual_seed(1000 * op.client + op.task.version)
        step = torch.randint(-8, 9, op.anchor.shape, generator=draw).to(op.anchor.dtype)
        self.ledger.given[Stamp(op.client, op.task.round, op.task.version)] = step
        work = LocalWork(samples=SAMPLES[op.client], steps=1, learning_rate=1.0)
        return Trained(flat=op.anchor - step, work=work, metrics={"loss": 1.0})

    def scripts(self) -> dict[Peer, Callable[[], Any]]:
        everyone = ClientRecipe(
            strategy=self.strategy,
            compressor=self.compressor,
            pull=self.strategy.pull,
            state=self.state,
            seed=self.seed,
            part_bytes=self.part_bytes,
        )
        scripts: dict[Peer, Any] = {THE_SERVER: lambda: serve(self.start())}
        for number, store in enumerate(self.stores):
            scripts[Peer(CLIENT, number)] = lambda number=number, store=store: answered(
                participate(number, everyone, store), self.train, self.train_seconds
            )
        return scripts

    def run(self, net: VirtualNetwork | None = None) -> Trace:
        trace = simulate_peers(self.scripts(), net or VirtualNetwork(), self.seed, checks=True, most_seconds=1000.0)
        for peer in self.scripts():
            if peer != THE_SERVER:
                trace.result(peer)
        return trace

    @property
    def parameters(self) -> Tensor:
        assert self.held is not None
        return self.held.model.parameters

    def owed(self, client: int) -> Tensor:
        """What feedback keeps on a device."""
        residuals = self.stores[client].load().residuals
        kept = [each for own in residuals for each in own.values()]
        return sum(kept, torch.zeros(FEATURES + 1).double())


def check_conserved(done: WholeNumbers) -> None:
    """Versions were made, each contribution counts once, and for each device: given = counted + owed, to the bit."""
    assert done.held is not None
    assert done.held.model.version == done.rounds
    assert sorted(done.ledger.versions) == [*range(1, done.rounds + 1)]
    stamps = [stamp[:2] for stamp, _ in done.ledger.counted]
    assert len(stamps) == len(set(stamps)), "a contribution was counted twice"
    for client in range(len(SAMPLES)):
        counted = [(stamp, sent) for stamp, sent in done.ledger.counted if stamp.worker == client]
        given = sum((done.ledger.given[stamp] for stamp, _ in counted), torch.zeros(FEATURES + 1).double())
        sent = sum((sent for _, sent in counted), torch.zeros(FEATURES + 1).double())
        assert torch.equal(given, sent + done.owed(client)), f"client {client} gave something that is nowhere"
