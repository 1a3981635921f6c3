"""What one server holds: its part of the parameters, the optimizer, and who contributed what."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.compressors import Compressor
from gossamer.core import rng
from gossamer.core.aggregation import AggregationContext
from gossamer.core.layout import accumulation_dtype
from gossamer.core.ops import Payload
from gossamer.core.peer_ops import Peer, Pull, Stamp
from gossamer.errors import MalformedError
from gossamer.parameter_server import shard_message
from gossamer.parameter_server.deduplication import LATE, AnswerLog
from gossamer.parameter_server.delta_chain import DeltaChain, Public, Snapshot
from gossamer.parameter_server.flat_optimizer import FlatOptimizer
from gossamer.parameter_server.journal_entry import Entry, Forgetful, Journal
from gossamer.parameter_server.shard_spec import Options, ShardSpec, checked_options


class Contribution(NamedTuple):
    """gradients: (n,) for each block, at least in float32; none where the worker had none. weight: in a mean."""

    gradients: tuple[Tensor, ...]
    weight: float
    options: tuple[Options, ...]
    staleness: int


class Waiting(NamedTuple):
    """A pull that is answered later."""

    token: int
    sender: Peer
    op: Pull


def push_at(seed: int, stamp: Stamp) -> AggregationContext:
    """Where a worker's gradients of one step stand."""
    return AggregationContext(step=stamp.step, seed=rng.address(seed, "push"), rank=stamp.worker)


class ServerShard:
    """Parameters `blocks` after `version` applied rounds, and everything that is due to become of them.

    members: the worker's next step, for every worker that counts; announced: the last step at which it said that it
    comes or goes, and how often it had said so, so that no such word counts again; pending: what workers have
    contributed, by the version that it will be applied to; staleness: how often which; dropped: how many came too late;
    leaving: workers that have said that they go; met: those that did when all had, and have not come back since;
    gone: who is not heard of.
    stopping: somebody wants the run to end.
    Whatever changes any of it is a command, which is journaled first.
    """

    def __init__(self, description: ShardSpec, values: Payload, push: Compressor, pull: Compressor | None) -> None:
        description.check_values(values)
        self.description = description
        self.blocks = description.zeros()
        for block, value in zip(self.blocks, values, strict=True):
            block.flat.copy_(value)
        self.version = 0
        self.ledger = AnswerLog()
        self.members = dict.fromkeys(range(description.world), 0)
        self.announced: dict[int, tuple[int, int]] = {}
        self.pending: dict[int, dict[int, Contribution]] = {}
        self.staleness: Counter[int] = Counter()
        self.dropped = 0
        self.waiting: list[Waiting] = []
        self.stopping = False
        self.leaving: set[int] = set()
        self.met: set[int] = set()
        self.gone: set[Peer] = set()
        self.journal: Journal = Forgetful()
        seed = rng.address(description.seed, description.number)
        self.public: Public = Snapshot(self.blocks) if pull is None else DeltaChain(pull, self.blocks, seed)
        self._push, self._seed = push, seed
        self._optimizer = FlatOptimizer(description, self.blocks)

    # -- commands: each is one entry of the journal

    def take(self, stamp: Stamp, version: int, about: str, payload: Payload) -> None:
        """Keep a contribution, to be applied in the step that makes `version`. Raises MalformedError first."""
        contribution = self._read(stamp, version, about, payload)
        self.journal.write(Entry(what="take", stamp=stamp, version=version, about=about, payload=payload))
        self.pending.setdefault(version - 1, {})[stamp.worker] = contribution
        self.staleness[contribution.staleness] += 1
        self._noted(stamp, version)
        self.members.setdefault(stamp.worker, stamp.step + 1)
        self._back(stamp.worker)

    def drop(self, stamp: Stamp) -> None:
        """A contribution came too late."""
        self.journal.write(Entry(what="drop", stamp=stamp))
        self.dropped += 1
        self._noted(stamp, LATE)

    def apply(self, rate: float = 1.0) -> None:
        """Make one step with the weighted mean of what is due in it, if anything, its learning rates times `rate`."""
        self.journal.write(Entry(what="apply", rate=rate))
        due = self.pending.pop(self.version, {})
        given = [due[worker] for worker in sorted(due) if due[worker].gradients]
        if given:
            self._optimizer.step(_mean(given), given[0].options, rate)
        self.version += 1

    def publish(self) -> None:
        """Let workers know the parameters as they are now."""
        self.journal.write(Entry(what="publish"))
        self.public.publish(self.version, self.blocks)

    def join(self, stamp: Stamp) -> None:
        """A worker's next contribution is of stamp.step; stamp.known: how often it has said that it comes or goes."""
        self.journal.write(Entry(what="join", stamp=stamp))
        self.members[stamp.worker], self.announced[stamp.worker] = stamp.step, (stamp.step, stamp.known)
        self._back(stamp.worker)

    def leave(self, stamp: Stamp) -> None:
        """A worker goes after its contributions before stamp.step; stamp.known as in `join`."""
        self.journal.write(Entry(what="leave", stamp=stamp))
        self.members.pop(stamp.worker, None)
        self.announced[stamp.worker] = (stamp.step, stamp.known)
        self._back(stamp.worker)
        self.leaving.add(stamp.worker)

    def lose(self, worker: int) -> None:
        """Nobody waits for the worker until it contributes or joins again."""
        self.journal.write(Entry(what="lose", stamp=Stamp(worker, -1)))
        self.members.pop(worker, None)

    def meet(self) -> None:
        """All that were there have said that they go."""
        self.journal.write(Entry(what="meet"))
        self.met |= self.leaving
        self.leaving = set()

    def replay(self, entry: Entry) -> None:
        """Do again what an entry says."""
        stamp = entry.stamp
        match entry.what:
            case "take":
                self.take(stamp, entry.version, entry.about, entry.payload)
            case "drop":
                self.drop(stamp)
            case "apply":
                self.apply(entry.rate)
            case "publish":
                self.publish()
            case "join":
                self.join(stamp)
            case "leave":
                self.leave(stamp)
            case "lose":
                self.lose(stamp.worker)
            case "meet":
                self.meet()
            case _:
                raise MalformedError(f"a journal says {entry.what!r}, which no shard understands")

    # -- what rules ask

    @property
    def due(self) -> dict[int, Contribution]:
        """What is there for the next step, by worker."""
        return self.pending.get(self.version, {})

    def _back(self, worker: int) -> None:
        self.leaving.discard(worker)
        self.met.discard(worker)

    def _noted(self, stamp: Stamp, version: int) -> None:
        self.ledger.note(stamp, version)
        if stamp.worker in self.members:
            self.members[stamp.worker] = max(self.members[stamp.worker], stamp.step + 1)

    def _read(self, stamp: Stamp, version: int, about: str, payload: Payload) -> Contribution:
        try:
            told = json.loads(about)
            weight, counts = float(told["weight"]), [int(count) for count in told["tensors"]]
            options = tuple(checked_options(group) for group in told["groups"])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise MalformedError(f"{stamp} told of itself by {about[:200]!r}, which cannot be read") from error
        if len(options) != len(self.description.groups) or not 0 <= weight < float("inf"):
            raise MalformedError(f"{stamp} has {len(options)} groups and weight {weight}")
        gradients: tuple[Tensor, ...] = ()
        if weight:
            at = push_at(self._seed, stamp)
            read = shard_message.read(self._push, payload, counts, self.blocks, at)
            gradients = tuple(each.to(accumulation_dtype(each.dtype)) for each in read)
        return Contribution(gradients, weight, options, version - 1 - stamp.known)

    # -- to be kept and restored

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": [block.flat for block in self.blocks],
            "version": self.version,
            "ledger": self.ledger.state_dict(),
            "members": dict(self.members),
            "announced": dict(self.announced),
            "leaving": sorted(self.leaving),
            "met": sorted(self.met),
            "pending": {v: {w: tuple(each) for w, each in due.items()} for v, due in self.pending.items()},
            "staleness": dict(self.staleness),
            "dropped": self.dropped,
            "public": self.public.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for block, flat in zip(self.blocks, state["parameters"], strict=True):
            block.flat.copy_(flat)
        self.version, self.dropped = state["version"], state["dropped"]
        self.ledger.load_state_dict(state["ledger"])
        self.members, self.announced = dict(state["members"]), dict(state["announced"])
        self.staleness = Counter(state["staleness"])
        self.leaving, self.met = set(state["leaving"]), set(state["met"])
        self.pending = {v: {w: Contribution(*each) for w, each in due.items()} for v, due in state["pending"].items()}
        self.public.load_state_dict(state["public"])
        self._optimizer.load_state_dict(state["optimizer"])


def _mean(given: Sequence[Contribution]) -> tuple[Tensor, ...]:
    """The weighted mean, added up in the order given; of one contribution, itself."""
    if len(given) == 1:
        return given[0].gradients
    total = sum(each.weight for each in given)
    sums = tuple(gradient * given[0].weight for gradient in given[0].gradients)
    for each in given[1:]:
        for mean, gradient in zip(sums, each.gradients, strict=True):
            mean.add_(gradient, alpha=each.weight)
    return tuple(mean.div_(total) for mean in sums)
