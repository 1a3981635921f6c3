"""Update rules: the synchronous, the stale synchronous and the asynchronous policy of a server."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.strategies.parameter_server import ASYNC, ParameterServer
from gossamer.base.peer_ops import Pull, Stamp
from gossamer.train.parameter_server.deduplication import LATE
from gossamer.train.parameter_server.shard import ServerShard
from gossamer.train.parameter_server.update_policy import PARAMETERS, UpdatePolicy


@dataclass(frozen=True)
class SynchronousPolicy(UpdatePolicy):
    """Synchronous rounds: a step is applied once all members but `backup` have contributed. Clock: the version."""

    backup: int = 0  # workers whose contributions a round does not wait for

    def first_open_step(self, shard: ServerShard) -> int:
        return shard.version

    def version_of(self, shard: ServerShard, stamp: Stamp) -> int:
        return stamp.step + 1 if stamp.step >= shard.version else LATE

    def should_apply(self, shard: ServerShard) -> bool:
        """A round without contributions ends once all members have joined at a later one."""
        awaited = sum(step <= shard.version for step in shard.members.values())
        return bool(shard.members) and awaited <= (self.backup if shard.due else 0)

    def lr_factor(self, shard: ServerShard) -> float:
        return 1.0

    def should_publish(self, shard: ServerShard) -> bool:
        return shard.public.version < shard.version


@dataclass(frozen=True)
class AsynchronousPolicy(UpdatePolicy):
    """Asynchronous SGD: each contribution is a step of its own, at once."""

    damping: bool = False  # divide its learning rate by its staleness in versions

    def first_open_step(self, shard: ServerShard) -> int:
        return 0

    def version_of(self, shard: ServerShard, stamp: Stamp) -> int:
        return shard.version + 1

    def should_apply(self, shard: ServerShard) -> bool:
        return bool(shard.due)

    def lr_factor(self, shard: ServerShard) -> float:
        oldest = max((each.staleness for each in shard.due.values()), default=0)
        return 1 / max(1, oldest) if self.damping else 1.0

    def should_publish(self, shard: ServerShard) -> bool:
        """Where a pull waits, and about every member has contributed since the last publication."""
        since = shard.version - shard.public.version
        asked = any(each.op.key == PARAMETERS for each in shard.pending_pulls)
        return asked and since >= shard.public.publish_interval(len(shard.members))


@dataclass(frozen=True)
class StaleSynchronousPolicy(UpdatePolicy):
    """Stale synchronous parallel: each contribution is applied at once, and pulls wait for members that are behind.

    A member's clock is its next step. A worker computes step c after a pull with at_least = c - staleness, so it has
    all its own contributions, all others' of steps before c - staleness, and whatever else has arrived.
    source: Ho et al. 2013, NeurIPS
    """

    def first_open_step(self, shard: ServerShard) -> int:
        """The slowest member's; where all have left, the one after everybody's last, which they begin together."""
        return min(shard.members.values(), default=shard.answer_log.next_step)

    def version_of(self, shard: ServerShard, stamp: Stamp) -> int:
        """One of before the slowest member's clock is of a worker that was lost: it would be older than the bound."""
        return LATE if stamp.step < min(shard.members.values(), default=0) else shard.version + 1

    def is_reached(self, shard: ServerShard, pull: Pull) -> bool:
        return min(shard.members.values(), default=pull.at_least) >= pull.at_least

    def should_apply(self, shard: ServerShard) -> bool:
        return bool(shard.due)

    def lr_factor(self, shard: ServerShard) -> float:
        """A contribution's share of its round: its weight over those of all workers that have contributed to it or
        will, each as it was last."""
        given = sum(each.weight for each in shard.due.values())
        step = min(map(shard.answer_log.last_step, shard.due))
        beside = [worker for worker in range(shard.spec.world) if worker not in shard.due]
        taking_part = (each for each in beside if each in shard.members or shard.answer_log.last_step(each) >= step)
        others = sum(shard.weights.get(worker, given) for worker in taking_part)
        return given / (given + others) if given else 1.0

    def should_publish(self, shard: ServerShard) -> bool:
        """With each pull that is answered: a worker reads its own writes at once."""
        asked = any(each.op.key == PARAMETERS and self.is_reached(shard, each.op) for each in shard.pending_pulls)
        return asked and shard.public.version < shard.version


def policy_of(strategy: ParameterServer) -> UpdatePolicy:
    """The policy of a strategy's servers. Without any staleness, stale synchronous parallel is lock step."""
    if strategy.mode == ASYNC:
        return AsynchronousPolicy(strategy.damping)
    return StaleSynchronousPolicy() if strategy.rounds_ahead else SynchronousPolicy(strategy.backup)
