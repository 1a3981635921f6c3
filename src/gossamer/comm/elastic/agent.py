"""Membership agent: connects one worker to the coordinator of an elastic run, in threads of its own."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gossamer.base.host_port import Address, read_host_port
from gossamer.base.peer_ops import WORKER, Peer, PeerScript
from gossamer.comm.environment.wait_timeout import COORDINATOR_SECONDS
from gossamer.comm.membership.member import MemberScripts
from gossamer.comm.membership.messages import (
    ALL_LEFT,
    ATTACHED,
    COORDINATOR,
    HERE,
    HERE_AGAIN,
    READY,
    RESIZED,
    Standing,
    WorkerReport,
)
from gossamer.comm.membership.view import View
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import (
    ConnectError,
    CoordinatorLost,
    GossamerError,
    MalformedError,
    MismatchError,
    PeerLost,
    Stopped,
)
from gossamer.events import LeftRun, emit, notice

RUN = "elastic"  # credentials of these connections, distinct from those of parameter servers
LARGEST_FRAME_BYTES = 2**22  # holds a view of tens of thousands of members
BEATS = 5  # heartbeats in the time after which silence is a loss: with many members they are most of the frames
NOTICE_SECONDS = 10.0
STATUS_SECONDS = 2.0
START_AGAIN = (
    "Run the first launcher's command again, in the same folder. With --listen HOST:PORT and --token-file FILE the "
    "run continues."
)
OUT = (
    "This worker is no longer in the run: {why}. It may rejoin as a new process, and then receives the state from the "
    "other workers."
)
T = TypeVar("T")


class MembershipAgent:
    """One worker's membership. Thread-safe; Ctrl-C interrupts waiting calls.

    Args:
        coordinator: Address of the coordinator.
        token: The run's token.
        place: Requested rank in the first view.
        number: Member number, 63 bits: chosen by the launcher for this process, or random.
        on_change: Called in the agent's thread with the number of a view that has ended, before the coordinator is
            notified. It must close the view's connections and return soon; until then this worker counts as silent.
        dead_after_seconds: As the coordinator's.
        coordinator_seconds: How long to wait for a silent coordinator before CoordinatorLost is raised.
        tls: TLS contexts, if the run encrypts.
        dial_from: Own address of the connection: that of the view listener, so that routers give one address to both.
    """

    def __init__(
        self,
        coordinator: tuple[str, int],
        token: bytes,
        *,
        place: int | None = None,
        number: int | None = None,
        on_change: Callable[[int], None] = lambda view: None,
        dead_after_seconds: float = 5.0,
        coordinator_seconds: float = COORDINATOR_SECONDS,
        tls: Tls | None = None,
        dial_from: tuple[str, int] | None = None,
    ) -> None:
        self.number = secrets.randbits(63) if number is None else number
        self.formed, self.size, self.began, self.least, self.most = False, 0, 0, 0, 0  # valid after here()
        self.servers = ""  # addresses of the run's parameter servers; valid after here()
        self.relay = self.seal = False  # whether connections are relayed, and are sealed; valid after here()
        self.coordinator = coordinator
        self._notified = False  # whether the user was notified of the release
        self._coordinator_seconds = coordinator_seconds
        self._unheard_since: float | None = None  # in a wait: since when the coordinator has not answered
        self._where = f"{coordinator[0]}:{coordinator[1]}"
        self._changed = threading.Condition()
        report = WorkerReport(number=self.number, host="?", port=0, place=-1 if place is None else place)
        self._scripts = MemberScripts(report, on_change, self._wake)
        self._endpoint = TcpEndpoint(
            Credentials(me=Peer(WORKER, self.number), token=token, run=RUN, largest_frame_bytes=LARGEST_FRAME_BYTES),
            EndpointOptions(
                dead_after_seconds=dead_after_seconds,
                heartbeat_seconds=dead_after_seconds / BEATS,
                tls=tls,
                dial_from=dial_from,
            ),
        )
        try:
            self._endpoint.meet({COORDINATOR: coordinator})
        except BaseException:
            self._endpoint.close()
            raise

    # -- joining -------------------------------------------------------------------------------------------------------

    def here(self, *addresses: tuple[str, int], seconds: float = 300.0) -> None:
        """Report this worker and its listening addresses. Raises ConnectError if the coordinator does not answer."""
        (host, port), *others = addresses
        self._scripts.learn(host=host, port=port, others=others)
        standing: Standing = self._run(self._scripts.send_report(HERE), "the coordinator to answer", seconds)
        self.formed, self.size, self.least, self.most = standing.formed, standing.size, standing.least, standing.most
        self.began, self.servers = standing.began or standing.size, standing.servers
        self.relay, self.seal = standing.relay, standing.seal
        self._endpoint.start(self._following())

    def first_view(self, seconds: float) -> View:
        """Wait for the first view, once enough workers have connected. Raises PeerLost as `view_after`."""
        return self.view_after(0, seconds)

    def ready(self, fingerprint: str, *, seconds: float = 1800.0) -> None:
        """Report that this newcomer can be admitted, with its fingerprint, a JSON object of strings.

        Returns after the comparison. Raises MismatchError if it is refused, and PeerLost if this worker is out.
        """
        self._scripts.learn(ready=True, fingerprint=fingerprint)
        standing: Standing = self._run(self._scripts.send_report(READY), "the members' fingerprint", seconds)
        self._check_refused(standing)

    def attached(self, fingerprint: str, *, seconds: float = 300.0) -> None:
        """Report, as a member of the first view, the fingerprint for newcomers. Raises MismatchError if invalid."""
        self._scripts.learn(fingerprint=fingerprint)
        self._check_refused(self._run(self._scripts.send_report(ATTACHED), "the coordinator to answer", seconds))

    def caught_up(self) -> None:
        """Report that this newcomer has completed a transaction with the whole state. Returns at once.

        Until this report, no further newcomer is admitted, and each new view must include a member with the state.
        Otherwise a newcomer before that transaction could force the older members to move again from a base that this
        worker does not know.
        """
        self._scripts.learn(has_state=True)
        self._endpoint.start(self._scripts.send_report(HERE_AGAIN))

    # -- views ---------------------------------------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        """Whether this worker is out without a fault of its own: the run was resized, or the others have finished."""
        return any(reason in self._scripts.out for reason in (RESIZED, ALL_LEFT))

    def _notice_release(self) -> None:
        if not self._notified:
            self._notified = True
            notice(f"this worker ends: {self._scripts.out}")
            if RESIZED in self._scripts.out:  # otherwise the run itself is over
                emit(LeftRun())

    def view_after(self, number: int, seconds: float) -> View:
        """Wait for a view with a higher number, and return the newest.

        Args:
            number: Number of the last known view, or 0.
            seconds: How long to wait.

        Raises:
            PeerLost: This worker is out, or there was no view within `seconds`.
            CoordinatorLost: The coordinator did not answer for too long.
            Stopped: This worker is `released`.
        """
        view = self._wait(
            lambda: self.newer_view(number), f"a view after view {number}" if number else "the run to begin", seconds
        )
        if view is None:
            raise PeerLost(
                f"no view after view {number} was created within {seconds:g} s: too few workers are left. "
                "Start the missing workers, or wait longer with GOSSAMER_TIMEOUT."
            )
        return view

    def broken(self, view: int, suspects: Sequence[int], why: str, *, went_on: bool = False) -> None:
        """Report that this worker cannot continue in a view that it has closed. Returns at once.

        Args:
            view: Number of the view.
            suspects: Numbers of members that were not reached or did not finish. A live member that is named in
                several consecutive views is evicted.
            why: The error.
            went_on: Whether a transaction was completed in this view.
        """
        self._endpoint.start(self._scripts.report_broken(view, suspects, why, went_on))

    def leave(self, *, finished: bool = False, seconds: float = 2.0) -> None:
        """Leave the run. Returns after the coordinator's acknowledgment, or after `seconds` without one.

        finished: training is complete on all ranks. No newcomer is admitted afterwards, and the remaining members may
        continue in a view smaller than the minimum.
        """
        try:
            self._run(
                self._scripts.report_leave(finished, seconds),
                "the coordinator to acknowledge that this worker leaves",
                seconds + 1,
            )
        except (PeerLost, ConnectError):
            notice(
                f"The coordinator at {self._where} did not answer for {seconds:g} s, so the other workers will only "
                "detect that this one has left when its process exits."
            )

    def close(self) -> None:
        """Close the connection. Without `leave` before, the other workers consider this one lost."""
        self._endpoint.close()

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _following(self) -> PeerScript:
        """Follow the news. On an error, this worker is out."""
        try:
            yield from self._scripts.follow()
        except BaseException as error:
            self._scripts.out = self._scripts.out or f"its agent failed: {error}"
            self._wake()
            if not isinstance(error, GossamerError | GeneratorExit):
                raise

    def newer_view(self, number: int) -> View | None:
        """Return the newest view if it has a higher number and has not ended. Does not wait. Raises as `view_after`."""
        if self._scripts.out and self.released:
            self._notice_release()
            raise Stopped
        if self._scripts.out:
            raise PeerLost(OUT.format(why=self._scripts.out))
        view = self._scripts.view
        return view if view is not None and view.number > number and self._scripts.over < view.number else None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, look: Callable[[], T | None], what: str, seconds: float) -> T | None:
        """Wait until `look` returns a result; None after `seconds`. Reports every ten seconds why it waits."""
        began = time.monotonic()
        notice_at = began + NOTICE_SECONDS
        self._unheard_since = None
        with self._changed:
            while (found := look()) is None:
                now = time.monotonic()
                if now >= began + seconds:
                    return None
                if (since := self._unheard_since) is not None and now >= since + self._coordinator_seconds:
                    raise CoordinatorLost(
                        f"the coordinator at {self._where} did not answer for {now - since:.0f} s, so no worker can be "
                        f"replaced. {START_AGAIN}"
                    )
                if now >= notice_at:
                    notice_at += NOTICE_SECONDS
                    self._endpoint.start(self._saying(f"This worker has waited {now - began:.0f} s for {what}"))
                self._changed.wait(min(notice_at, began + seconds) - now)
        return found

    def _run(self, script: PeerScript, what: str, seconds: float) -> Any:
        """Run a script in a separate thread and return its result. Raises ConnectError on a timeout."""
        began, handle = time.monotonic(), self._endpoint.start(script)
        while True:
            waited = time.monotonic() - began
            if waited >= seconds:
                raise CoordinatorLost(
                    f"the coordinator at {self._where} did not answer for {seconds:g} s while this worker waited for "
                    f"{what}. Check its launcher's log, and for a firewall between the machines. "
                    f"{START_AGAIN}"
                )
            try:
                return handle.wait(min(NOTICE_SECONDS, seconds - waited))
            except TimeoutError:
                if not handle.landed():
                    notice(
                        f"This worker has waited {time.monotonic() - began:.0f} s for {what} (coordinator at "
                        f"{self._where})."
                    )

    def _saying(self, what: str) -> PeerScript:
        try:
            status = yield from self._scripts.ask_status(STATUS_SECONDS)
            self._unheard_since = None
        except GossamerError:
            now = time.monotonic()
            self._unheard_since = since = self._unheard_since or now
            left = max(self._coordinator_seconds - (now - since), 0.0)
            status = (
                f"the coordinator at {self._where} does not answer. {START_AGAIN} Otherwise this worker fails in "
                f"{left:.0f} s"
            )
        notice(f"{what}: {status}.")

    def _check_refused(self, standing: Standing) -> None:
        if standing.run and standing.run != self._scripts.report.run:
            raise PeerLost(OUT.format(why=standing.refused))
        if standing.refused:
            raise MismatchError(standing.refused)


def read_address(text: str) -> Address:
    """Parse the value of GOSSAMER_COORDINATOR. Raises MalformedError."""
    try:
        return read_host_port(text)
    except ValueError as problem:
        raise MalformedError(f"invalid address of a coordinator: {problem}") from None
