"""Elastic transport: runs in lock step while members join and leave, with one mesh per view.

To a member, a loss looks like an operation that takes longer. The group is formed again. If a survivor had completed
the current transaction, it sends the missing results to the others; otherwise all survivors repeat the transaction
(`Regrouped`). Survivors therefore have identical bits, and no step is half done.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from torch import Tensor

from gossamer.base.ops import CollectiveOp
from gossamer.base.transport import Transport
from gossamer.comm.elastic.change import (
    FAILURES,
    Base,
    Change,
    Group,
    PutOut,
    Resolved,
    RunMembership,
    Trainee,
    unreached,
)
from gossamer.comm.elastic.interrupted_operations import OperationLog, handed_out
from gossamer.comm.elastic.newcomer_state import Admission, Admitted
from gossamer.comm.elastic.recognition import InLockStep
from gossamer.comm.elastic.value_transfer import broadcast_value
from gossamer.comm.membership.view import View
from gossamer.comm.mesh.collective_selector import settle_collectives
from gossamer.comm.mesh.last_words import REPORTED_BY
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.runtime.transaction import Regrouped, resolve
from gossamer.errors import GossamerError, MismatchError, PeerLost, Stopped

OVER = "another view was created"
SETTLED_AFTER = 64  # transactions of a view, in which a background thread simulates its collectives


class ElasticTransport(InLockStep):
    """One member's access to an elastic group: a session's transport and its Recovery.

    Args:
        membership: The worker's membership.
        connect: Forms the group of a view; raises PeerLost or ConnectError if it cannot.
        first: The view with which training begins; None for a newcomer, which must `join`.
        seconds: How long to wait for a view, for example while too few workers are present.
        copies: Whether this member can copy its state to newcomers in the background.
    """

    def __init__(
        self,
        membership: RunMembership,
        connect: Callable[[View], Group],
        first: View | None,
        seconds: float,
        copies: bool = True,
    ) -> None:
        self._membership, self._connect, self._seconds = membership, connect, seconds
        self._admission = Admission(membership, connect, seconds, copies)
        self._trainee: Trainee | None = None
        self._view = first
        self.joined = first is None  # whether training had begun before this worker joined
        self._group: Group | None = None
        self._ended = -1  # newest view that is known to have ended
        self._changing = threading.Lock()  # guards the group, which any thread may close
        self._epoch = 0  # number of groups so far
        self._log, self._last = OperationLog(), OperationLog()  # of the current transaction, and of the previous one
        self._completed, self._inside = 0, False
        self._mismatched = -1  # value of _completed when another rank last issued other operations
        self._began_at = 0  # value of _completed when this group was formed
        self._settles_at: float = 0  # value of _completed from which the group uses simulated collectives; equal on all
        self._given: list[Any] | None = None  # all results of the current transaction, if others had completed it
        self._next: Resolved | None = None  # the members from the next transaction on
        self._catches_up = False  # a newcomer before its first completed transaction
        self._base: Base | None = None  # from which members move until they have completed another transaction
        self.members: tuple[int, ...] = (membership.number,)
        self.rank, self.world, self._links = 0, 1, ""
        self._detours_of, self._detours = "", dict[int, int | None]()  # of these links
        self._left = self.awaited = self.released = False  # released: must leave while the others continue
        self.finished = False  # whether this worker leaves because its training is complete
        self.on_over: Callable[[], object] = lambda: None  # called by the thread that reports the end of a view
        if first is not None:
            self._place(first.numbers)

    # -- a Transport ---------------------------------------------------------------------------------------------------

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        place, epoch = self._log.begin(), self._epoch
        answered = self._try(lambda: self._standing().begin(op))

        def wait() -> Any:
            if self._given is None and epoch == self._epoch and answered is not None:
                answer = self._try(answered)
                if self._given is None:
                    self._log.keep_copies(place, op, answer, self.rank)
                    return answer
            return handed_out(op, self._from_others(place))

        return wait

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        place = self._log.begin()
        self._try(lambda: self._standing().broadcast_(tensors, source))
        if self._given is None:
            self._log.keep(place, [tensor.detach().clone() for tensor in tensors])
            return
        for own, original in zip(tensors, self._from_others(place), strict=True):
            own.detach().copy_(original)

    def all_gather_text(self, text: str) -> list[str]:
        place = self._log.begin()
        texts = self._try(lambda: self._standing().all_gather_text(text))
        if self._given is None:
            self._log.keep(place, texts)
        return list(self._from_others(place) if self._given is not None else texts)

    def _try(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, or None if other ranks' results finish the transaction. Raises Regrouped."""
        if self._given is not None:
            return None
        try:
            return call()
        except MismatchError as mismatch:
            if REPORTED_BY not in str(mismatch):  # one between other ranks is the loss of these
                if self.finished or self._mismatched == self._completed:
                    raise
                self._mismatched = self._completed  # by a rank in `farewell`; a real mismatch occurs again
            lost: GossamerError = mismatch
        except FAILURES as failure:
            lost = failure
        try:
            if self._regroup(str(lost)):
                return None
            raise Regrouped from lost
        finally:
            del lost  # breaks a reference cycle with this frame, which would keep the tensors of all callers alive

    def _from_others(self, place: int) -> Any:
        assert self._given is not None
        self._log.keep(place, self._given[place])
        return self._given[place]

    @property
    def operation_number(self) -> int:
        """Number of the next operation, for traces: equal on every rank, and the same when it is repeated."""
        return self._completed << 32 | self._log.begun

    def make_progress(self) -> bool:
        group = self._group
        return group is not None and group.make_progress()

    def part(self, size: int) -> Transport:
        raise GossamerError(
            "an elastic run has no sites: adjacent ranks change as workers join and leave. Use a recipe in "
            "which all workers average together, or start a fixed number of workers: gossamer run --workers 4."
        )

    @property
    def detours(self) -> Mapping[int, int | None]:
        """Ranks that relays connect to this one, for traces: as Links.detours. The same object until the next group."""
        if self._detours_of is not self._links:
            self._detours_of = self._links
            self._detours = Links.of(self._links).detours(self.rank) if self._links else {}
        return self._detours

    @property
    def links(self) -> str:
        return self._links

    @links.setter
    def links(self, text: str) -> None:
        if self._group is not None:
            self._group.links = text

    def farewell(self) -> None:
        """Wait until every rank has finished, because others may still need results. This is a transaction. If the
        others continue, they are notified that this worker leaves."""
        self.finished = True
        self.all_gather_text("all is done")

    def leave(self) -> None:
        """Leave between two transactions, or during one, which the others then repeat. Thread-safe."""
        if not self._left:
            self._left = True
            with suppress(GossamerError):
                self._membership.leave(finished=self.finished)
            self._break()

    def close(self) -> None:
        self.leave()
        self._membership.close()

    # -- transactions --------------------------------------------------------------------------------------------------

    @property
    def is_newcomer(self) -> bool:
        """Whether the others already train, so that this worker must `join` them."""
        return self._view is None

    def serve(self, trainee: Trainee) -> None:
        """Report changes to `trainee` from now on."""
        self._trainee = trainee

    def attached(self, fingerprint: str) -> None:
        """Report the fingerprint for newcomers, after the members of the first view were compared."""
        self._membership.attached(fingerprint)

    def enter(self, *, admits: bool) -> None:
        self._log.clear()
        self._given, self._inside = None, False
        while True:
            first = not self._epoch and self._seen.number > self._ended
            if self._group is None and not first:
                self._regroup(OVER)  # outside of the block below, because its errors are final
                continue
            try:
                if self._group is None and first:
                    self._install(self._connect(self._seen.stage()), self._seen)
                elif self._next is not None:
                    self._adopt(self._next)
                elif self._newcomers_due and self._admission.is_open(
                    self._standing(), self._seen, self._trainee, self._completed, admits=admits
                ):
                    self._admit()
                else:
                    break
            except PutOut:
                raise
            except FAILURES as failure:
                self._regroup(str(failure), unreached(failure))
        if self._completed >= self._settles_at:
            settle_collectives(self._group)
            self._settles_at = inf
        self._inside = True
        self.awaited = bool(self._seen.newcomers) and self._admission.polls_at <= self._completed + 1

    @property
    def _newcomers_due(self) -> bool:
        """Whether the members poll about newcomers before this transaction; equal on all members."""
        return bool(self._seen.newcomers) and self._admission.polls_at <= self._completed

    def complete(self) -> None:
        self._completed, self._inside, self._given, self._base = self._completed + 1, False, None, None
        self._log, self._last = self._last, self._log
        if self._catches_up:
            self._catches_up = False
            self._membership.caught_up()

    def look(self) -> None:
        """If the view has ended and no transaction is active here: serve ranks that may need results of the last one.
        Called on the communication thread."""
        if self._group is None and self._epoch and not self._inside:
            self._regroup(OVER)

    def _adopt(self, resolved: Resolved) -> None:
        """Switch to the next group. All of its members do so before their next transaction."""
        group = self._standing()
        bases = [None] * group.world
        if self._trainee is not None:
            bases = [json.loads(text) for text in group.all_gather_text(json.dumps(self._own_base()))]
        self._next = None
        self._become(bases, resolved)

    def _own_base(self) -> Any:
        """Park the trainee, and return its base and current members, for all members.

        Another member may be lost before all have moved from there. All therefore move again from their last completed
        transaction, of which they have equally many.
        """
        assert self._trainee is not None
        self._trainee.park()
        self._base = self._base or Base(self.members, self._trainee.standing())
        return [self._base.members, self.members, self._base.standing]

    def _become(self, bases: Sequence[Any], resolved: Resolved) -> None:
        count, members = self.world, resolved.members
        self._place(members)
        if self._trainee is None or all(each and tuple(each[1]) == members for each in bases):
            return
        self._trainee.take_place(self.rank, self.world)
        if count != len(members):
            self._trainee.rescale(count, len(members))
        if self._base is not None and self._base.standing is None:
            raise PutOut  # a newcomer has drawn samples since then, unknown to members that move again
        before = tuple(next(each[0] for each in bases if each))
        self._base = self._base or Base(before, None)
        replaces, self._base.left = self._base.left, True
        self._trainee.moved(
            Change(
                number=self._seen.number,
                before=before,
                now=members,
                standings={number: each[2] for number, each in zip(members, bases, strict=True) if each},
                seconds=time.monotonic() - resolved.began,
                completed=self._completed,
                finished=resolved.finished,
                replaces=replaces,
            )
        )

    def _place(self, members: tuple[int, ...]) -> None:
        self.members, self.world, self.rank = members, len(members), members.index(self._membership.number)

    # -- groups --------------------------------------------------------------------------------------------------------

    def view_over(self, number: int) -> None:
        """Close the group if its view is at most `number`, which the coordinator has ended. Thread-safe."""
        with self._changing:
            self._ended = max(self._ended, number)
        self._admission.abandon(number)
        view = self._view
        if view is not None and view.number <= number:
            self._break()
            self.on_over()

    @property
    def _seen(self) -> View:
        assert self._view is not None
        return self._view

    def _standing(self) -> Group:
        if self._group is None:
            raise PeerLost(OVER)
        return self._group

    def _break(self) -> None:
        """Close the group at once, so that none of its members waits for another that is blocked."""
        with self._changing:
            group, self._group = self._group, None
        self._admission.abandon(inf if self._view is None else self._view.number)
        if group is not None:
            group.close()

    def _install(self, group: Group, view: View) -> None:
        """Use a group, unless its view has ended meanwhile."""
        with self._changing:
            before, self._group = self._group, group if view.number > self._ended else None
            self._view, self._epoch, self._links = view, self._epoch + 1, group.links
            self._began_at = self._completed
            unused = [each for each in (before, group) if each is not None and each is not self._group]
        for each in unused:
            each.close()

    # -- recovery ------------------------------------------------------------------------------------------------------

    def _regroup(self, why: str, suspects: Sequence[int] = ()) -> bool:
        """Form the group again; return whether other ranks had completed the current transaction.

        suspects: numbers of members that could not be reached. Raises PeerLost if this worker cannot return.
        """
        began = time.monotonic()
        while True:
            self._break()
            self._admission.restart()
            went_on = self._completed > self._began_at
            self._membership.broken(self._seen.number, suspects, why, went_on=went_on)
            try:
                self._view = view = self._membership.view_after(self._seen.number, self._seconds)
            except Stopped:
                self.released = True
                raise
            if self._membership.number in view.newcomers:
                raise PutOut  # it has no state
            try:
                return self._resolve(self._connect(view.stage()), view, began)
            except FAILURES as failure:
                suspects, why = unreached(failure), str(failure)

    def _resolve(self, group: Group, view: View, began: float) -> bool:
        """Compare the survivors' progress, and send missing results to those that are behind."""
        texts = group.all_gather_text(json.dumps([self._completed, self._log.answered if self._inside else 0]))
        completed, firsts = zip(*(json.loads(text) for text in texts), strict=True)
        resolution = resolve(dict(enumerate(completed)))
        finishes, given = group.rank in resolution.donors, None
        if resolution.donors:
            donor, first = completed.index(resolution.completed), min(firsts[rank] for rank in resolution.donors)
            rest = broadcast_value(group, donor, self._last.since(first) if group.rank == donor else None)
            given = [*[None] * first, *rest] if finishes else None
        self._install(group, view)
        self._given, self._settles_at = given, resolution.completed + SETTLED_AFTER
        self._next = Resolved(view.stage().numbers, began, finished=bool(resolution.donors))
        return finishes

    # -- newcomers -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit newcomers between two transactions."""
        self._begin_with(self._admission.admit(self._seen, self._trainee, self._completed, self._own_base))

    def join(self, fingerprint: str) -> None:
        """Join as a newcomer, between two transactions of the members, and receive their state.

        Raises MismatchError if this worker differs from the members, and PeerLost if it was not admitted.
        """
        admitted = self._admission.join(fingerprint, self._trainee)
        self._completed, self.world = admitted.completed, len(admitted.view.stage().members)
        self._catches_up = True
        self._begin_with(admitted)

    def _begin_with(self, admitted: Admitted) -> None:
        self._install(admitted.group, replace(admitted.view, newcomers=frozenset()))
        self._settles_at = self._completed + SETTLED_AFTER
        self._become(admitted.member_bases, Resolved(admitted.view.numbers, admitted.began))
