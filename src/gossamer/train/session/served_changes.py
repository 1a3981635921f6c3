"""Served changes: updates one session when other workers come or go, if the parameters are on servers."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gossamer import events
from gossamer.comm.elastic.served_member import ServedMember
from gossamer.comm.membership.view import View
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import CheckpointError, Stopped
from gossamer.train.engine.extension import Extensions
from gossamer.train.session.group_changes import ChangingSession, GroupChanges, WorldChange


class ServedChanges(GroupChanges):
    """As GroupChanges, for workers without lock step: a newcomer receives the state from the servers, and no worker
    waits while another one comes or goes."""

    def __init__(
        self, member: ServedMember, session: ChangingSession, comm_thread: CommThread, extensions: Extensions
    ) -> None:
        super().__init__(None, session, comm_thread, extensions)
        self._member = member
        extensions.add(self)

    def admit(self, fingerprint: Mapping[str, str]) -> None:
        """Called before the session connects to the servers: wait for a place, if the others train already."""
        text = json.dumps(fingerprint)
        if self._member.is_newcomer:
            self._member.join(text)
        else:
            self._member.attached(text)
        self._session._world.renumber(self._member.rank, self._member.world)

    def begin(self, fingerprint: Mapping[str, str]) -> None:
        super().begin(fingerprint)
        self._preemption.install()

    def after_step(self) -> None:
        try:
            changed = self._member.look()
        except Stopped:
            self._session._synchronizer.leave()
            raise
        if changed is not None:
            self._note(*changed)
        super().after_step()

    def ended(self, how: events.Ended) -> events.Ended:
        return "interrupted" if self._member.released else super().ended(how)

    def refuse_loaded(self) -> None:
        raise CheckpointError(
            "an elastic run with servers begins from the parameters that its first worker attached, so it cannot load "
            "a checkpoint of all workers. Load the model before attach: model.load_state_dict(torch.load(FILE))."
        )

    def farewell(self) -> None:
        self._member.leave(finished=True)

    def _leave(self) -> None:
        self._session._synchronizer.leave()
        self._member.leave()

    def _note(self, before: View, now: View) -> None:
        rank, step = self._member.rank, self._session._synchronizer.step
        lost = tuple(place for place, number in enumerate(before.numbers) if number not in now.numbers)
        joined = sum(number not in before.numbers for number in now.numbers)
        self._session._world.renumber(rank, now.world)
        if not lost and not joined:
            return
        self._unreported.append(
            WorldChange(size=now.world, size_before=before.world, rank=rank, lost=lost, joined=joined, step=step)
        )
        events.emit(
            events.GroupChanged(
                step=step, view=now.number, world=now.world, lost=lost, joined=joined, seconds=0.0, finished=True
            )
        )
        if rank == 0:
            texts = [f"{_count(len(lost))} lost or left"] * bool(lost) + [f"{_count(joined)} joined"] * bool(joined)
            events.notice(f"after step {step}: {', '.join(texts)}; {now.world} train now")


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"
