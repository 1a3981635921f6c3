"""Heard worker: keeps what a coordinator knows of one worker's process, and the evidence that it lives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from gossamer.base.peer_ops import Peer
from gossamer.comm.membership.messages import WorkerReport

ALIVE, UNDECIDED, LOST = "alive", "undecided", "lost"  # evidence


@dataclass(eq=False)
class HeardWorker:
    """A worker of which this coordinator has heard, or which its journal names."""

    report: WorkerReport
    peer: Peer | None = None  # None until it has reported to this start of the coordinator
    connected: bool = False
    lost_at: float = inf  # while it is not connected: the moment from which it counts as lost
    closed_view: int = 0  # the newest view whose connections it has closed
    left: bool = False  # it said so
    gone: bool = False  # somebody saw its process end
    is_compared: bool = False  # its fingerprint with the run's
    refused: str = ""  # why it is not taken in
    polls: list[tuple[int, int]] = field(default_factory=list)  # (token, version that it knows) of those who wait
    readies: list[int] = field(default_factory=list)  # tokens that wait for the comparison of fingerprints

    @property
    def number(self) -> int:
        return self.report.number

    @property
    def name(self) -> str:
        """As people tell workers apart."""
        where = f"{self.report.host}:{self.report.port}"
        return f"worker {self.report.place} ({where})" if self.report.place >= 0 else f"the worker at {where}"

    @property
    def spot(self) -> str:
        """Where its successor would run."""
        return f"{self.report.host} {self.report.place}"

    def learn(self, report: WorkerReport) -> None:
        """Take a report, which may be older than the last one: what was true once stays true."""
        last = self.report
        self.report = replace(
            report,
            view=max(last.view, report.view),
            ready=last.ready or report.ready,
            has_state=last.has_state or report.has_state,
            fingerprint=report.fingerprint or last.fingerprint,
        )

    def hear(self, peer: Peer) -> None:
        self.peer, self.connected, self.lost_at = peer, True, inf

    def close(self, lost_at: float) -> None:
        """Its connection broke; it is lost unless it is back by then."""
        self.connected, self.lost_at = False, lost_at

    def is_lost(self, now: float) -> bool:
        """Whether it ended, or has not been connected for too long."""
        return self.gone or self.left or (not self.connected and now >= self.lost_at)

    def evidence(self, view: int, now: float, silent_at: float) -> str:
        """Whether it lives, being asked to close `view`. silent_at: when it should have answered."""
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
            return "its connection was closed or silent, and it did not come back in time"
        return f"it did not answer for {dead_after_seconds:g} s"
