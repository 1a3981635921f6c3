"""Update policies: when a server applies contributions and answers pulls. A policy keeps no state beside the shard.

The staleness bound is the strategy's (gossamer.strategies.parameter_server); a client keeps to it by what it pulls.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gossamer.core.peer_ops import (
    WORKER,
    Answer,
    Arrived,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.errors import MalformedError
from gossamer.parameter_server.deduplication import LATE
from gossamer.parameter_server.shard import PendingPull, ServerShard
from gossamer.parameter_server.shard_spec import ShardSpec
from gossamer.strategies.parameter_server import ASYNC, ParameterServer

BEGIN, JOIN, LEAVE, GRADIENT, STOP = "begin", "join", "leave", "gradient", "stop"  # keys of pushes
PARAMETERS, EXACT, END = "parameters", "exact", "end"  # keys of pulls: by the recipe's codec, uncompressed, at the end
AGREED, TOGETHER = "agreed", "together"  # the settings all workers share; once all workers that left are back

NEVER_ANNOUNCED = (-1, 0)  # the step and number of a worker's last join or leave, before its first


class UpdatePolicy(ABC):
    """Decides when contributions are applied and pulls answered; `react` handles an event by these decisions."""

    @abstractmethod
    def first_open_step(self, shard: ServerShard) -> int:
        """The first step that a worker joining now may contribute."""

    @abstractmethod
    def version_of(self, shard: ServerShard, stamp: Stamp) -> int:
        """The version that a contribution makes, alone or with others; LATE where that was made without it."""

    @abstractmethod
    def should_apply(self, shard: ServerShard) -> bool:
        """Whether the contributions that are due are applied now."""

    @abstractmethod
    def lr_factor(self, shard: ServerShard) -> float:
        """The factor on the learning rate of the next step."""

    @abstractmethod
    def should_publish(self, shard: ServerShard) -> bool:
        """Whether parameters are published before pulls are answered."""

    def is_reached(self, shard: ServerShard, pull: Pull) -> bool:
        """Whether a pull's clock is reached."""
        return shard.public.version >= pull.at_least

    def react(self, shard: ServerShard, event: PeerEvent) -> Iterator[Reply]:
        """Handle an event; yields replies. A contribution is in the journal before its receipt is given."""
        match event:
            case Arrived(token=token, sender=sender, op=Push() as push):
                yield Reply(token=token, answer=self.receive(shard, sender, push))
            case Arrived(token=token, sender=sender, op=Pull() as pull):
                if pull.known > shard.public.version:  # what it knows came after the journal's end
                    yield Reply(token=token, answer=forgot(pull))
                else:
                    shard.pending_pulls.append(PendingPull(token, sender, pull))
            case PeerJoined(peer=peer):
                shard.lost.discard(peer)
            case PeerLeft(peer=peer):
                self.lose(shard, peer)
        yield from self.settle(shard)

    def receive(self, shard: ServerShard, sender: Peer, push: Push) -> Receipt:
        try:
            if sender != (WORKER, push.stamp.worker):
                raise MalformedError(f"{sender} sent a push stamped by worker {push.stamp.worker}; it was not applied")
            answers = {
                GRADIENT: self.receive_gradient,
                JOIN: self.join,
                LEAVE: self.leave,
                BEGIN: self.begin,
                STOP: self.stop,
            }
            if push.key not in answers:
                raise MalformedError(
                    f"server {shard.spec.number} knows no push of {push.key!r} ({sender}, step {push.stamp.step}). "
                    "Install the same version of Gossamer everywhere"
                )
            return answers[push.key](shard, push)
        except MalformedError as error:
            return refusal(str(error))

    def receive_gradient(self, shard: ServerShard, push: Push) -> Receipt:
        """A gradient; a duplicate is answered as before."""
        stamp = push.stamp
        version = shard.answer_log.version_of(stamp)
        if version is None:
            version = self.version_of(shard, stamp)
            if version == LATE:
                shard.drop(stamp)
            else:
                shard.take(stamp, version, push.about, push.payload)
        return Receipt(version=version)

    def join(self, shard: ServerShard, push: Push) -> Receipt:
        """A worker contributes from stamp.step on; where that step is over, the receipt names the first open one.

        stamp.known numbers its joins and leaves.
        """
        worker, step, announcements = push.stamp
        _check_agreed(push.about, shard)
        announced = shard.announced.get(worker, NEVER_ANNOUNCED)
        if shard.members.get(worker) == step and announced == (step, announcements):  # a duplicate
            return Receipt(version=shard.version)
        open_step = announced[0] + (announced >= (step, announcements))
        first_open_step = max(self.first_open_step(shard), shard.answer_log.last_step(worker) + 1, open_step)
        if step < first_open_step:
            return Receipt(version=LATE, about=json.dumps({"least": first_open_step}))
        shard.join(push.stamp)
        return Receipt(version=shard.version)

    def leave(self, shard: ServerShard, push: Push) -> Receipt:
        """Rounds do not wait for the worker any more. stamp: as in `join`."""
        stamp = push.stamp
        fresh = stamp.step > shard.answer_log.last_step(stamp.worker)
        if fresh and (stamp.step, stamp.known) > shard.announced.get(stamp.worker, NEVER_ANNOUNCED):
            shard.leave(stamp)
        return Receipt(version=shard.version)

    def begin(self, shard: ServerShard, push: Push) -> Receipt:
        """The spec and initial parameters, which are here already: a duplicate, or the server was restored."""
        _check_agreed(ShardSpec.from_json(push.about).agreed_settings(), shard)
        return Receipt(version=shard.version)

    def stop(self, shard: ServerShard, push: Push) -> Receipt:
        """A worker wants the run to end: all hear of it with their next parameters."""
        shard.stopping = True
        return Receipt(version=shard.version)

    def lose(self, shard: ServerShard, peer: Peer) -> None:
        """Rounds do not wait for a lost peer. Its asks are still answered: it may only have been silent."""
        shard.lost.add(peer)
        if peer.kind == WORKER and peer.number in shard.members:
            shard.lose(peer.number)

    def settle(self, shard: ServerShard) -> Iterator[Reply]:
        """Apply contributions that are due and answer the pulls that waited for them."""
        self._publish(shard)
        while self.should_apply(shard) or (self._all_left(shard) and shard.pending):
            shard.apply(self.lr_factor(shard))
            self._publish(shard)
        if self._all_left(shard):
            shard.all_left()
        answered = [each for each in shard.pending_pulls if self._is_answered(shard, each)]
        for each in answered:
            shard.pending_pulls.remove(each)
            yield Reply(token=each.token, answer=_pulled(shard, each.op))

    def _all_left(self, shard: ServerShard) -> bool:
        """Whether all workers still there have announced that they leave."""
        return bool(shard.leaving) and not shard.members

    def _is_answered(self, shard: ServerShard, each: PendingPull) -> bool:
        match each.op.key:
            case "end":
                return each.sender.number in shard.left
            case "together":
                return all((WORKER, worker) in shard.lost for worker in shard.left)
            case _:
                return self.is_reached(shard, each.op)

    def _publish(self, shard: ServerShard) -> None:
        if self.should_publish(shard):
            shard.publish()


@dataclass(frozen=True)
class SynchronousPolicy(UpdatePolicy):
    """Synchronous rounds (also stale-synchronous): a step is applied once all members but `backup` have contributed.

    A shard's clock is its version. A worker pushes step c after a pull with at_least = c - ahead, so it is at most
    `ahead` rounds beyond the slowest member.
    """

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


def policy_of(strategy: ParameterServer) -> UpdatePolicy:
    """The policy of a strategy's servers."""
    return AsynchronousPolicy(strategy.damping) if strategy.mode == ASYNC else SynchronousPolicy(strategy.backup)


def _check_agreed(agreed: str, shard: ServerShard) -> None:
    if agreed != shard.spec.agreed_settings():
        raise MalformedError(
            f"it runs {agreed}, and the server was begun with {shard.spec.agreed_settings()}. Run the same script with "
            "the same recipe on every worker"
        )


def _pulled(shard: ServerShard, pull: Pull) -> Pulled:
    if pull.key == PARAMETERS:
        answer = shard.public.pulled_since(pull.known)
        if not shard.stopping:
            return answer
        return replace(answer, about=json.dumps({**json.loads(answer.about), "stop": True}))
    if pull.key in (AGREED, TOGETHER):
        return Pulled(version=shard.version, about=shard.spec.agreed_settings())
    about = {"applied": shard.staleness.total(), "late": shard.dropped, "staleness": shard.staleness}
    values = tuple(block.flat.clone() for block in shard.blocks)
    return Pulled(version=shard.version, payload=values, about=json.dumps(about))


def forgot(op: Push | Pull) -> Answer:
    """The answer to an ask that supposes state this server has lost; the asker raises PeerLost."""
    about = json.dumps({"forgot": True})
    return Receipt(version=LATE, about=about) if isinstance(op, Push) else Pulled(version=LATE, about=about)


def refusal(why: str) -> Receipt:
    """An answer that the asker raises as an error."""
    return Receipt(version=LATE, about=json.dumps({"refused": why}))
