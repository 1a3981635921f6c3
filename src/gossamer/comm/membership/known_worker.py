"""Coordinator's records of worker processes, and the evidence that they are alive."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from math import inf

from gossamer.base.host_port import Address
from gossamer.base.json_text import read_json
from gossamer.base.peer_ops import Peer
from gossamer.comm.membership.messages import WorkerReport
from gossamer.comm.membership.view import MOST_OTHERS, Member
from gossamer.errors import MalformedError

ALIVE, UNDECIDED, LOST = "alive", "undecided", "lost"


@dataclass(eq=False, slots=True)
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
    polls: list[tuple[int, int, int]] = field(default_factory=list)  # pending: token, known version, number of its view
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


class KnownWorkers(dict[int, ReportedWorker]):
    """All workers by number, in order of arrival, with indexes: an event costs what it changes, not a pass over all.

    Attributes:
        connected: Number of connected workers.
        lost: Workers for which `is_lost` holds, as of the last `look`.
        newly_lost: Those of them that the view policy has not looked at.
        changed: Workers whose pending requests may have an answer now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.connected = 0
        self.lost: dict[int, ReportedWorker] = {}
        self.newly_lost: list[ReportedWorker] = []
        self.changed: dict[int, ReportedWorker] = {}
        self._of_peer: dict[Peer, dict[int, ReportedWorker]] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap; an entry is void once its worker's `lost_at` differs

    def add(self, worker: ReportedWorker) -> None:
        self[worker.number] = self.changed[worker.number] = worker
        if worker.gone or worker.left:
            self._lose(worker)

    def forget(self, worker: ReportedWorker) -> None:
        self.connected -= worker.connected
        self._leave_peer(worker)
        for index in (self, self.lost, self.changed):
            index.pop(worker.number, None)

    def of_peer(self, peer: Peer) -> list[ReportedWorker]:
        """Workers that reported from this peer last: the newest process, and earlier ones that are not forgotten."""
        return list(self._of_peer.get(peer, {}).values())

    def reconnect(self, worker: ReportedWorker, peer: Peer) -> None:
        """Record a message."""
        if worker.peer != peer:
            self._leave_peer(worker)
            self._of_peer.setdefault(peer, {})[worker.number] = worker
        self.connected += not worker.connected
        worker.peer, worker.connected, worker.lost_at = peer, True, inf
        self._recover(worker)

    def close(self, worker: ReportedWorker, lost_at: float) -> None:
        """Record a closed connection. The worker counts as lost at `lost_at`, unless it reconnects before."""
        self.connected -= worker.connected
        worker.connected = False
        self.wait_until(worker, lost_at)

    def wait_until(self, worker: ReportedWorker, lost_at: float) -> None:
        """Set the time at which a disconnected worker counts as lost."""
        worker.lost_at = lost_at
        self._recover(worker)
        heapq.heappush(self._deadlines, (lost_at, worker.number))

    def end(self, worker: ReportedWorker, *, left: bool = False) -> None:
        """Record that the process has ended, or announced that it leaves."""
        worker.left |= left
        worker.gone |= not left
        self._lose(worker)

    def look(self, now: float) -> None:
        """Update `lost` to this time."""
        while self._deadlines and self._deadlines[0][0] <= now:
            lost_at, number = heapq.heappop(self._deadlines)
            worker = self.get(number)
            if worker is not None and not worker.connected and worker.lost_at == lost_at:
                self._lose(worker)

    @property
    def next_deadline(self) -> float:
        """Time at which the next worker may count as lost; inf for none."""
        return self._deadlines[0][0] if self._deadlines else inf

    def _lose(self, worker: ReportedWorker) -> None:
        if worker.number not in self.lost:
            self.lost[worker.number] = worker
            self.newly_lost.append(worker)

    def _recover(self, worker: ReportedWorker) -> None:
        if not worker.gone and not worker.left:
            self.lost.pop(worker.number, None)

    def _leave_peer(self, worker: ReportedWorker) -> None:
        if worker.peer is not None:
            others = self._of_peer[worker.peer]
            del others[worker.number]
            if not others:
                del self._of_peer[worker.peer]


# -- comparison of a newcomer with the running workers, key by key, before it is admitted ------------------------------

MOST_VALUE_CHARACTERS = 200


def read_fingerprint(text: str) -> dict[str, str]:
    """Parse a JSON object of strings. Raises MalformedError for anything else."""
    try:
        read = read_json(text)
    except ValueError as error:
        raise MalformedError(f"a fingerprint must be a JSON object of strings: invalid JSON ({error!s:.100})") from None
    if not isinstance(read, dict) or not all(isinstance(value, str) for value in read.values()):
        raise MalformedError("a fingerprint must be a JSON object of strings: json.dumps({'torch': torch.__version__})")
    return read


def difference(run: str, newcomer: str) -> str:
    """Describe how a newcomer's fingerprint differs from the run's; empty if they are equal.

    Raises MalformedError for an invalid fingerprint.
    """
    expected, proposed = read_fingerprint(run), read_fingerprint(newcomer)
    differing = [key for key in dict.fromkeys((*expected, *proposed)) if expected.get(key) != proposed.get(key)]
    if not differing:
        return ""
    named = "; in ".join(
        f"{key}: {_shown(expected.get(key))} in the run, {_shown(proposed.get(key))} here" for key in differing
    )
    return (
        "this worker differs from the running workers, so its parameters would silently diverge. It was not admitted. "
        f"Differences: {named}. Align them, then restart this worker."
    )


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(value[:MOST_VALUE_CHARACTERS])
