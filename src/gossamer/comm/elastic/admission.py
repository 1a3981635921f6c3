"""Admission: hands newcomers the members' state between two transactions, and compares hashes before they contribute.

Members and newcomers connect as one group, in which every member sends a part of what all of them have alike.
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
    """A view whose newcomers have everything, and its group."""

    view: View
    group: Group
    told: list[Any]  # by rank, from where its members move; None of newcomers
    completed: int  # transactions of which everybody has the outcome
    began: float  # the moment when the admission did


class Admission:
    """One member's part in letting newcomers in, or a newcomer's in being let in.

    connect: makes the group of a view's members; raises PeerLost or ConnectError where it cannot be made.
    seconds: how long a newcomer waits for a view that holds it.
    """

    def __init__(self, membership: RunMembership, connect: Callable[[View], Group], seconds: float) -> None:
        self._membership, self._connect, self._seconds = membership, connect, seconds

    @staticmethod
    def is_open(group: Group, *, admits: bool) -> bool:
        """Whether every member would let newcomers in now: one may have run out of data, or save, which others do not
        know yet."""
        return "no" not in group.all_gather_text("yes" if admits else "no")

    def admit(
        self, view: View, trainee: Trainee | None, completed: int, bases: Callable[[Group], list[Any]]
    ) -> Admitted:
        """Let a view's newcomers in. bases: what all of a group tell each other of where they move from."""
        began = time.monotonic()
        group = self._connect(view.stage(whole=True))
        try:
            told = bases(group)
            return Admitted(view, group, told, self._exchange_state(group, view, trainee, completed), began)
        except BaseException:
            group.close()
            raise

    def join(self, fingerprint: str, trainee: Trainee | None) -> Admitted:
        """A newcomer's way in. Raises MismatchError where it is not like the others, and PeerLost where it was not let
        in."""
        began, number = time.monotonic(), 0
        self._membership.ready(fingerprint)
        while True:
            view = self._membership.view_after(number, self._seconds)
            number, group = view.number, None
            try:
                group = self._connect(view.stage(whole=True))
                told = [json.loads(text) for text in group.all_gather_text("null")]
                completed = self._exchange_state(group, view, trainee, 0)
                break
            except FAILURES as failure:
                if group is not None:
                    group.close()
                self._membership.broken(number, unreached(failure), str(failure))
        return Admitted(view, group, told, completed, began)

    def _exchange_state(self, group: Group, view: View, trainee: Trainee | None, completed: int) -> int:
        """Give newcomers everything, and compare hashes before they contribute; how many transactions are completed."""
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
            told = (
                f"a newcomer's state is not the group's after it was handed over (hashes by rank: {', '.join(hashes)}),"
                " so it must not contribute. Build the same model and optimizer on every worker"
            )
            if hashes[group.rank] != hashes[0] or len({hashes[rank] for rank in donors}) > 1:
                raise MismatchError(told)
            raise PeerLost(told)  # the newcomer ends by itself, and the others connect without it
        return completed
