"""Admission: transfers the members' state to newcomers between two transactions, and compares hashes afterwards.

Members and newcomers connect as one group, in which each member sends a part of the replicated state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.comm.elastic.change import FAILURES, Group, RunMembership, Trainee, unreached
from gossamer.comm.elastic.value_transfer import hand_over_value
from gossamer.comm.membership.view import View
from gossamer.errors import MismatchError, PeerLost


@dataclass(frozen=True)
class Admitted:
    """A view with its group; all newcomers have the whole state."""

    view: View
    group: Group
    member_bases: list[Any]  # by rank, the base from which each member moves; None for newcomers
    completed: int  # transactions with results on every rank
    began: float  # start time of the admission


class Admission:
    """One worker's part in an admission, as a member or as a newcomer.

    Args:
        membership: The worker's membership.
        connect: Forms the group of a view; raises PeerLost or ConnectError if it cannot.
        seconds: How long a newcomer waits for a view that includes it.
    """

    def __init__(self, membership: RunMembership, connect: Callable[[View], Group], seconds: float) -> None:
        self._membership, self._connect, self._seconds = membership, connect, seconds

    @staticmethod
    def is_open(group: Group, *, admits: bool) -> bool:
        """Whether every member admits newcomers now. One may have run out of data, or be saving."""
        return "no" not in group.all_gather_text("yes" if admits else "no")

    def admit(
        self, view: View, trainee: Trainee | None, completed: int, bases: Callable[[Group], list[Any]]
    ) -> Admitted:
        """Admit a view's newcomers. bases: all-gathers the bases from which the members of a group move."""
        began = time.monotonic()
        group = self._connect(view.stage(whole=True))
        try:
            member_bases = bases(group)
            return Admitted(view, group, member_bases, self._exchange_state(group, view, trainee, completed), began)
        except BaseException:
            group.close()
            raise

    def join(self, fingerprint: str, trainee: Trainee | None) -> Admitted:
        """Join as a newcomer. Raises MismatchError if this worker differs from the members, and PeerLost if it was not
        admitted."""
        began, number = time.monotonic(), 0
        self._membership.ready(fingerprint)
        while True:
            view = self._membership.view_after(number, self._seconds)
            number, group = view.number, None
            try:
                group = self._connect(view.stage(whole=True))
                member_bases = [json.loads(text) for text in group.all_gather_text("null")]
                completed = self._exchange_state(group, view, trainee, 0)
                break
            except FAILURES as failure:
                if group is not None:
                    group.close()
                self._membership.broken(number, unreached(failure), str(failure))
        return Admitted(view, group, member_bases, completed, began)

    def _exchange_state(self, group: Group, view: View, trainee: Trainee | None, completed: int) -> int:
        """Transfer the state to newcomers and compare hashes. Returns the number of completed transactions."""
        assert trainee is not None
        new = self._membership.number in view.newcomers
        donors = list(range(len(view.stage().members)))
        newcomers = list(range(len(donors), group.world))
        alike, own = (None, None) if new else trainee.hand_over()
        about = hand_over_value(group, donors[:1], newcomers, None if new else [str(completed), own])
        alike = hand_over_value(group, donors, newcomers, alike)
        if new:
            completed, own = int(about[0]), about[1]
            trainee.take_over(alike, own)
        hashes = group.all_gather_text(trainee.state_hash())
        if len({*hashes}) > 1:
            member_bases = (
                f"a newcomer's state differs from the group's after the transfer (hashes by rank: {', '.join(hashes)}),"
                " so it must not contribute. Build the same model and optimizer on every worker"
            )
            if hashes[group.rank] != hashes[0] or len({hashes[rank] for rank in donors}) > 1:
                raise MismatchError(member_bases)
            raise PeerLost(
                member_bases
            )  # the newcomer raises MismatchError, and the other members reconnect without it
        return completed
