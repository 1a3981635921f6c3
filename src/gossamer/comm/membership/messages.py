"""Messages between a worker and its coordinator.

    worker -> coordinator   Push HERE, READY, ATTACHED, HERE_AGAIN   a WorkerReport; answered by Standing
                            Push BROKEN                              a BrokenReport
                            Push LEAVES, RESIZE
    relay -> coordinator    Push RELAYS                              its addresses; answered only if it is refused,
                                                                     so that it is repeated after a lost connection
                            Pull NEWS/number[/view], known=version   answered when there is news beyond that version;
                                                                     view: the newest one that the worker has, so that
                                                                     the next one can be sent as a difference to it
                            Pull STATUS/number                       answered at once: why the worker waits
    launcher -> coordinator Pull IDENTITY                            answered at once: the identity of the run

The news of view v has version 2 v while the view is active and 2 v + 1 once it has ended. A Pull with known = 2 v + 1
confirms that the worker has closed the connections of view v, and so that it is alive. Versions, like view numbers,
keep increasing when the coordinator restarts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from gossamer.base.host_port import Address
from gossamer.base.json_text import read_json
from gossamer.base.peer_ops import SERVER, Peer
from gossamer.comm.membership.view import Member, View
from gossamer.errors import MalformedError

COORDINATOR = Peer(SERVER, 0)
# Keys of pushes
HERE, READY, ATTACHED, HERE_AGAIN = "here", "ready", "attached", "here again"
RESIZED = "the run was resized"  # prefix of the reason of an eviction for which the worker is not to blame
ALL_LEFT = "all workers that had the parameters have left"
BROKEN, LEAVES, RESIZE, RELAYS = "broken", "leaves", "resize", "relays"
RELAY_SERVER = "relaying"  # kind of a peer that relays connections of workers
NEWS, STATUS = "news", "status"  # keys of pulls, followed by a slash and the worker's number
IDENTITY = "identity"  # key of a pull
OUT_VERSION = 2**62  # version of the last news that a worker receives

MOST_FINGERPRINT_CHARACTERS = 2**16
MOST_WHY_CHARACTERS = 2000
MOST_RUN_CHARACTERS = 64


def version_of(view: int, over: bool) -> int:
    """Version of the news that a view is active (over=False) or has ended (over=True)."""
    return 2 * view + over


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """Complete state of a worker, as a restarted coordinator needs it."""

    number: int
    host: str  # of its view listener
    port: int
    place: int  # requested rank in the first view; -1 for any
    view: int = 0  # newest view that it has received; 0 before the first
    ready: bool = False  # a newcomer that can be admitted
    has_state: bool = False  # it has the parameters and the rest of the replicated state
    fingerprint: str = ""  # a JSON object; empty before attach
    run: str = ""  # identity of its run; empty until the first answer of a coordinator
    others: list[Address] = field(default_factory=list)  # further addresses of its view listener

    @property
    def member(self) -> Member:
        return Member(number=self.number, host=self.host, port=self.port, others=tuple(self.others))

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> WorkerReport:
        """Parse the result of `text`. Raises MalformedError for anything else."""
        report = _read(cls, text)
        try:
            others = list(Member.of([report.number, report.host, report.port, *report.others]).others)
        except (TypeError, ValueError):
            raise MalformedError("a worker's report has an invalid number, host, port or address") from None
        report = replace(report, others=others)
        if len(report.run) > MOST_RUN_CHARACTERS:
            raise MalformedError("the run identity in a worker's report is too long")
        if not 0 <= report.view < 2**60 or len(report.fingerprint) > MOST_FINGERPRINT_CHARACTERS:
            raise MalformedError("a worker's report has an invalid view number, or its fingerprint is too long")
        return report


@dataclass(frozen=True, kw_only=True)
class BrokenReport:
    """Report of a member that cannot continue in a view."""

    view: int
    suspects: list[int]  # numbers of the members that it could not reach, or that did not finish
    why: str
    went_on: bool = False  # whether any transaction was completed in this view

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> BrokenReport:
        """Parse the result of `text`. Raises MalformedError for anything else."""
        report = _read(cls, text)
        if not all(type(each) is int for each in report.suspects) or len(report.why) > MOST_WHY_CHARACTERS:
            raise MalformedError("a report of a broken view has a suspect that is not an integer, or is too long")
        return report


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The answer to a worker's report."""

    formed: bool = False  # training has begun without this worker
    size: int = 0  # members of the newest view
    began: int = 0  # members of the first view; 0 if unknown
    least: int = 0  # minimum number of members
    most: int = 0  # maximum number of members
    refused: str = ""  # why the worker cannot be admitted
    relay: bool = False  # whether the coordinator relays connections between workers
    seal: bool = False  # whether connections between workers are sealed
    run: str = ""  # identity of the coordinator's run
    servers: str = ""  # addresses of the run's parameter servers, HOST:PORT,HOST:PORT; empty without them

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Standing:
        return _read(cls, text)


@dataclass(frozen=True, kw_only=True)
class News:
    """The answer to a worker's poll for news, with one field set."""

    view: str = ""  # text of a new view with this worker
    change: str = ""  # the same, as the difference to the view that the worker named in its poll
    over: int = 0  # number of a view that has ended
    out: str = ""  # why the worker is no longer a member of the run
    again: bool = False  # the coordinator has no record of the worker, which must report again

    def text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value})

    @classmethod
    def of(cls, text: str) -> News:
        return _read(cls, text)

    def read_view(self, base: View | None = None) -> View:
        """Return the new view. base: the one that the poll has named. Raises MalformedError."""
        if not self.change:
            return View.of(self.view)
        if base is None:
            raise MalformedError("a coordinator sent a change of a view to a worker that has none")
        return base.changed(self.change)


T = TypeVar("T", WorkerReport, BrokenReport, Standing, News)


def _read(kind: type[T], text: str) -> T:
    try:
        read: Mapping[str, Any] = read_json(text)
        for each in fields(kind):
            if each.name in read and type(read[each.name]).__name__ != str(each.type).partition("[")[0]:
                raise TypeError(f"{each.name} is not of type {each.type}")
        return kind(**read)
    except (TypeError, ValueError) as error:
        raise MalformedError(f"invalid {kind.__name__} message ({type(error).__name__}: {error!s:.200})") from None
