"""Served member: a worker of an elastic run whose parameters are on servers. It waits for no other worker."""

from __future__ import annotations

from contextlib import suppress

from gossamer.comm.detached import DetachedTransport
from gossamer.comm.elastic.agent import MembershipAgent
from gossamer.comm.elastic.recognition import WithServers
from gossamer.comm.membership.view import View
from gossamer.errors import GossamerError, LoopError, Stopped


class ServedMember(DetachedTransport, WithServers):
    """A session's place in the run: a transport without collective operations, since no other worker is in step.

    Views follow each other in the agent's thread, and connect nothing; `look` returns the newest one.

    Args:
        agent: The worker's membership.
        first: The view with which training begins; None for a newcomer, which must `join`.
        seconds: How long a newcomer waits for a place.
    """

    def __init__(self, agent: MembershipAgent, first: View | None, seconds: float) -> None:
        super().__init__(0, agent.began)
        self.number = agent.number
        self.released = False  # whether the run continues without this worker
        self._agent, self._seconds, self._view, self._left = agent, seconds, first, False
        if first is not None:
            self._place(first)

    @property
    def is_newcomer(self) -> bool:
        """Whether the others train already, so that this worker must `join` them."""
        return self._view is None

    def attached(self, fingerprint: str) -> None:
        """Compare this member of the first view with the others. Raises MismatchError."""
        self._agent.attached(fingerprint)

    def join(self, fingerprint: str) -> None:
        """Wait for a place among the others. Raises MismatchError for a worker that differs from them, PeerLost."""
        self._agent.ready(fingerprint)
        self._place(self._agent.view_after(0, self._seconds))

    def look(self) -> tuple[View, View] | None:
        """Return the view of the last call and the newest one, if they differ.

        Raises Stopped if this worker must leave, and PeerLost if it was evicted.
        """
        before = self._view
        assert before is not None
        try:
            view = self._agent.newer_view(before.number)
        except Stopped:
            self.released = True
            raise
        if view is None:
            return None
        self._place(view)
        return before, view

    def leave(self, *, finished: bool = False) -> None:
        """Leave the run. finished: training is complete."""
        if not self._left:
            self._left = True
            with suppress(GossamerError):
                self._agent.leave(finished=finished)

    def close(self) -> None:
        self.leave()
        self._agent.close()

    def _place(self, view: View) -> None:
        self._view, self.rank, self.world = view, view.rank_of(self.number), view.world

    def _gone(self) -> GossamerError:
        return LoopError(
            "workers of an elastic run with servers make no common calls, since no worker waits for another. Write "
            "session.log(loss=loss) for values of each worker, and session.averaged_parameters(model) for the common "
            "parameters."
        )
