"""Scripts of one worker: report to the coordinator, poll for news, and close finished views."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from gossamer.base.peer_ops import PeerOp, PeerScript, Pull, Pulled, Push, Receipt, Stamp
from gossamer.comm.membership.messages import (
    BROKEN,
    COORDINATOR,
    HERE_AGAIN,
    LEAVES,
    MOST_WHY_CHARACTERS,
    NEWS,
    STATUS,
    BrokenReport,
    News,
    Standing,
    WorkerReport,
)
from gossamer.comm.membership.view import View
from gossamer.errors import MalformedError

StandingScript = Generator[PeerOp, Any, Standing]


class MemberScripts:
    """Membership state of one worker, and the scripts that update it.

    One script follows the news, while other threads may send reports.

    Args:
        report: The worker's first report.
        on_over: Called with the number of a view that has ended. It must close the view's connections, because the
            coordinator is notified afterwards.
        on_change: Called after each change of `view`, `over` and `out`.
    """

    def __init__(
        self,
        report: WorkerReport,
        on_over: Callable[[int], None] = lambda view: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.report = report
        self._learns = threading.Lock()  # held by the training thread and the agent's thread
        self.view: View | None = None  # newest view with this worker
        self._newer: View | None = None  # of the news that are being taken
        self.over = 0  # number of the newest view that has ended
        self.out = ""  # why this worker is no longer a member of the run
        self._known = -1
        self._needs_whole = False  # whether a change did not fit the last view
        self.formed: bool | None = None  # whether training had begun when this worker joined; None until known
        self._on_over, self._on_change = on_over, on_change

    def learn(self, **facts: Any) -> None:
        """Update fields of the report for later messages. Thread-safe."""
        with self._learns:
            self.report = replace(self.report, **facts)

    def follow(self) -> PeerScript:
        """Poll for news until this worker is out of the run."""
        while not self.out:
            held = "" if self.view is None or self._needs_whole else f"/{self.view.number}"
            pulled: Pulled = yield Pull(of=COORDINATOR, key=f"{NEWS}/{self.report.number}{held}", known=self._known)
            news = News.of(pulled.about)
            if news.again:
                standing = yield from self.send_report(HERE_AGAIN)
                if standing.formed and not self.formed and self.view is None:
                    self._leave_out("training began without this worker while the coordinator could not reach it")
            elif pulled.version > self._known and self._read(news):
                self._known = pulled.version
                self._take(news)

    def send_report(self, key: str) -> StandingScript:
        """Send the current report. If the worker cannot be admitted, the standing's `refused` has the reason.

        If the coordinator serves another run, this worker is out.
        """
        receipt: Receipt = yield Push(
            to=COORDINATOR, key=key, stamp=Stamp(self.report.number, 0), about=self.report.text()
        )
        standing = Standing.of(receipt.about)
        self._compare_runs(standing)
        if self.formed is None and receipt.version >= 0:
            self.formed = standing.formed
        return standing

    def report_broken(self, view: int, suspects: Sequence[int], why: str, went_on: bool = False) -> PeerScript:
        """Report that this worker cannot continue in a view."""
        report = BrokenReport(view=view, suspects=list(suspects), why=why[:MOST_WHY_CHARACTERS], went_on=went_on)
        yield Push(to=COORDINATOR, key=BROKEN, stamp=Stamp(self.report.number, view), about=report.text())

    def report_leave(self, finished: bool, within_seconds: float | None = None) -> PeerScript:
        """Report that this worker leaves. Raises PeerLost if the coordinator does not answer in time."""
        stamp = Stamp(self.report.number, int(finished))
        yield Push(to=COORDINATOR, key=LEAVES, stamp=stamp, within_seconds=within_seconds)

    def ask_status(self, within_seconds: float | None = None) -> Generator[PeerOp, Any, str]:
        """Ask why this worker is waiting, as text. Raises PeerLost if the coordinator does not answer in time."""
        pulled: Pulled = yield Pull(of=COORDINATOR, key=f"{STATUS}/{self.report.number}", within_seconds=within_seconds)
        return pulled.about

    def _compare_runs(self, standing: Standing) -> None:
        """Store the run's identity from the first answer. Leave if a later answer is from another run."""
        if not self.report.run:
            self.learn(run=standing.run)
        elif standing.run and standing.run != self.report.run:
            self._leave_out(standing.refused or f"the coordinator serves another run ({standing.run:.8})")

    def _read(self, news: News) -> bool:
        """Read the view of the news. False if it is a change that does not fit, so that the whole view is needed."""
        try:
            self._newer = news.read_view(self.view) if news.view or news.change else None
        except MalformedError:
            if not news.change or self._needs_whole:
                raise
            self._needs_whole = True
            return False
        self._needs_whole = False
        return True

    def _take(self, news: News) -> None:
        if news.out:
            self._leave_out(news.out)
        elif news.over:
            self._close(news.over)
        elif self._newer is not None:
            view, self._newer = self._newer, None
            self._close(view.number - 1)
            self.view = view
            self.learn(view=view.number)
            if self.report.number not in view.newcomers:
                self.learn(has_state=True)
        self._on_change()

    def _close(self, number: int) -> None:
        if self.view is not None and self.view.number <= number and self.over < self.view.number:
            self._on_over(self.view.number)
        self.over = max(self.over, number)

    def _leave_out(self, why: str) -> None:
        self.out = why
        if self.view is not None:
            self._close(self.view.number)
        self._on_change()
