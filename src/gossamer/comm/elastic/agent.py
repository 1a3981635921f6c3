"""Membership agent: connects one worker to the coordinator of an elastic run, by threads of its own."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
from gossamer.comm.rpc.sockets import Tls
from gossamer.comm.wire.authentication import Credentials
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

RUN = "elastic"  # credentials of these connections, told from those of parameter servers
LARGEST_FRAME_BYTES = 2**22  # a view of tens of thousands of members
NOTICE_SECONDS = 10.0
STATUS_SECONDS = 2.0
START_AGAIN = (
    "Write the first launcher's command again, in the same folder: with --listen HOST:PORT and --token-file FILE the "
    "run continues."
)
OUT = (
    "This worker is not in the run any more: {why}. It may come back as a new process, and is given everything by the "
    "others then."
)
T = TypeVar("T")


class MembershipAgent:
    """One worker's membership. May be called by any thread; calls that wait end by Ctrl-C.

    coordinator: where it listens. token: of the run. place: the rank that this worker would like in the first view.
    number: as whom it comes, of 63 bits: its launcher's choice for this process, or a random one.
    on_change: called in the agent's thread with the number of a view that is over, before the coordinator hears that
    this worker has closed it: close what belongs to it and return soon, for until then this worker counts as silent.
    dead_after_seconds: as the coordinator's.
    coordinator_seconds: how long a coordinator that does not answer is waited for, then CoordinatorLost is raised.
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
    ) -> None:
        self.number = secrets.randbits(63) if number is None else number
        self.formed, self.size, self.began, self.most = False, 0, 0, 0  # known after here()
        self._told = False  # why this worker is released
        self._coordinator_seconds = coordinator_seconds
        self._unheard_since: float | None = None  # the moment from which the coordinator has not answered, in a wait
        self._where = f"{coordinator[0]}:{coordinator[1]}"
        self._changed = threading.Condition()
        report = WorkerReport(number=self.number, host="?", port=0, place=-1 if place is None else place)
        self._scripts = MemberScripts(report, on_change, self._wake)
        self._endpoint = TcpEndpoint(
            Credentials(me=Peer(WORKER, self.number), token=token, run=RUN, largest_frame_bytes=LARGEST_FRAME_BYTES),
            EndpointOptions(dead_after_seconds=dead_after_seconds, tls=tls),
        )
        try:
            self._endpoint.meet({COORDINATOR: coordinator})
        except BaseException:
            self._endpoint.close()
            raise

    # -- coming --------------------------------------------------------------------------------------------------------

    def here(self, address: tuple[str, int], *, seconds: float = 300.0) -> None:
        """Tell that this worker is there, and where others reach it. Raises ConnectError where nobody answers."""
        self._scripts.learn(host=address[0], port=address[1])
        standing: Standing = self._run(self._scripts.say(HERE), "the coordinator to answer", seconds)
        self.formed, self.size, self.most = standing.formed, standing.size, standing.most
        self.began = standing.began or standing.size
        self._endpoint.start(self._following())

    def first_view(self, seconds: float) -> View:
        """The view with which the run begins, once enough workers are there. Raises PeerLost as `view_after`."""
        return self.view_after(0, seconds)

    def ready(self, fingerprint: str, *, seconds: float = 1800.0) -> None:
        """Tell that this newcomer may be taken in, and what it is like: a JSON object of texts.

        Returns once that was compared. Raises MismatchError where it is refused, and PeerLost where this worker is out.
        """
        self._scripts.learn(ready=True, fingerprint=fingerprint)
        standing: Standing = self._run(
            self._scripts.say(READY), "those that train to say what a newcomer must be like", seconds
        )
        self._check_refused(standing)

    def attached(self, fingerprint: str, *, seconds: float = 300.0) -> None:
        """Tell, as a member of the first view, what newcomers must be like. Raises MismatchError for no fingerprint."""
        self._scripts.learn(fingerprint=fingerprint)
        self._check_refused(self._run(self._scripts.say(ATTACHED), "the coordinator to answer", seconds))

    def caught_up(self) -> None:
        """Tell that this newcomer has made a transaction with all that the others have. Returns at once.

        Until it has said so, no further newcomer is taken in, and no view is made of it without one that has it all.
        One that came before that transaction would have those who were there move again from where they stood before
        both, of which this one knows nothing.
        """
        self._scripts.learn(has_state=True)
        self._endpoint.start(self._scripts.say(HERE_AGAIN))

    # -- views ---------------------------------------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        """Whether this worker is out through no fault: others were to be fewer, or have finished."""
        return any(reason in self._scripts.out for reason in (RESIZED, ALL_LEFT))

    def _say_released(self) -> None:
        if not self._told:
            self._told = True
            notice(f"this worker ends: {self._scripts.out}")
            if RESIZED in self._scripts.out:  # else the run itself is over
                emit(LeftRun())

    def view_after(self, number: int, seconds: float) -> View:
        """The newest view, once there is one of a higher number. Raises PeerLost where this worker is out, or nothing
        came within `seconds`; CoordinatorLost where the coordinator does not answer for too long; Stopped where it is
        `released`."""
        view = self._wait(
            lambda: self._newer(number), f"a view after view {number}" if number else "the run to begin", seconds
        )
        if view is None:
            raise PeerLost(
                f"no view of the workers came after view {number} within {seconds:g} s: too few workers are left. "
                "Start the missing workers, or give the run more time by GOSSAMER_TIMEOUT."
            )
        return view

    def broken(self, view: int, suspects: Sequence[int], why: str, *, went_on: bool = False) -> None:
        """Tell that this worker cannot go on in a view that it has closed. Returns at once.

        suspects: numbers of members that were not reached or did not finish; who is named in several views one after
        the other, though it lives, is put out. went_on: whether anything was completed in this view before.
        """
        self._endpoint.start(self._scripts.say_broken(view, suspects, why, went_on))

    def leave(self, *, finished: bool = False, seconds: float = 2.0) -> None:
        """Leave the run. The coordinator has heard it on return, unless nobody answers for so long.

        finished: because all is done, and all others have said so, too: nobody is taken in from now on, and those who
        have not left yet may go on in a view of fewer than the least.
        """
        try:
            self._run(
                self._scripts.say_leaves(finished, seconds),
                "the coordinator to hear that this worker leaves",
                seconds + 1,
            )
        except (PeerLost, ConnectError):
            notice(
                f"The coordinator at {self._where} did not answer for {seconds:g} s, so the others hear by this "
                "process's end that it has left."
            )

    def close(self) -> None:
        """Free everything. Without `leave` before, the others take this worker for lost."""
        self._endpoint.close()

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _following(self) -> PeerScript:
        """Follow the news; an error is why this worker is out."""
        try:
            yield from self._scripts.follow()
        except BaseException as error:
            self._scripts.out = self._scripts.out or f"its agent cannot go on: {error}"
            self._wake()
            if not isinstance(error, GossamerError | GeneratorExit):
                raise

    def _newer(self, number: int) -> View | None:
        if self._scripts.out and self.released:
            self._say_released()
            raise Stopped
        if self._scripts.out:
            raise PeerLost(OUT.format(why=self._scripts.out))
        view = self._scripts.view
        return view if view is not None and view.number > number and self._scripts.over < view.number else None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, look: Callable[[], T | None], what: str, seconds: float) -> T | None:
        """What `look` finds after some change; None where it found nothing in time. Says every ten seconds why."""
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
                        f"the coordinator at {self._where} did not answer for {now - since:.0f} s, and without it no "
                        f"worker can be replaced. {START_AGAIN}"
                    )
                if now >= notice_at:
                    notice_at += NOTICE_SECONDS
                    self._endpoint.start(self._saying(f"This worker has waited {now - began:.0f} s for {what}"))
                self._changed.wait(min(notice_at, began + seconds) - now)
        return found

    def _run(self, script: PeerScript, what: str, seconds: float) -> Any:
        """Run a script in a thread of its own and return its result. Raises ConnectError where it takes too long."""
        began, handle = time.monotonic(), self._endpoint.start(script)
        while True:
            waited = time.monotonic() - began
            if waited >= seconds:
                raise CoordinatorLost(
                    f"the coordinator at {self._where} was not heard for {seconds:g} s, and this worker waits for "
                    f"{what}. Is its launcher still there? See its log, and whether a firewall is between. "
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
                f"the coordinator at {self._where} does not answer. {START_AGAIN} This worker ends with an error in "
                f"{left:.0f} s otherwise"
            )
        notice(f"{what}: {status}.")

    def _check_refused(self, standing: Standing) -> None:
        if standing.run and standing.run != self._scripts.report.run:
            raise PeerLost(OUT.format(why=standing.refused))
        if standing.refused:
            raise MismatchError(standing.refused)


def read_address(text: str) -> tuple[str, int]:
    """Read HOST:PORT, as GOSSAMER_COORDINATOR holds it. Raises MalformedError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise MalformedError(f"{text!r:.80} is no address of a coordinator: write HOST:PORT")
    return host.strip("[]"), int(port)
