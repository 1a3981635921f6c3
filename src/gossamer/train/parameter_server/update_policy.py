"""Update policies: when a server applies contributions and answers pulls. A policy has no state except the shard.

The strategy defines the staleness bound (algorithms/strategies/parameter_server); a client enforces it by its pulls.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo
from gossamer.algorithms.strategies.base import ServerStrategy
from gossamer.algorithms.strategies.parameter_server import ASYNC, ParameterServer
from gossamer.base.json_text import read_json
from gossamer.base.peer_ops import (
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
from gossamer.errors import MalformedError, RecipeError
from gossamer.train.parameter_server.deduplication import LATE
from gossamer.train.parameter_server.shard import PendingPull, ServerShard
from gossamer.train.parameter_server.shard_spec import ShardSpec
from gossamer.train.parameter_server.shard_state import count_of, file_of, piece

BEGIN, JOIN, LEAVE, GRADIENT, STOP = "begin", "join", "leave", "gradient", "stop"  # keys of pushes
ENDS = "ends"  # in the text of a leave: for good
PARAMETERS, EXACT = "parameters", "exact"  # keys of pulls: by the recipe's codec, uncompressed
LEFT, END = "left", "end"  # uncompressed, once all workers have left, or have left for good
STATE = "state"  # of pushes and pulls: a piece of the shard's state; a pull numbers it by `at_least`
AGREED, TOGETHER = "agreed", "together"  # the common settings; the same once all workers that left are back
WANTED = "wanted"  # of pulls: whether this worker should send the initial parameters, see server.py
SILENT = "silent"  # of pulls: the numbers of disconnected workers

FORGOT = json.dumps({"forgot": True})
STEPS = 2**53  # upper bound of a worker's steps
NUMBERS = 2**63  # upper bound of a worker's number in an elastic run
NEVER_ANNOUNCED = (-1, 0)  # step and number of a worker's last join or leave, before the first one


class UpdatePolicy(ABC):
    """Decides when contributions are applied and pulls answered; `react` handles events accordingly."""

    @abstractmethod
    def first_open_step(self, shard: ServerShard) -> int:
        """The first step to which a worker that joins now may contribute."""

    @abstractmethod
    def version_of(self, shard: ServerShard, push: Push) -> int:
        """The version that a contribution makes, alone or with others; LATE if that version exists already."""

    @abstractmethod
    def should_apply(self, shard: ServerShard) -> bool:
        """Whether to apply the due contributions now."""

    @abstractmethod
    def lr_factor(self, shard: ServerShard) -> float:
        """The factor for the learning rate of the next step."""

    @abstractmethod
    def should_publish(self, shard: ServerShard) -> bool:
        """Whether to publish parameters before pulls are answered."""

    def apply(self, shard: ServerShard) -> None:
        """Apply the due contributions."""
        shard.apply(self.lr_factor(shard))

    def wake_at(self, shard: ServerShard) -> float | None:
        """The moment at which due contributions are applied without another event; None: an event decides."""
        return None

    def is_reached(self, shard: ServerShard, pull: Pull) -> bool:
        """Whether a pull's clock is reached."""
        return shard.public.version >= pull.at_least

    def react(self, shard: ServerShard, event: PeerEvent) -> Iterator[Reply]:
        """Handle an event; yields replies. A contribution is journaled before its receipt is sent."""
        shard.arrivals.now = event.moment
        match event:
            case Arrived(token=token, sender=sender, op=Push() as push):
                yield Reply(token=token, answer=self.receive(shard, sender, push))
            case Arrived(token=token, sender=sender, op=Pull() as pull):
                if pull.known > shard.public.version:  # the worker's version is newer than the journal
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
                STATE: self.restore,
            }
            _check_stamp(shard, sender, push.stamp)
            if push.key not in answers:
                raise MalformedError(
                    f"server {shard.spec.number} has no push {push.key!r} ({sender}, step {push.stamp.step}). "
                    "Install the same version of Gossamer everywhere"
                )
            return answers[push.key](shard, push)
        except MalformedError as error:
            return refusal(str(error))

    def receive_gradient(self, shard: ServerShard, push: Push) -> Receipt:
        """Handle a gradient; a duplicate gets the same answer."""
        stamp = push.stamp
        version = shard.answer_log.version_of(stamp)
        if version is None:
            if stamp.known > shard.public.version:  # its parameters are newer than the journal
                return forgot_push()
            self._reopen(shard, stamp.worker)
            version = LATE if stamp.worker in shard.missed else self.version_of(shard, push)
            if version == LATE:
                shard.drop(stamp)
            else:
                shard.take(stamp, version, push.about, push.payload)
        return Receipt(version=version)

    def join(self, shard: ServerShard, push: Push) -> Receipt:
        """A worker contributes from stamp.step on; if that step is over, the receipt names the first open one.

        stamp.known numbers its joins and leaves. A worker that missed the end cannot contribute; a worker that has
        ended begins another run with the current parameters.
        """
        worker, step, announcements = push.stamp
        _check_agreed(push.about, shard)
        if shard.spec.is_elastic and shard.released and worker not in shard.missed:  # it has one session, which is over
            shard.miss(worker)
        if worker in shard.missed:
            return Receipt(version=shard.version)
        self._reopen(shard, worker)
        announced = shard.announced.get(worker, NEVER_ANNOUNCED)
        if shard.members.get(worker) == step and announced == (step, announcements):  # a duplicate
            return Receipt(version=shard.version)
        open_step = announced[0] + (announced >= (step, announcements))
        first_open_step = max(self.first_open_step(shard), shard.answer_log.last_step(worker) + 1, open_step)
        if step < first_open_step:
            return Receipt(version=LATE, about=json.dumps({"least": first_open_step}))
        shard.join(push.stamp)
        return Receipt(version=shard.version)

    def _reopen(self, shard: ServerShard, worker: int) -> None:
        if shard.missed and worker in shard.ended and not shard.spec.is_elastic:
            shard.reopen()

    def leave(self, shard: ServerShard, push: Push) -> Receipt:
        """Stop waiting for a worker in rounds. stamp: as in `join`."""
        stamp = push.stamp
        fresh = stamp.step > shard.answer_log.last_step(stamp.worker) and stamp.worker not in shard.missed
        if fresh and (stamp.step, stamp.known) > shard.announced.get(stamp.worker, NEVER_ANNOUNCED):
            shard.leave(stamp, ends=push.about == ENDS)
        return Receipt(version=shard.version)

    def begin(self, shard: ServerShard, push: Push) -> Receipt:
        """Compare the spec with the existing shard: a duplicate, or the server was restored."""
        _check_agreed(ShardSpec.from_json(push.about).agreed_settings(), shard)
        return Receipt(version=shard.version)

    def stop(self, shard: ServerShard, push: Push) -> Receipt:
        """Record a stop request; all workers receive it with their next parameters."""
        shard.stop()
        return Receipt(version=shard.version)

    def restore(self, shard: ServerShard, push: Push) -> Receipt:
        """Add a piece of the state of another run's shard, which is adopted after the last piece."""
        state = shard.received.add(push.about, push.payload)
        if state is not None:
            shard.restore(state)
        return Receipt(version=shard.version)

    def lose(self, shard: ServerShard, peer: Peer) -> None:
        """Stop waiting for a lost peer in rounds. Its requests are still answered: it may be connected again."""
        shard.lost.add(peer)
        if peer.kind == WORKER and peer.number in shard.members:
            shard.lose(peer.number)

    def settle(self, shard: ServerShard) -> Iterator[Reply]:
        """Apply due contributions and answer the pulls that waited for them."""
        self._publish(shard)
        while self.should_apply(shard) or (self._all_left(shard) and shard.pending):
            if shard.due:
                self.apply(shard)
            else:
                shard.skip(shard.next_version)
            self._publish(shard)
        if self._all_left(shard):
            shard.all_left()
        answered = [each for each in shard.pending_pulls if self._is_answered(shard, each)]
        if any(each.op.key == END and each.sender.number not in shard.missed | shard.released for each in answered):
            shard.finish()
        for each in answered:
            shard.pending_pulls.remove(each)
            answer = _pulled(shard, each.sender.number, each.op)
            if each.op.key == END and each.sender.number in shard.missed:
                shard.catch_up(each.sender.number)
            yield Reply(token=each.token, answer=answer)

    def _all_left(self, shard: ServerShard) -> bool:
        """Whether all remaining workers have announced their leave."""
        return bool(shard.leaving) and not shard.members

    def _coming_back(self, shard: ServerShard) -> set[int]:
        """Connected workers that have left, but not for good."""
        return {worker for worker in shard.left - shard.ended if (WORKER, worker) not in shard.lost}

    def _is_answered(self, shard: ServerShard, each: PendingPull) -> bool:
        if each.sender.number in shard.missed | shard.released and each.op.key != AGREED:
            return True
        match each.op.key:
            case "end":
                return each.sender.number in shard.left and not shard.members and not self._coming_back(shard)
            case "left":
                return each.sender.number in shard.left
            case "state":
                return True
            case "together":
                return not self._coming_back(shard)
            case _:
                return self.is_reached(shard, each.op)

    def _publish(self, shard: ServerShard) -> None:
        if self.should_publish(shard):
            shard.publish()


def _check_stamp(shard: ServerShard, sender: Peer, stamp: Stamp) -> None:
    numbers = shard.spec.world or NUMBERS
    if not 0 <= stamp.worker < numbers or not 0 <= stamp.step < STEPS or stamp.known < 0:
        raise MalformedError(
            f"{sender} sent a push stamped {tuple(stamp)}, but server {shard.spec.number} has workers 0 to "
            f"{numbers - 1}, steps 0 to {STEPS - 1} and no negative versions; it was not applied. Run the "
            "same script with the same number of workers everywhere"
        )


def _check_agreed(agreed: str, shard: ServerShard) -> None:
    if agreed != shard.spec.agreed_settings():
        raise MalformedError(
            f"it runs {agreed}, but the server was started with {shard.spec.agreed_settings()}. Run the same script "
            "with the same recipe on every worker"
        )


def _pulled(shard: ServerShard, worker: int, pull: Pull) -> Pulled:
    missed = worker in shard.missed
    if pull.key == PARAMETERS:
        answer = shard.public.pulled_since(pull.known)
        pulled_state = {"stop": True} if shard.stopping or missed else {}
        return (
            replace(answer, about=json.dumps({**json.loads(answer.about), **pulled_state})) if pulled_state else answer
        )
    if pull.key == STATE:
        return _first_state(shard, pull.at_least)
    if pull.key == WANTED:
        return Pulled(version=shard.version, about=wanted(now=False))
    if pull.key == SILENT:
        silent = sorted(peer.number for peer in shard.lost if peer.kind == WORKER)
        return Pulled(version=shard.version, about=json.dumps({"silent": silent}))
    if pull.key in (AGREED, TOGETHER):
        return Pulled(version=shard.version, about=shard.spec.agreed_settings())
    about = {
        "applied": shard.staleness.total(), "late": shard.dropped, "staleness": shard.staleness, "missed": missed,
        "samples": shard.merged,
    }  # fmt: skip
    values = tuple(block.flat.clone() for block in shard.blocks)
    return Pulled(version=shard.version, payload=values, about=json.dumps(about))


def _first_state(shard: ServerShard, index: int) -> Pulled:
    """A piece of the shard's state at the time when the first piece was pulled."""
    if index <= 0 or not shard.receivers:
        shard.receivers = file_of(shard.state_dict())
    nbytes, pulled_state = len(shard.receivers), piece(shard.receivers, index)
    if index + 1 >= count_of(nbytes):
        shard.receivers = b""
    return Pulled(version=shard.version, payload=(pulled_state,), about=json.dumps({"nbytes": nbytes}))


def wanted(*, now: bool) -> str:
    """The text of an answer about the initial parameters."""
    return json.dumps({WANTED: now})


def forgot(op: Push | Pull) -> Answer:
    """The answer to a request that requires state this server has lost; the requester raises PeerLost."""
    return forgot_push() if isinstance(op, Push) else Pulled(version=LATE, about=FORGOT)


def forgot_push() -> Receipt:
    return Receipt(version=LATE, about=FORGOT)


def refusal(why: str) -> Receipt:
    """An answer that the requester raises as an error."""
    return Receipt(version=LATE, about=json.dumps({"refused": why}))


@dataclass(frozen=True)
class SynchronousPolicy(UpdatePolicy):
    """Synchronous rounds: a step is applied once all members but `backup` have contributed. Clock: the version."""

    backup: int = 0  # number of workers that a round does not wait for

    def first_open_step(self, shard: ServerShard) -> int:
        return shard.version

    def version_of(self, shard: ServerShard, push: Push) -> int:
        return push.stamp.step + 1 if push.stamp.step >= shard.version else LATE

    def should_apply(self, shard: ServerShard) -> bool:
        """Whether to end the round; one without contributions ends once all members have joined at a later one."""
        awaited = sum(step <= shard.version for step in shard.members.values())
        return bool(shard.members) and awaited <= (self.backup if shard.due else 0)

    def lr_factor(self, shard: ServerShard) -> float:
        return 1.0

    def should_publish(self, shard: ServerShard) -> bool:
        return shard.public.version < shard.version


@dataclass(frozen=True)
class AsynchronousPolicy(UpdatePolicy):
    """Asynchronous SGD: each contribution is a step of its own, applied at once."""

    damping: bool = False  # divide the learning rate by the staleness in versions

    def first_open_step(self, shard: ServerShard) -> int:
        return 0

    def version_of(self, shard: ServerShard, push: Push) -> int:
        return shard.version + 1

    def should_apply(self, shard: ServerShard) -> bool:
        return bool(shard.due)

    def lr_factor(self, shard: ServerShard) -> float:
        oldest = max((each.staleness for each in shard.due.values()), default=0)
        return 1 / max(1, oldest) if self.damping else 1.0

    def should_publish(self, shard: ServerShard) -> bool:
        """When a pull waits, and about every member has contributed since the last publication."""
        since = shard.version - shard.public.version
        asked = any(each.op.key == PARAMETERS for each in shard.pending_pulls)
        return asked and since >= shard.public.publish_interval(len(shard.members))


@dataclass(frozen=True)
class StaleSynchronousPolicy(UpdatePolicy):
    """Stale synchronous parallel: each contribution is applied at once, and pulls wait for slower members.

    A member's clock is its next step. A worker computes step c after a pull with at_least = c - staleness, so its
    parameters include all its own contributions, those of all other workers before step c - staleness, and any later
    ones that have arrived.
    source: Ho et al. 2013, NeurIPS
    """

    def first_open_step(self, shard: ServerShard) -> int:
        """The slowest member's step; if all have left, the one after the last, which they start together."""
        return min(shard.members.values(), default=shard.answer_log.next_step)

    def version_of(self, shard: ServerShard, push: Push) -> int:
        """A contribution from before the slowest member's clock, by a lost worker, would exceed the bound: LATE."""
        return LATE if push.stamp.step < min(shard.members.values(), default=0) else shard.version + 1

    def is_reached(self, shard: ServerShard, pull: Pull) -> bool:
        return min(shard.members.values(), default=pull.at_least) >= pull.at_least

    def should_apply(self, shard: ServerShard) -> bool:
        return bool(shard.due)

    def lr_factor(self, shard: ServerShard) -> float:
        """A contribution's share of its round: its weight over those of all workers that contribute to it. For other
        workers, the weight of their last contribution is used."""
        given = sum(each.weight for each in shard.due.values())
        step = min(map(shard.answer_log.last_step, shard.due))
        absent = [worker for worker in range(shard.spec.world) if worker not in shard.due]
        taking_part = (each for each in absent if each in shard.members or shard.answer_log.last_step(each) >= step)
        others = sum(shard.weights.get(worker, given) for worker in taking_part)
        return given / (given + others) if given else 1.0

    def should_publish(self, shard: ServerShard) -> bool:
        """Before each answered pull, so that a worker receives its own writes at once."""
        asked = any(each.op.key == PARAMETERS and self.is_reached(shard, each.op) for each in shard.pending_pulls)
        return asked and shard.public.version < shard.version


@dataclass(frozen=True)
class QuorumPolicy(UpdatePolicy):
    """Merges pseudo-gradients of a fragment once a quorum of workers has sent them, and the grace is over.

    Contributions to the same fragment are merged together, at most one of each worker; the next ones make the next
    version. A worker with a contribution that waits sends no other one, so a quorum does not count on it.
    source: arXiv:2604.21428; algorithms/strategies/async_diloco defines quorum, weights and factors
    """

    strategy: AsyncDiLoCo

    def first_open_step(self, shard: ServerShard) -> int:
        return 0

    def join(self, shard: ServerShard, push: Push) -> Receipt:
        """A newcomer to an elastic run begins at the largest number of steps of a member, so that loops up to a number
        of steps end together."""
        worker, step, _ = push.stamp
        is_new = shard.spec.is_elastic and not step and worker not in shard.announced
        if is_new and shard.furthest_step and not shard.released:
            return Receipt(version=LATE, about=json.dumps({"least": shard.furthest_step}))
        return super().join(shard, push)

    def version_of(self, shard: ServerShard, push: Push) -> int:
        """The next version of the same fragment without this worker, or a new one."""
        fragment, version = fragment_of(push.about), shard.version
        while slot := shard.pending.get(version):
            if push.stamp.worker not in slot and next(iter(slot.values())).fragment == fragment:
                break
            version += 1
        return version + 1

    def receive_gradient(self, shard: ServerShard, push: Push) -> Receipt:
        is_new = shard.answer_log.version_of(push.stamp) is None
        receipt = super().receive_gradient(shard, push)
        if is_new and receipt.version != LATE:
            steps = shard.pending[receipt.version - 1][push.stamp.worker].steps
            shard.arrivals.add(push.stamp.worker, receipt.version, steps)
        return receipt

    def should_apply(self, shard: ServerShard) -> bool:
        return self._has_quorum(shard) and (not self._awaited(shard) or shard.arrivals.now >= self._deadline(shard))

    def wake_at(self, shard: ServerShard) -> float | None:
        return self._deadline(shard) if self._has_quorum(shard) else None

    def _has_quorum(self, shard: ServerShard) -> bool:
        due = len(shard.due)
        return due > 0 and due >= self.strategy.needed(due + len(self._awaited(shard)))

    def _awaited(self, shard: ServerShard) -> set[int]:
        """Present workers that may still contribute to the next version."""
        return set(shard.members).difference(*shard.pending.values())

    def _deadline(self, shard: ServerShard) -> float:
        """The end of the grace; the measurements of a restarted server begin again, and it does not wait."""
        step_seconds = shard.arrivals.fastest_step({*shard.members, *shard.due})
        return shard.arrivals.opened.get(shard.version + 1, -inf) + self.strategy.grace * step_seconds

    def apply(self, shard: ServerShard) -> None:
        merged = [shard.due[worker] for worker in sorted(shard.due) if shard.due[worker].gradients]
        weights, factor = self.strategy.merge(
            [self.strategy.weight(each.weight, each.steps) for each in merged],
            [each.staleness for each in merged],
            len({*shard.members, *shard.due}),
        )
        shard.apply(factor, weights)

    def lr_factor(self, shard: ServerShard) -> float:
        return 1.0

    def should_publish(self, shard: ServerShard) -> bool:
        """Before each answered pull, so that a worker receives the merge of its own contribution."""
        asked = any(each.op.key == PARAMETERS and each.op.at_least <= shard.version for each in shard.pending_pulls)
        return asked and shard.public.version < shard.version


def fragment_of(about: str) -> int | None:
    """The fragment of a contribution. Raises MalformedError."""
    try:
        fragment: int | None = read_json(about).get("fragment")
    except (ValueError, AttributeError) as error:
        raise MalformedError(f"a contribution was described by {about[:200]!r}, which cannot be read") from error
    return fragment


def policy_of(strategy: ServerStrategy) -> UpdatePolicy:
    """The policy of a strategy's servers. With staleness 0, stale synchronous parallel is lock step."""
    if isinstance(strategy, AsyncDiLoCo):
        return QuorumPolicy(strategy)
    if not isinstance(strategy, ParameterServer):
        raise RecipeError(f"servers have no update policy for {strategy!r}. Write ParameterServer().")
    if strategy.mode == ASYNC:
        return AsynchronousPolicy(strategy.damping)
    return StaleSynchronousPolicy() if strategy.rounds_ahead else SynchronousPolicy(strategy.backup)
