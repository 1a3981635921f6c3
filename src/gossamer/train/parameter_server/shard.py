"""Server shard: one server's parameters, optimizer, members and contributions; every change is journaled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.json_text import read_json
from gossamer.base.layout import Layout, accumulation_dtype
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Peer, Pull, Stamp
from gossamer.errors import MalformedError
from gossamer.train.checkpoint.files import MALFORMED
from gossamer.train.parameter_server import shard_message
from gossamer.train.parameter_server.deduplication import LATE, AnswerLog
from gossamer.train.parameter_server.delta_chain import DeltaChain, PublicParameters, Snapshot
from gossamer.train.parameter_server.flat_optimizer import FlatOptimizer
from gossamer.train.parameter_server.journal_entry import Entry, Journal, NullJournal
from gossamer.train.parameter_server.shard_spec import Options, ShardSpec, check_taken, checked_options
from gossamer.train.parameter_server.shard_state import ReceivedPieces


class Contribution(NamedTuple):
    """A worker's gradients for one step of the shard."""

    gradients: tuple[Tensor, ...]  # (n,) for each block, at least in float32; empty if the worker had none
    weight: float  # in the mean
    options: tuple[Options, ...]  # the optimizer's hyperparameters by group
    staleness: int  # versions applied since the parameters that it was computed from


class PendingPull(NamedTuple):
    """A pull to be answered later."""

    token: int
    sender: Peer
    op: Pull


def push_context(seed: int, stamp: Stamp) -> AggregationContext:
    """The context for encoding and decoding a worker's gradients of one step."""
    return AggregationContext(step=stamp.step, seed=rng.address(seed, "push"), rank=stamp.worker)


def has_velocity(push: Compressor, layout: Layout) -> bool:
    """Whether a block's gradients include the optimizer's momentum: the same for all its tensors."""
    return push.owns_momentum(next(iter(layout))) is not None


class ServerShard:
    """Parameters `blocks` after `version` applied rounds, and all other state of a server.

    Every change is a command, which is journaled first.
    """

    def __init__(self, spec: ShardSpec, values: Payload, push: Compressor, pull: Compressor | None) -> None:
        spec.check_values(values)
        self.spec = spec
        self.blocks = spec.zeros()
        for block, value in zip(self.blocks, values, strict=True):
            block.flat.copy_(value)
        self.version = 0
        self.answer_log = AnswerLog()
        self.members = dict.fromkeys(range(spec.world), 0)  # workers that rounds wait for: the next step of each
        self.announced: dict[int, tuple[int, int]] = {}  # by worker: step and number of its last join or leave
        self.weights: dict[int, float] = {}  # by worker: weight of its last contribution
        self.pending: dict[int, dict[int, Contribution]] = {}  # by the version they are applied to, and by worker
        self.staleness: Counter[int] = Counter()  # number of contributions by staleness
        self.dropped = 0  # number of late contributions
        self.pending_pulls: list[PendingPull] = []
        self.stopping = False  # a worker requested the end of the run
        self.leaving: set[int] = set()  # workers that announced their leave
        self.left: set[int] = set()  # workers that had left when all had, and did not return since
        self.ended: set[int] = set()  # workers that announced to leave for good
        self.released: set[int] = set()  # workers that may receive the final parameters
        self.missed: set[int] = set()  # workers that were disconnected when the others ended
        self.lost: set[Peer] = set()  # disconnected peers
        self.journal: Journal = NullJournal()
        self.received = ReceivedPieces(sum(block.flat.nbytes for block in self.blocks))
        self.receivers = b""  # the state that a worker is pulling
        seed = rng.address(spec.seed, spec.number)
        self.public: PublicParameters = Snapshot(self.blocks) if pull is None else DeltaChain(pull, self.blocks, seed)
        self._push, self._seed = push, seed
        self._optimizer = FlatOptimizer(spec, self.blocks, [has_velocity(push, block.layout) for block in self.blocks])

    # -- commands: each is a journal entry of the same name

    def take(self, stamp: Stamp, version: int, about: str, payload: Payload) -> None:
        """Store a contribution for the step that makes `version`. Raises MalformedError before any change."""
        contribution = self._read(stamp, version, about, payload)
        self.journal.write(Entry(command="take", stamp=stamp, version=version, about=about, payload=payload))
        self.pending.setdefault(version - 1, {})[stamp.worker] = contribution
        self.weights[stamp.worker] = contribution.weight
        self.staleness[contribution.staleness] += 1
        self._record(stamp, version)
        self.members.setdefault(stamp.worker, stamp.step + 1)
        self._returned(stamp.worker)

    def drop(self, stamp: Stamp) -> None:
        """Record a late contribution."""
        self.journal.write(Entry(command="drop", stamp=stamp))
        self.dropped += 1
        self._record(stamp, LATE)

    def apply(self, lr_factor: float = 1.0) -> None:
        """Step with the weighted mean of the due contributions, if any, and learning rates times `lr_factor`."""
        self.journal.write(Entry(command="apply", lr_factor=lr_factor))
        due = self.pending.pop(self.version, {})
        due_contributions = [due[worker] for worker in sorted(due) if due[worker].gradients]
        if due_contributions:
            self._optimizer.step(_mean(due_contributions), due_contributions[0].options, lr_factor)
        self.version += 1

    def skip(self, version: int) -> None:
        """End all rounds before `version`, which have no contributions."""
        self.journal.write(Entry(command="skip", version=version))
        self.version = version

    def publish(self) -> None:
        """Make the current parameters available to pulls."""
        self.journal.write(Entry(command="publish"))
        self.public.publish(self.version, self.blocks)

    def join(self, stamp: Stamp) -> None:
        """Add a worker with next contribution for stamp.step; stamp.known counts its joins and leaves."""
        self.journal.write(Entry(command="join", stamp=stamp))
        self.members[stamp.worker], self.announced[stamp.worker] = stamp.step, (stamp.step, stamp.known)
        self._returned(stamp.worker)

    def leave(self, stamp: Stamp, *, ends: bool) -> None:
        """Remove a worker after its contributions before stamp.step; stamp.known as in `join`. ends: for good."""
        self.journal.write(Entry(command="leave", stamp=stamp, version=int(ends)))
        self.members.pop(stamp.worker, None)
        self.announced[stamp.worker] = (stamp.step, stamp.known)
        self._returned(stamp.worker)
        self.leaving.add(stamp.worker)
        if ends:
            self.ended.add(stamp.worker)

    def lose(self, worker: int) -> None:
        """Remove a worker until it contributes or joins again."""
        self.journal.write(Entry(command="lose", stamp=Stamp(worker, -1)))
        self.members.pop(worker, None)

    def all_left(self) -> None:
        """Record that all members have announced their leave."""
        self.journal.write(Entry(command="meet"))
        self.left |= self.leaving
        self.leaving = set()

    def finish(self) -> None:
        """End the run for all connected workers, which receive the parameters; the others have missed the end."""
        self.journal.write(Entry(command="finish"))
        self.released, self.missed = set(self.ended), set(range(self.spec.world)) - self.ended

    def catch_up(self, worker: int) -> None:
        """Release the parameters to a worker that missed the end."""
        self.journal.write(Entry(command="catch up", stamp=Stamp(worker, -1)))
        self.missed.discard(worker)
        self.ended.add(worker)
        self.released.add(worker)

    def reopen(self) -> None:
        """Continue after the end, since a worker that had ended continues."""
        self.journal.write(Entry(command="reopen"))
        self.missed.clear()

    def replay(self, entry: Entry) -> None:
        """Execute a journaled command."""
        stamp = entry.stamp
        match entry.command:
            case "take":
                self.take(stamp, entry.version, entry.about, entry.payload)
            case "drop":
                self.drop(stamp)
            case "apply":
                self.apply(entry.lr_factor)
            case "skip":
                self.skip(entry.version)
            case "publish":
                self.publish()
            case "join":
                self.join(stamp)
            case "leave":
                self.leave(stamp, ends=bool(entry.version))
            case "lose":
                self.lose(stamp.worker)
            case "meet":
                self.all_left()
            case "finish":
                self.finish()
            case "catch up":
                self.catch_up(stamp.worker)
            case "reopen":
                self.reopen()
            case _:
                raise MalformedError(
                    f"a journal of shard {self.spec.number} has the unknown command {entry.command!r}: another "
                    "version of Gossamer wrote it. Install that version, or start with an empty directory"
                )

    def restore(self, state: dict[str, Any]) -> None:
        """Adopt the state of another run's shard. Raises MalformedError if it does not fit."""
        try:
            self.load_state_dict(state)
        except MALFORMED as error:
            raise MalformedError(
                f"the state does not fit shard {self.spec.number} ({type(error).__name__}: {error}). Load it with the "
                "model, optimizer, recipe and number of servers of the run that saved it"
            ) from error
        self.stopping = False
        self.journal.begin_anew()

    # -- reading

    @property
    def due(self) -> dict[int, Contribution]:
        """Contributions for the next step, by worker."""
        return self.pending.get(self.version, {})

    @property
    def next_version(self) -> int:
        """The next round with contributions, now or in the future."""
        return min((*self.pending, *self.members.values()))

    def _returned(self, worker: int) -> None:
        for each in (self.leaving, self.left, self.ended, self.released):
            each.discard(worker)

    def _record(self, stamp: Stamp, version: int) -> None:
        self.answer_log.record(stamp, version)
        if stamp.worker in self.members:
            self.members[stamp.worker] = max(self.members[stamp.worker], stamp.step + 1)

    def _read(self, stamp: Stamp, version: int, about: str, payload: Payload) -> Contribution:
        try:
            header = read_json(about)
            weight, counts = float(header["weight"]), [int(count) for count in header["tensors"]]
            options = tuple(checked_options(group) for group in header["groups"])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise MalformedError(
                f"worker {stamp.worker} described step {stamp.step} by {about[:200]!r}, which cannot be read; nothing "
                "of it was applied. Install the same version of Gossamer everywhere"
            ) from error
        if len(options) != len(self.spec.groups) or not 0 <= weight < float("inf"):
            raise MalformedError(
                f"worker {stamp.worker} sent step {stamp.step} with {len(options)} groups and weight {weight}; shard "
                f"{self.spec.number} has {len(self.spec.groups)} groups, and weights must be finite and not negative"
            )
        for own, given in zip(options, self.spec.groups, strict=True):
            check_taken(self.spec.optimizer, own, given)
        gradients: tuple[Tensor, ...] = ()
        if weight:
            at = push_context(self._seed, stamp)
            read = shard_message.decode(self._push, payload, counts, self.blocks, at)
            gradients = tuple(each.to(accumulation_dtype(each.dtype)) for each in read)
        return Contribution(gradients, weight, options, version - 1 - stamp.known)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": [block.flat for block in self.blocks],
            "version": self.version,
            "ledger": self.answer_log.state_dict(),
            "members": dict(self.members),
            "announced": dict(self.announced),
            "weights": dict(self.weights),
            "leaving": sorted(self.leaving),
            "met": sorted(self.left),
            "end": [sorted(self.ended), sorted(self.released), sorted(self.missed)],
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
        self.answer_log.load_state_dict(state["ledger"])
        self.members, self.announced = dict(state["members"]), dict(state["announced"])
        self.weights = dict(state.get("weights", {}))  # missing in older journals
        self.staleness = Counter(state["staleness"])
        self.leaving, self.left = set(state["leaving"]), set(state["met"])
        self.ended, self.released, self.missed = map(set, state.get("end", [[], [], []]))
        self.pending = {v: {w: Contribution(*each) for w, each in due.items()} for v, due in state["pending"].items()}
        self.public.load_state_dict(state["public"])
        self._optimizer.load_state_dict(state["optimizer"])


def _mean(due_contributions: Sequence[Contribution]) -> tuple[Tensor, ...]:
    """The weighted mean, summed in the given order; a single contribution is returned unchanged."""
    if len(due_contributions) == 1:
        return due_contributions[0].gradients
    total = sum(each.weight for each in due_contributions)
    sums = tuple(gradient * due_contributions[0].weight for gradient in due_contributions[0].gradients)
    for each in due_contributions[1:]:
        for mean, gradient in zip(sums, each.gradients, strict=True):
            mean.add_(gradient, alpha=each.weight)
    return tuple(mean.div_(total) for mean in sums)
