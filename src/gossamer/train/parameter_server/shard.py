"""Server shard: one server's parameters, optimizer, members and contributions; every change is journaled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.compressors import Compressor
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.json_text import read_json
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Peer, Pull, Stamp
from gossamer.errors import MalformedError
from gossamer.train.checkpoint.files import MALFORMED
from gossamer.train.checkpoint.state import load_optimizer
from gossamer.train.parameter_server import shard_message
from gossamer.train.parameter_server.deduplication import LATE, AnswerLog
from gossamer.train.parameter_server.delta_chain import DeltaChain, PublicParameters, Snapshot
from gossamer.train.parameter_server.journal_entry import Entry, Journal, NullJournal
from gossamer.train.parameter_server.shard_spec import Options, ShardSpec, check_taken, checked_options, optimizer_class
from gossamer.train.parameter_server.shard_state import ReceivedPieces


class Contribution(NamedTuple):
    """A worker's gradients for one step of the shard."""

    gradients: tuple[Tensor, ...]  # (n,) for each block, at least in float32; empty if the worker had none
    weight: float  # in the mean
    options: tuple[Options, ...]  # the optimizer's hyperparameters by group
    staleness: int  # versions applied since the parameters that it was computed from
    fragment: int | None = None  # the group of its blocks; None: all blocks
    steps: int = 1  # local steps that it is the result of


@dataclass
class ArrivalTimes:
    """When contributions arrived, by the server's clock in seconds. It is not journaled."""

    now: float = -inf  # of the last event
    opened: dict[int, float] = field(default_factory=dict)  # by version: arrival of its first contribution
    last: dict[int, float] = field(default_factory=dict)  # by worker: its last contribution
    step_seconds: dict[int, float] = field(default_factory=dict)  # by worker: seconds per local step, measured last

    def add(self, worker: int, version: int, steps: int) -> None:
        """Note that a contribution to `version` arrived now."""
        self.opened.setdefault(version, self.now)
        if worker in self.last and steps:
            self.step_seconds[worker] = (self.now - self.last[worker]) / steps
        self.last[worker] = self.now

    def close(self, version: int) -> None:
        """Forget a version, after it was made."""
        self.opened.pop(version, None)

    def restart(self, worker: int) -> None:
        """Measure a worker again from its next contribution on, after it was disconnected."""
        self.last.pop(worker, None)

    def fastest_step(self, workers: Iterable[int]) -> float:
        """Seconds of a local step of the fastest of these workers; 0 if none was measured."""
        return min((self.step_seconds[each] for each in workers if each in self.step_seconds), default=0.0)


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
        self.members = dict.fromkeys(range(spec.world), 0)  # workers that rounds wait for: the next step of each;
        # in an elastic run, those that have joined
        self.announced: dict[int, tuple[int, int]] = {}  # by worker: step and number of its last join or leave
        self.weights: dict[int, float] = {}  # by worker: weight of its last contribution
        self.pending: dict[int, dict[int, Contribution]] = {}  # by the version they are applied to, and by worker
        self.staleness: Counter[int] = Counter()  # number of contributions by staleness
        self.dropped = 0  # number of late contributions
        self._changed: set[int | None] = set()  # fragments that changed since the last publication; None: all
        self.merged = 0.0  # sum of the weights of applied contributions; of a fragment, divided by their number
        self.arrivals = ArrivalTimes()
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

    def apply(self, lr_factor: float = 1.0, weights: Sequence[float] | None = None) -> None:
        """Step with the weighted mean of the due contributions, if any, and learning rates times `lr_factor`.

        weights: by worker with gradients, in ascending order; None: those of the contributions.
        """
        about = "" if weights is None else json.dumps(list(weights))
        self.journal.write(Entry(command="apply", lr_factor=lr_factor, about=about))
        due = self.pending.pop(self.version, {})
        due_contributions = [due[worker] for worker in sorted(due) if due[worker].gradients]
        if due_contributions:
            given = [each.weight for each in due_contributions] if weights is None else weights
            mean = self._spread(_mean(due_contributions, given), due_contributions[0].fragment)
            self._optimizer.step(mean, due_contributions[0].options, lr_factor)
            self._changed.add(due_contributions[0].fragment)
            parts = 1 if due_contributions[0].fragment is None else len(self.spec.fragments)
            self.merged += sum(each.weight for each in due_contributions) / parts
        self.version += 1
        self.arrivals.close(self.version)

    def skip(self, version: int) -> None:
        """End all rounds before `version`, which have no contributions."""
        self.journal.write(Entry(command="skip", version=version))
        self.version = version

    def publish(self) -> None:
        """Make the current parameters available to pulls."""
        self.journal.write(Entry(command="publish"))
        self.public.publish(self.version, self.blocks, None if None in self._changed else self._changed_blocks())
        self._changed.clear()

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
        self._shorten(stamp.worker)
        if ends:
            self.ended.add(stamp.worker)

    def lose(self, worker: int) -> None:
        """Remove a worker until it contributes or joins again."""
        self.journal.write(Entry(command="lose", stamp=Stamp(worker, -1)))
        self.members.pop(worker, None)
        self._shorten(worker)
        self.arrivals.restart(worker)

    def all_left(self) -> None:
        """Record that all members have announced their leave."""
        self.journal.write(Entry(command="meet"))
        self.left |= self.leaving
        self.leaving = set()

    def stop(self) -> None:
        """Record that a worker requested the end of the run."""
        self.journal.write(Entry(command="stop"))
        self.stopping = True

    def finish(self) -> None:
        """End the run for all connected workers, which receive the parameters; the others have missed the end."""
        self.journal.write(Entry(command="finish"))
        self.released, self.missed = set(self.ended), {*range(self.spec.world), *self.announced} - self.ended
        self.stopping = False

    def miss(self, worker: int) -> None:
        """Record that a worker came after the end of an elastic run, and contributes nothing."""
        self.journal.write(Entry(command="miss", stamp=Stamp(worker, -1)))
        self.missed.add(worker)

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
                self.apply(entry.lr_factor, json.loads(entry.about) if entry.about else None)
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
            case "stop":
                self.stop()
            case "finish":
                self.finish()
            case "miss":
                self.miss(stamp.worker)
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
        self.journal.start_over()

    # -- reading

    @property
    def due(self) -> dict[int, Contribution]:
        """Contributions for the next step, by worker."""
        return self.pending.get(self.version, {})

    @property
    def next_version(self) -> int:
        """The next round with contributions, now or in the future."""
        return min((*self.pending, *self.members.values()))

    @property
    def furthest_step(self) -> int:
        """The largest next step of a member; without members, of all workers."""
        return max(self.members.values(), default=self.answer_log.next_step)

    def _shorten(self, worker: int) -> None:
        if self.spec.is_elastic:
            self.answer_log.shorten(worker)

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
            fragment, steps = header.get("fragment"), int(header.get("steps", 1))
            blocks = [self.blocks[number] for number in self.spec.blocks_of(fragment)]
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
            read = shard_message.decode(self._push, payload, counts, blocks, at)
            gradients = tuple(each.to(accumulation_dtype(each.dtype)) for each in read)
        return Contribution(gradients, weight, options, version - 1 - stamp.known, fragment, max(steps, 0))

    def _changed_blocks(self) -> set[int]:
        return {number for fragment in self._changed for number in self.spec.blocks_of(fragment)}

    def _spread(self, values: Sequence[Tensor], fragment: int | None) -> list[Tensor | None]:
        """The values of a fragment by block, with None for all other blocks."""
        spread: list[Tensor | None] = [None] * len(self.blocks)
        for number, value in zip(self.spec.blocks_of(fragment), values, strict=True):
            spread[number] = value
        return spread

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
            "stopping": self.stopping,
            "end": [sorted(self.ended), sorted(self.released), sorted(self.missed)],
            "pending": {v: {w: tuple(each) for w, each in due.items()} for v, due in self.pending.items()},
            "staleness": dict(self.staleness),
            "dropped": self.dropped,
            "merged": self.merged,
            "changed": list(self._changed),
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
        self.merged, self._changed = float(state.get("merged", 0.0)), set(state.get("changed", [None]))
        self.staleness = Counter(state["staleness"])
        self.leaving, self.left = set(state["leaving"]), set(state["met"])
        self.stopping = bool(state.get("stopping", False))
        self.ended, self.released, self.missed = map(set, state.get("end", [[], [], []]))
        self.pending = {v: {w: Contribution(*each) for w, each in due.items()} for v, due in state["pending"].items()}
        self.public.load_state_dict(state["public"])
        self._optimizer.load_state_dict(state["optimizer"])


def _mean(contributions: Sequence[Contribution], weights: Sequence[float]) -> tuple[Tensor, ...]:
    """The weighted mean, summed in the given order; a single contribution is returned unchanged."""
    if len(contributions) == 1:
        return contributions[0].gradients
    total = sum(weights)
    sums = tuple(gradient * weights[0] for gradient in contributions[0].gradients)
    for each, weight in zip(contributions[1:], weights[1:], strict=True):
        for mean, gradient in zip(sums, each.gradients, strict=True):
            mean.add_(gradient, alpha=weight)
    return tuple(mean.div_(total) for mean in sums)


# -- the optimizer that steps a shard's blocks -------------------------------------------------------------------------


class FlatOptimizer:
    """The workers' optimizer, rebuilt on whole blocks. For an elementwise rule the result is the same.

    velocities: by block, whether gradients include SGD's momentum. Weight decay stays in the optimizer with its own
    momentum, and both are added, since SGD is linear.
    """

    def __init__(self, spec: ShardSpec, blocks: Sequence[FlatTensors], velocities: Sequence[bool]) -> None:
        self._velocities = velocities
        self._parameters = [Parameter(block.flat) for block in blocks]
        self._groups = [block.group for block in spec.blocks]
        kind = optimizer_class(spec.optimizer)
        given = [_given(kind, group) for group in spec.groups]
        self._optimizer = kind(
            [
                {"params": [parameter], **given[group]}
                for parameter, group in zip(self._parameters, self._groups, strict=True)
            ],
            **_arguments(kind, given[0]),  # Adagrad takes its initial sums from these, not from the groups
        )

    def step(self, gradients: Sequence[Tensor | None], options: Sequence[Options], lr_factor: float = 1.0) -> None:
        """Make one step with the groups' hyperparameters `options`, with learning rates multiplied by `lr_factor`.

        A delayed momentum has a share instead, which multiplies the gradients. Blocks without a gradient do not change.
        """
        for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({name: value for name, value in options[number].items() if name in group})
            scaled = "share" if "share" in group else "lr"
            group[scaled] = group[scaled] * lr_factor if lr_factor != 1.0 else group[scaled]
        for parameter, gradient, group, ready in self._with_groups(gradients):
            if gradient is not None:
                parameter.grad = self._decay_only(parameter, group) if ready else gradient.to(parameter.dtype)
        self._optimizer.step()
        for parameter, gradient, group, ready in self._with_groups(gradients):
            parameter.grad = None
            if ready and gradient is not None:
                parameter.detach().sub_(gradient.to(parameter.dtype), alpha=group["lr"])

    def _with_groups(
        self, gradients: Sequence[Tensor | None]
    ) -> Iterator[tuple[Parameter, Tensor | None, dict[str, Any], bool]]:
        return zip(self._parameters, gradients, self._optimizer.param_groups, self._velocities, strict=True)

    def _decay_only(self, parameter: Parameter, group: dict[str, Any]) -> Tensor | None:
        """A gradient of zeros; None if there is no weight decay, now or before."""
        decays = group.get("weight_decay") or parameter in self._optimizer.state
        return torch.zeros_like(parameter) if decays else None

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_optimizer(self._optimizer, state)


def _arguments(kind: Callable[..., Optimizer], options: Options) -> Options:
    """The options that are constructor arguments; AdamW has a default that is not."""
    return {name: value for name, value in options.items() if name in signature(kind).parameters}


def _given(kind: Callable[..., Optimizer], options: Options) -> Options:
    """The options of the optimizer class; schedulers add others to the groups."""
    known = kind([Parameter(torch.zeros(1))], lr=0.0).defaults
    return {name: value for name, value in options.items() if name in known}
