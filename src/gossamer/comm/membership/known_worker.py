"""Coordinator's record of one worker process, and the evidence that it is alive."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from gossamer.base.peer_ops import Peer
from gossamer.comm.membership.messages import WorkerReport
from gossamer.comm.membership.view import MOST_OTHERS, Address, Member

ALIVE, UNDECIDED, LOST = "alive", "undecided", "lost"


@dataclass(eq=False)
class ReportedWorker:
    """A worker that has reported to this coordinator, or that the journal lists."""

    report: WorkerReport
    seen_at: Address | None = None  # address of its connection, behind a router that of the router
    peer: Peer | None = None  # None until it has reported to this start of the coordinator
    connected: bool = False
    lost_at: float = inf  # while disconnected: the time at which the worker counts as lost
    closed_view: int = 0  # newest view of which it has closed the connections
    left: bool = False  # it announced that it leaves
    gone: bool = False  # its launcher saw the process end
    is_compared: bool = False  # its fingerprint has been compared with the run's
    refused: str = ""  # why it is not admitted
    polls: list[tuple[int, int]] = field(default_factory=list)  # (token, known version) of pending polls
    readies: list[int] = field(default_factory=list)  # tokens of requests that wait for the fingerprint comparison

    @property
    def number(self) -> int:
        return self.report.number

    @property
    def member(self) -> Member:
        """With the address that a router has given to its listening port, from which it also dials the coordinator."""
        member = self.report.member
        if self.seen_at is None or self.seen_at[0] == member.host or self.seen_at in member.addresses:
            return member
        return replace(member, others=(self.seen_at, *member.others)[:MOST_OTHERS])

    @property
    def name(self) -> str:
        """Name of this worker in messages."""
        where = f"{self.report.host}:{self.report.port}"
        return f"worker {self.report.place} ({where})" if self.report.place >= 0 else f"the worker at {where}"

    @property
    def spot(self) -> str:
        """Host and launch slot, which a replacement process would share."""
        return f"{self.report.host} {self.report.place}"

    def learn(self, report: WorkerReport) -> None:
        """Merge a report, which may be older than the last one. Facts that were true once stay true."""
        last = self.report
        self.report = replace(
            report,
            view=max(last.view, report.view),
            ready=last.ready or report.ready,
            has_state=last.has_state or report.has_state,
            fingerprint=report.fingerprint or last.fingerprint,
        )

    def reconnect(self, peer: Peer) -> None:
        self.peer, self.connected, self.lost_at = peer, True, inf

    def close(self, lost_at: float) -> None:
        """Record a closed connection. The worker counts as lost at `lost_at`, unless it reconnects before."""
        self.connected, self.lost_at = False, lost_at

    def is_lost(self, now: float) -> bool:
        """Whether the worker has left, has ended, or has been disconnected for too long."""
        return self.gone or self.left or (not self.connected and now >= self.lost_at)

    def evidence(self, view: int, now: float, silent_at: float) -> str:
        """Whether the worker is alive, judged by whether it has closed `view`. silent_at: the deadline for that."""
        if self.is_lost(now):
            return LOST
        if not self.connected:
            return UNDECIDED
        if self.closed_view >= view:
            return ALIVE
        return LOST if now >= silent_at else UNDECIDED

    def why_lost(self, dead_after_seconds: float) -> str:
        if self.left:
            return "it left"
        if self.gone:
            return "its process ended"
        if not self.connected:
            return "its connection was closed or silent, and it did not reconnect in time"
        return f"it did not answer for {dead_after_seconds:g} s"
