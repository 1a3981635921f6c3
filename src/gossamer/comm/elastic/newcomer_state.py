"""Newcomer state: transfers the members' state to newcomers while training continues, and the rest between two steps.

Members and newcomers connect as one group, in which each member sends a part of the replicated state:

    poll 1     all members copy their parts of the state in memory; threads connect to the newcomers and send the copy
    poll 2...  training continues until every thread has finished
    admission  between two transactions, the members send the exact difference to the copy; all compare hashes

A small state is sent at the admission alone. Members poll between two transactions, so they agree on each of these.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from gossamer.comm.elastic.change import FAILURES, Group, RunMembership, Trainee, unreached
from gossamer.comm.elastic.value_transfer import Incoming, Outgoing, receive_values, send_values
from gossamer.comm.membership.view import View
from gossamer.comm.mesh.collective_selector import HasPrices
from gossamer.comm.mesh.link_measurement import Links
from gossamer.errors import MismatchError, PeerLost

COPIED_BYTES = 2**20  # smallest model whose state is copied in the background
MOST_COPIES = 2  # the second one is the difference to the first
LONGEST_PAUSE = 64  # transactions between two polls
LOCAL = 2  # index of the value that need not be exact
FAST_BITS = 2e9  # per second; on faster lines a difference takes longer to compress than to send


@dataclass(frozen=True)
class Admitted:
    """A view with its group; all newcomers have the whole state."""

    view: View
    group: Group
    member_bases: list[Any]  # by rank, the base from which each member moves; None for newcomers
    completed: int  # transactions with results on every rank
    began: float  # start time of the admission


class BackgroundCopy:
    """Copies of the state that a thread of a member sends to newcomers while training continues."""

    def __init__(self, connect: Callable[[], Group], receivers: int, began_at: int) -> None:
        self._connect, self._receivers, self._began_at = connect, receivers, began_at
        self.group: Group | None = None
        self.sent: Outgoing | None = None  # the last copy
        self.count, self.version = 0, ""
        self._failure: BaseException | None = None
        self._began, self._seconds = time.monotonic(), 0.0

    def begin(self, outgoing: Outgoing, version: str) -> None:
        """Send a copy, or its difference to the last one."""
        before, self.sent, self.version = self.sent, outgoing, version
        self.count += 1
        self._thread = threading.Thread(target=self._run, args=(outgoing, before), name="gossamer-copy", daemon=True)
        self._thread.start()

    def _run(self, outgoing: Outgoing, before: Outgoing | None) -> None:
        try:
            group = self.group = self.group or self._connect()
            if (rate := slowest_line(group, self._receivers)) is not None:
                self._seconds = 8 * outgoing.nbytes / rate
            send_values(group, _about(group), outgoing, _newest(group, self._receivers), before)
            settle_if_priced(group)
        except BaseException as failure:  # raised by the next poll
            self._failure = failure

    def is_done(self) -> bool:
        """Whether the newcomers have the copy. Raises the error of a transfer that failed."""
        if self._thread.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def pause(self, completed: int) -> int:
        """Number of transactions after which the copy may be complete, for the next poll."""
        elapsed = time.monotonic() - self._began
        transactions = max(1, completed - self._began_at)
        left = (self._seconds - elapsed) * transactions / max(elapsed, 1e-3)
        return min(max(ceil(left / 2), 1), LONGEST_PAUSE)


def _newest(group: Group, count: int) -> list[int]:
    """Ranks of the newcomers, which are the last ones."""
    return list(range(group.world - count, group.world))


def slowest_line(group: Group, receivers: int) -> float | None:
    """Bits per second of the slowest line to a newcomer; None if unknown."""
    if not group.links:
        return None
    down = Links.of(group.links).down
    return min(down[rank] for rank in _newest(group, receivers)) or None


def _about(group: Group) -> dict[str, Any]:
    return {"means": group.prices.means if isinstance(group, HasPrices) and group.prices is not None else []}


def settle_if_priced(group: Group) -> None:
    """End a copy: compare whether every rank has the copy, and the prices of its collectives."""
    prices = group.prices if isinstance(group, HasPrices) else None
    known = prices is None or prices.covers(Links.of(group.links))
    if "no" not in group.all_gather_text("yes" if known else "no") and isinstance(group, HasPrices):
        group.settle()


class Admission:
    """One worker's part in an admission, as a member or as a newcomer.

    Args:
        membership: The worker's membership.
        connect: Forms the group of a view; raises PeerLost or ConnectError if it cannot.
        seconds: How long a newcomer waits for a view that includes it.
        copies: Whether this member can copy its state in the background. Engines between devices cannot, since there
            must never be two.
    """

    def __init__(
        self, membership: RunMembership, connect: Callable[[View], Group], seconds: float, copies: bool = True
    ) -> None:
        self._membership, self._connect, self._seconds, self._copies = membership, connect, seconds, copies
        self._copy: BackgroundCopy | None = None
        self._whole: Group | None = None  # of members and newcomers, before training uses it
        self._whole_view = -1  # its view
        self._ended: float = -1  # newest view that is known to have ended
        self._changing = threading.Lock()  # guards the group and the view
        self.polls_at = 0  # number of completed transactions before the next poll; equal on all members

    def abandon(self, number: float) -> None:
        """End the transfers of views up to `number`. Thread-safe."""
        with self._changing:
            self._ended = max(self._ended, number)
            group = self._whole if self._whole_view <= number else None
            self._whole = self._whole if group is None else None
        if group is not None:
            group.close()

    def restart(self) -> None:
        """Begin again in another view."""
        self._copy, self.polls_at = None, 0

    def is_open(self, group: Group, view: View, trainee: Trainee | None, completed: int, *, admits: bool) -> bool:
        """Poll whether every member admits newcomers now. One may have run out of data, or be saving.

        Begins a copy in the background if the newcomers have none.
        """
        copy, version = self._copy, ""
        copied, pause = copy is None or copy.is_done(), 1 if copy is None else copy.pause(completed)
        starts = copy is None and self._copies and trainee is not None and trainee.nbytes() >= COPIED_BYTES
        texts = group.all_gather_text(json.dumps([admits, copied, starts, pause]))
        all_admit, all_copied, all_start, pauses = zip(*map(json.loads, texts), strict=True)
        if not all(all_admit):
            return False
        if not all(all_copied):
            self.polls_at = completed + max(pauses)
            return False
        if trainee is None or not (all(all_start) or copy is not None):
            return True
        trainee.park()
        version = trainee.version()
        if copy is not None and (not version or version == copy.version or copy.count >= MOST_COPIES):
            return True
        if copy is None:
            copy = self._copy = BackgroundCopy(lambda: self._formed(view), len(view.newcomers), completed)
        copy.begin(self._outgoing(view, trainee), version)
        self.polls_at = completed + 1
        return False

    def admit(self, view: View, trainee: Trainee | None, completed: int, base: Callable[[], Any]) -> Admitted:
        """Admit a view's newcomers. base: returns the base from which this member moves; parks the trainee."""
        assert trainee is not None
        began, copy = time.monotonic(), self._copy
        group = self._formed(view) if copy is None or copy.group is None else copy.group
        own = base()
        unchanged = copy is not None and bool(copy.version) and copy.version == trainee.version()
        receivers = _newest(group, len(view.newcomers))
        before = None if copy is None else copy.sent
        outgoing = self._outgoing(view, trainee, before, kept=(LOCAL,) if unchanged else ())
        if (slowest_line(group, len(receivers)) or 0.0) > FAST_BITS:
            before = None
        about = {"base": own, "completed": completed, "last": True}
        heads = send_values(group, about, outgoing, receivers, before)
        self._compare(group, view, trainee)
        self._take_group(group)
        return Admitted(view, group, [each["base"] for each in heads], completed, began)

    def join(self, fingerprint: str, trainee: Trainee | None) -> Admitted:
        """Join as a newcomer. Raises MismatchError if this worker differs from the members, and PeerLost if it was not
        admitted."""
        assert trainee is not None
        number = 0
        self._membership.ready(fingerprint)
        while True:
            view = self._membership.view_after(number, self._seconds)
            number = view.number
            try:
                group = self._formed(view)
                heads, began = self._receive(group, view, trainee)
                self._compare(group, view, trainee)
                self._take_group(group)
                break
            except FAILURES as failure:
                self.abandon(number)
                self._membership.broken(number, unreached(failure), str(failure))
        return Admitted(view, group, [each["base"] for each in heads], int(heads[0]["completed"]), began)

    def _formed(self, view: View) -> Group:
        """Connect to members and newcomers. `abandon` closes the group until `_take_group`."""
        group = self._connect(view.stage(whole=True))
        with self._changing:
            self._whole, self._whole_view = group if view.number > self._ended else None, view.number
        if self._whole is None:
            group.close()
            raise PeerLost("another view was created")
        return group

    def _take_group(self, group: Group) -> None:
        with self._changing:
            over, self._whole = self._whole is not group, None
        self._copy = None
        if over:
            raise PeerLost("another view was created")

    def _outgoing(
        self, view: View, trainee: Trainee, before: Outgoing | None = None, kept: Collection[int] = ()
    ) -> Outgoing:
        rank, donors = view.rank_of(self._membership.number), _donors(view)
        return Outgoing(rank, list(zip(trainee.hand_over(), donors, strict=True)), before, kept)

    def _receive(self, group: Group, view: View, trainee: Trainee) -> tuple[list[Any], float]:
        """Receive copies until the members admit this worker. Returns what each rank sent in addition to the state, and
        when the admission began."""
        found: Incoming | None = None
        while True:
            own = {"base": None, "completed": 0}
            heads, found = receive_values(group, own, _donors(view), found)
            if heads[0].get("last"):
                began = time.monotonic()
                trainee.take_over(*found.values)
                return heads, began
            if isinstance(group, HasPrices) and group.prices is not None:
                for nbytes, itemsize in heads[0]["means"]:
                    group.prices.note((int(nbytes), int(itemsize)))
            settle_if_priced(group)

    def _compare(self, group: Group, view: View, trainee: Trainee) -> None:
        """Compare the hashes of the state after the transfer."""
        donors = _donors(view)[0]
        hashes = group.all_gather_text(trainee.state_hash())
        if len({*hashes} - {""}) > 1:
            text = (
                f"a newcomer's state differs from the group's after the transfer (hashes by rank: {', '.join(hashes)}),"
                " so it must not contribute. Build the same model and optimizer on every worker"
            )
            if hashes[group.rank] not in ("", hashes[0]) or len({hashes[rank] for rank in donors} - {""}) > 1:
                raise MismatchError(text)
            raise PeerLost(text)  # the newcomer raises MismatchError, and the other members reconnect without it


def _donors(view: View) -> list[Sequence[int]]:
    """The ranks that send each value of Trainee.hand_over."""
    members = range(len(view.stage().members))
    return [members, members[:1], members[:1]]
