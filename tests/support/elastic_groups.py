"""Elastic groups in this process: a thread per worker, views made at once, and faults at a given operation."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laws.laws import in_threads
from support.virtual_workers import Worker
from torch import Tensor

from gossamer.base.ops import CollectiveOp
from gossamer.comm.elastic.transport import ElasticTransport, PutOut
from gossamer.comm.membership import Member, View
from gossamer.comm.runtime.open_sessions import unregister
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import MismatchError, PeerLost

SECONDS = 30.0


class Killed(BaseException):
    """A worker's process ended."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Member `victim` ends at an operation of a group, before it is answered or after.

    deaf: the members that do not hear the answer any more, where the others do. group: 2 k is made of the members of
    the k-th view that have a state, 2 k + 1 of all of them, to hand the state over.
    """

    victim: int
    op: int
    answered: bool = False
    deaf: frozenset[int] = frozenset()
    group: int = 2


@dataclass(frozen=True, kw_only=True)
class Join:
    """The newcomers begin when `member` comes to an operation of a group, which waits until they are ready."""

    op: int
    member: int = 0
    group: int = 2


class VirtualGroup:
    """One member's transport in one view."""

    def __init__(self, members: VirtualMembers, view: View, number: int, group: SimulatedGroup) -> None:
        self._members, self._view, self._number = members, view, number
        self._inner = group.transports[view.rank_of(number)]
        self.rank, self.world, self.links, self._ops = self._inner.rank, view.world, "", 0

    def _act(self, act: Callable[[], Any]) -> Any:
        if self._members.is_dead(self._number):
            raise Killed  # by an operation of another group of the same worker
        op, self._ops = self._ops, self._ops + 1
        self._members.count(self._number, self._view.number, self._ops)
        join, loss = self._members.join, self._members.losses.get(self._view.number)
        if join is not None and (join.member, join.group, join.op) == (self._number, self._view.number, op):
            self._members.invite()
        if loss is None or op < loss.op:
            return act()
        if self._number == loss.victim and not loss.answered:
            self._members.await_others(self._number, self._view, op)
            self._members.kill(self._number)
            raise Killed
        answer = act()
        if self._number == loss.victim:
            self._members.kill(self._number)
            raise Killed
        if self._number in loss.deaf or op > loss.op:
            raise PeerLost("the connection broke")
        return answer

    def answer(self, op: CollectiveOp) -> Any:
        return self._act(lambda: self._inner.answer(op))

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        answer = self.answer(op)
        return lambda: answer

    def make_progress(self) -> bool:
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._act(lambda: self._inner.broadcast_(tensors, source))

    def all_gather_text(self, text: str) -> list[str]:
        return list(self._act(lambda: self._inner.all_gather_text(text)))

    def deliver(self, told: Mapping[int, Tensor], heard: Mapping[int, int]) -> dict[int, Tensor]:
        def hand_out(said: list[Any]) -> list[Any]:
            return [{peer: said[peer][rank].clone() for peer in wanted} for rank, wanted in enumerate(wants)]

        wants: list[Any] = self._act(
            lambda: self._inner._group.meet(self.rank, (lambda said: [said] * len(said), heard))
        )
        found: dict[int, Tensor] = self._act(lambda: self._inner._group.meet(self.rank, (hand_out, told)))
        assert {peer: len(each) for peer, each in found.items()} == dict(heard)
        return found

    def part(self, size: int) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self._inner.close()


class VirtualMembers:
    """The coordinator and all members of one run."""

    def __init__(self, count: int, losses: Sequence[Loss] = (), join: Join | None = None, newcomers: int = 0) -> None:
        self.losses, self.join = {loss.group: loss for loss in losses}, join
        assert len(self.losses) == len(losses), "one loss in a group"
        self._newcomers, self._fingerprint = newcomers, ""
        self._invited, self._over = newcomers > 0 and join is None, False
        self._came: set[int] = set()
        self.late: frozenset[int] = frozenset()  # newcomers whom nobody was left to let in
        self.operations: dict[tuple[int, int], int] = {}  # by member and group
        self._changed = threading.Condition(threading.RLock())
        self._dead: set[int] = set()
        self._finished: set[int] = set()  # loops that are over: they run no further operation
        self._ready: list[int] = []
        self._attached: set[int] = set()  # newcomers that have a state by now
        self._transports: dict[int, ElasticTransport] = {}
        self._groups: dict[int, SimulatedGroup] = {}
        self.views: list[View] = []
        self._make(tuple(range(count)), frozenset())

    def _make(self, numbers: Sequence[int], newcomers: frozenset[int]) -> None:
        with self._changed:
            members = tuple(Member(number=number, host="here", port=1) for number in numbers)
            self.views.append(
                View(number=len(self.views) + 1, members=members, newcomers=newcomers, secret=secrets.token_bytes(32))
            )
            over = self.views[-2].number if len(self.views) > 1 else 0
            stale = [group for number, group in self._groups.items() if number <= 2 * over + 1]
            told = list(self._transports.values())
            self._changed.notify_all()
        for transport in told:
            transport.view_over(over)
        for group in stale:
            group.leave()

    def _change(self) -> None:
        """Another view of those who live and those who are ready."""
        with self._changed:
            before = self.views[-1]
            stateless = before.newcomers - self._attached
            states = [each.number for each in before.members if each.number not in stateless]
            new = [each.number for each in before.members if each.number in stateless] + self._ready
            self._ready = []
            old, new = ([each for each in some if each not in self._dead] for some in (states, new))
            self._make((*old, *new), frozenset(new))

    def kill(self, number: int) -> None:
        with self._changed:
            self._dead.add(number)
            groups = [group for group in self._groups.values() if group.world]
            if self.views[-1].holds(number):
                self._change()
        for group in groups:
            group.leave()

    def count(self, number: int, group: int, operations: int) -> None:
        with self._changed:
            self.operations[number, group] = operations
            self._changed.notify_all()

    def await_others(self, number: int, view: View, op: int) -> None:
        """Wait until all others have come to an operation: where they are connected, an end amid the one before would
        take its answer from them."""
        others = [each.number for each in view.members if each.number != number]

        def came() -> bool:
            over = view.number // 2 < self.views[-1].number
            at_op = (each in self._finished or self.operations.get((each, view.number), 0) > op for each in others)
            return over or all(at_op)

        with self._changed:
            assert self._changed.wait_for(came, SECONDS), f"nobody else came to operation {op}"

    def invite(self) -> None:
        """Let the newcomers begin, and wait until all are ready or have given up."""
        with self._changed:
            self._invited = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self._came) == self._newcomers, SECONDS), "nobody came"

    def invited(self) -> bool:
        """Wait for an invitation; False where all others have ended without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._invited or self._over, SECONDS)
            return self._invited

    def came(self, number: int) -> None:
        """A worker is ready, or has ended: of newcomers nobody waits for it any more."""
        with self._changed:
            if not self.views[0].holds(number):
                self._came.add(number)
            self._changed.notify_all()

    def finish(self, number: int) -> None:
        """A member's loop is over: a victim does not wait for it."""
        with self._changed:
            self._finished.add(number)
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody is left who could invite newcomers."""
        with self._changed:
            self._over = True
            self.late |= self.views[-1].newcomers - self._attached
            groups = [group for number, group in self._groups.items() if number % 2 and self.late]
            self._changed.notify_all()
        for group in groups:
            group.leave()

    def compare(self, number: int, fingerprint: str, *, first: bool) -> None:
        with self._changed:
            self._fingerprint = fingerprint if first else self._fingerprint
            if fingerprint != self._fingerprint:
                self.came(number)
                raise MismatchError(f"a newcomer is {fingerprint} and the others are {self._fingerprint}")

    def is_dead(self, number: int) -> bool:
        return number in self._dead

    def connect(self, number: int) -> Callable[[View], VirtualGroup]:
        def group_of(view: View) -> VirtualGroup:
            with self._changed:
                if view.number // 2 < self.views[-1].number:
                    raise PeerLost("another view was made")
                group = self._groups.setdefault(view.number, SimulatedGroup(view.world, SECONDS))
            return VirtualGroup(self, view, number, group)

        return group_of

    def transport(self, number: int) -> ElasticTransport:
        first = self.views[0] if self.views[0].holds(number) else None
        transport = ElasticTransport(VirtualMembership(self, number), self.connect(number), first, SECONDS)
        with self._changed:
            self._transports[number] = transport
        return transport

    def next_view(self, after: int, number: int) -> View:
        with self._changed:
            found = self._changed.wait_for(
                lambda: number in self._dead or number in self.late or self._view_of(number, after), SECONDS
            )
            if number in self._dead:
                raise Killed
            if not isinstance(found, View):
                raise PeerLost(f"member {number} was put out")
            return found

    def _view_of(self, number: int, after: int) -> View | None:
        newest = self.views[-1]
        return newest if newest.number > after and newest.holds(number) else None

    def broken(self, view: int) -> None:
        with self._changed:
            if view == self.views[-1].number:
                self._change()

    def ready(self, number: int) -> None:
        with self._changed:
            self._ready.append(number)
            self._change()
            self.came(number)

    def attached(self, number: int) -> None:
        with self._changed:
            self._attached.add(number)

    def leave(self, number: int) -> None:
        self.kill(number)


@dataclass
class VirtualMembership:
    members: VirtualMembers
    number: int

    def view_after(self, number: int, seconds: float) -> View:
        return self.members.next_view(number, self.number)

    def attached(self, fingerprint: str) -> None:
        self.members.compare(self.number, fingerprint, first=True)

    def ready(self, fingerprint: str) -> None:
        self.members.compare(self.number, fingerprint, first=False)
        self.members.ready(self.number)

    def broken(self, view: int, suspects: Sequence[int], why: str, *, went_on: bool = False) -> None:
        self.members.broken(view)

    def caught_up(self) -> None:
        self.members.attached(self.number)

    def leave(self, *, finished: bool = False) -> None:
        self.members.leave(self.number)

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class ElasticRun:
    """Workers by their numbers: the first `count` begin, the newcomers come at `join`, or at once without it."""

    count: int
    loss: Loss | Sequence[Loss] | None = None
    newcomers: int = 0
    join: Join | None = None
    members: VirtualMembers = field(init=False)

    def __post_init__(self) -> None:
        losses = (self.loss,) if isinstance(self.loss, Loss) else self.loss or ()
        self.members = VirtualMembers(self.count, losses, self.join, self.newcomers)
        self._left, self._ended = self.count + self.newcomers, threading.Condition()

    def _end_together(self) -> None:
        """Whoever has made the last exchange stays until all have, and gives its answers to those who miss them."""
        with self._ended:
            self._one_less()
            self._ended.wait_for(lambda: not self._left, SECONDS)

    def _end(self) -> None:
        with self._ended:
            self._one_less()

    def _one_less(self) -> None:
        self._left -= 1
        self._ended.notify_all()
        if self._left <= self.newcomers:
            self.members.end()

    def __call__(self, work: Callable[[Worker], Any]) -> list[Any]:
        """What work(worker) returned by number; None for who was killed, or never came."""

        def run(number: int) -> Any:
            if number >= self.count and not self.members.invited():
                self._end()
                return None
            transport = self.members.transport(number)
            worker = Worker(number, self.count, transport)
            try:
                result = work(worker)
                self.members.finish(number)
                self._end_together()
                if self.members.is_dead(number):
                    return None  # the loop was over, and others did not have its answers yet
            except (Killed, PutOut):
                self._end()
                return None
            except BaseException:
                self._end()
                if number in self.members.late:
                    return None
                self.members.kill(number)
                self.members.broken(self.members.views[-1].number)
                raise
            finally:
                self.members.came(number)
                for session in [*worker.sessions, *worker.array_sessions]:
                    for hook in getattr(session, "_hooks", ()):
                        hook.remove()
                    session._synchronizer.close()
                    session._group.comm_thread.close()
                    unregister(session)
                transport.close()
            return result

        return in_threads(run, self.count + self.newcomers)
