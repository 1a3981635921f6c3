"""What a server does when something happens. Rules are pure: all they know is the shard, and it is all they change."""

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
from gossamer.parameter_server.shard import ServerShard, Waiting
from gossamer.parameter_server.shard_spec import ShardSpec
from gossamer.strategies.parameter_server import ASYNC, ParameterServer

BEGIN, JOIN, LEAVE, GRADIENT, STOP = "begin", "join", "leave", "gradient", "stop"  # what is pushed
PARAMETERS, EXACT, END = "parameters", "exact", "end"  # what is pulled: as the recipe says, as they are, in the end
AGREED, TOGETHER = "agreed", "together"  # what all workers must have in common; once all that met are back


NOTHING = (-1, 0)  # what a worker has said of coming and going before it has: a step, and how often


class UpdatePolicy(ABC):
    """When contributions are applied, and when workers are told. `react` is what a server does; the rest is decided."""

    @abstractmethod
    def least(self, shard: ServerShard) -> int:
        """The first step that a worker which joins now may contribute."""

    @abstractmethod
    def becomes(self, shard: ServerShard, stamp: Stamp) -> int:
        """The version that a contribution makes, with others perhaps; LATE where it was made without it."""

    @abstractmethod
    def ready(self, shard: ServerShard) -> bool:
        """Whether what is due is applied now."""

    @abstractmethod
    def rate(self, shard: ServerShard) -> float:
        """By what the learning rate of the next step is multiplied."""

    @abstractmethod
    def news(self, shard: ServerShard) -> bool:
        """Whether parameters are published before pulls are answered."""

    def reached(self, shard: ServerShard, pull: Pull) -> bool:
        """Whether a pull is answered: its clock is reached; at the end, once everyone has met."""
        return shard.public.version >= pull.at_least

    def react(self, shard: ServerShard, event: PeerEvent) -> Iterator[Reply]:
        """All that follows from an event. A contribution is in the journal before its receipt is given."""
        match event:
            case Arrived(token=token, sender=sender, op=Push() as push):
                yield Reply(token=token, answer=self.hear(shard, sender, push))
            case Arrived(token=token, sender=sender, op=Pull() as pull):
                if pull.known > shard.public.version:  # what it knows came after the journal's end
                    yield Reply(token=token, answer=forgotten(pull))
                else:
                    shard.waiting.append(Waiting(token, sender, pull))
            case PeerJoined(peer=peer):
                shard.gone.discard(peer)
            case PeerLeft(peer=peer):
                self.lose(shard, peer)
        yield from self.settle(shard)

    def hear(self, shard: ServerShard, sender: Peer, push: Push) -> Receipt:
        try:
            if sender != (WORKER, push.stamp.worker):
                raise MalformedError(f"{sender} sent what {push.stamp} should have sent")
            answers = {GRADIENT: self.take, JOIN: self.join, LEAVE: self.leave, BEGIN: self.begin, STOP: self.stop}
            if push.key not in answers:
                raise MalformedError(f"a server has no use for {push.key!r}")
            return answers[push.key](shard, push)
        except MalformedError as error:
            return refused(str(error))

    def take(self, shard: ServerShard, push: Push) -> Receipt:
        """A gradient: what was answered before is answered alike."""
        stamp = push.stamp
        version = shard.ledger.answer(stamp)
        if version is None:
            version = self.becomes(shard, stamp)
            if version == LATE:
                shard.drop(stamp)
            else:
                shard.take(stamp, version, push.about, push.payload)
        return Receipt(version=version)

    def join(self, shard: ServerShard, push: Push) -> Receipt:
        """A worker will contribute from stamp.step on, unless that is over; what it may instead is told.

        stamp.known counts what it has said of coming and going.
        """
        worker, step, ops = push.stamp
        _check_agreed(push.about, shard)
        said = shard.announced.get(worker, NOTHING)
        if shard.members.get(worker) == step and said == (step, ops):  # it comes again
            return Receipt(version=shard.version)
        open_step = said[0] + (said >= (step, ops))
        least = max(self.least(shard), shard.ledger.last(worker) + 1, open_step)
        if step < least:
            return Receipt(version=LATE, about=json.dumps({"least": least}))
        shard.join(push.stamp)
        return Receipt(version=shard.version)

    def leave(self, shard: ServerShard, push: Push) -> Receipt:
        """Nobody waits for a worker any more. stamp: as when it joins."""
        stamp = push.stamp
        fresh = stamp.step > shard.ledger.last(stamp.worker)
        if fresh and (stamp.step, stamp.known) > shard.announced.get(stamp.worker, NOTHING):
            shard.leave(stamp)
        return Receipt(version=shard.version)

    def begin(self, shard: ServerShard, push: Push) -> Receipt:
        """The description and first parameters, which are here already: they came twice, or the server came back."""
        _check_agreed(ShardSpec.of_text(push.about).agreed(), shard)
        return begun(shard)

    def stop(self, shard: ServerShard, push: Push) -> Receipt:
        """Somebody wants the run to end: all hear of it with their next parameters."""
        shard.stopping = True
        return Receipt(version=shard.version)

    def lose(self, shard: ServerShard, peer: Peer) -> None:
        """Nobody waits for a worker that left. What it asked is still answered: it may have been silent only."""
        shard.gone.add(peer)
        if peer.kind == WORKER and peer.number in shard.members:
            shard.lose(peer.number)

    def settle(self, shard: ServerShard) -> Iterator[Reply]:
        """Apply what is due and answer the pulls that waited for it."""
        self._publish(shard)
        while self.ready(shard) or (self._meeting(shard) and shard.pending):
            shard.apply(self.rate(shard))
            self._publish(shard)
        if self._meeting(shard):
            shard.meet()
        answered = [each for each in shard.waiting if self._answered(shard, each)]
        for each in answered:
            shard.waiting.remove(each)
            yield Reply(token=each.token, answer=_pulled(shard, each.op))

    def _meeting(self, shard: ServerShard) -> bool:
        """Whether everyone who is still there has said that it goes."""
        return bool(shard.leaving) and not shard.members

    def _answered(self, shard: ServerShard, each: Waiting) -> bool:
        match each.op.key:
            case "end":
                return each.sender.number in shard.met
            case "together":
                return all((WORKER, worker) in shard.gone for worker in shard.met)
            case _:
                return self.reached(shard, each.op)

    def _publish(self, shard: ServerShard) -> None:
        if self.news(shard):
            shard.publish()


@dataclass(frozen=True)
class SynchronousPolicy(UpdatePolicy):
    """Contributions of one step are applied together, once all members but `backup` have made theirs.

    Clock c of a shard is its version. A worker pushes step c after it has pulled with at_least = c - ahead, so it is at
    most `ahead` rounds beyond the slowest member.
    """

    backup: int = 0

    def least(self, shard: ServerShard) -> int:
        return shard.version

    def becomes(self, shard: ServerShard, stamp: Stamp) -> int:
        return stamp.step + 1 if stamp.step >= shard.version else LATE

    def ready(self, shard: ServerShard) -> bool:
        """Where nobody contributed, all members must have passed the round by: they joined at a later one."""
        awaited = sum(step <= shard.version for step in shard.members.values())
        return bool(shard.members) and awaited <= (self.backup if shard.due else 0)

    def rate(self, shard: ServerShard) -> float:
        return 1.0

    def news(self, shard: ServerShard) -> bool:
        return shard.public.version < shard.version


@dataclass(frozen=True)
class AsynchronousPolicy(UpdatePolicy):
    """Each contribution is a step of its own, at once. damping: its learning rate is divided by its age in versions."""

    damping: bool = False

    def least(self, shard: ServerShard) -> int:
        return 0

    def becomes(self, shard: ServerShard, stamp: Stamp) -> int:
        return shard.version + 1

    def ready(self, shard: ServerShard) -> bool:
        return bool(shard.due)

    def rate(self, shard: ServerShard) -> float:
        oldest = max((each.staleness for each in shard.due.values()), default=0)
        return 1 / max(1, oldest) if self.damping else 1.0

    def news(self, shard: ServerShard) -> bool:
        """When somebody asks, and about every member has contributed since."""
        since = shard.version - shard.public.version
        asked = any(each.op.key == PARAMETERS for each in shard.waiting)
        return asked and since >= shard.public.every(len(shard.members))


def policy_of(strategy: ParameterServer) -> UpdatePolicy:
    """The rule of a server."""
    return AsynchronousPolicy(strategy.damping) if strategy.mode == ASYNC else SynchronousPolicy(strategy.backup)


def _check_agreed(theirs: str, shard: ServerShard) -> None:
    if theirs != shard.description.agreed():
        raise MalformedError(f"it runs {theirs}, and the server was begun with {shard.description.agreed()}")


def _pulled(shard: ServerShard, pull: Pull) -> Pulled:
    if pull.key == PARAMETERS:
        answer = shard.public.answer(pull.known)
        if not shard.stopping:
            return answer
        return replace(answer, about=json.dumps({**json.loads(answer.about), "stop": True}))
    if pull.key in (AGREED, TOGETHER):
        return Pulled(version=shard.version, about=shard.description.agreed())
    about = {"applied": shard.staleness.total(), "late": shard.dropped, "staleness": shard.staleness}
    values = tuple(block.flat.clone() for block in shard.blocks)
    return Pulled(version=shard.version, payload=values, about=json.dumps(about))


def begun(shard: ServerShard) -> Receipt:
    return Receipt(version=shard.version)


def forgotten(op: Push | Pull) -> Answer:
    """The answer to what supposes that this server remembers more than it does. Its asker raises it."""
    about = json.dumps({"forgot": True})
    return Receipt(version=LATE, about=about) if isinstance(op, Push) else Pulled(version=LATE, about=about)


def refused(why: str) -> Receipt:
    """An answer that its asker raises."""
    return Receipt(version=LATE, about=json.dumps({"refused": why}))
