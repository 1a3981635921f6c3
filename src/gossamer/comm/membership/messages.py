"""Messages: carry a worker's reports to its coordinator, and the news back.

    worker -> coordinator   Push HERE, READY, ATTACHED, HERE_AGAIN   a WorkerReport; answered by Standing
                            Push BROKEN                              a BrokenReport
                            Push LEAVES, RESIZE
                            Pull NEWS/number, known=version          answered once there is news beyond that version
                            Pull STATUS/number                       answered at once: what the worker waits for

The news of view v has version 2 v while it holds, and 2 v + 1 once it is over: a Pull that knows the latter says that
its worker has closed that view's connections, and thereby that it lives. Versions ascend over the coordinator's
restarts, as the numbers of views do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from gossamer.base.json_text import read_json
from gossamer.base.peer_ops import SERVER, Peer
from gossamer.comm.membership.view import Member, View
from gossamer.errors import MalformedError

COORDINATOR = Peer(SERVER, 0)
# Keys of pushes
HERE, READY, ATTACHED, HERE_AGAIN = "here", "ready", "attached", "here again"
RESIZED = "the run was resized"  # of reasons for which a worker is out: it has done nothing wrong
ALL_LEFT = "all workers that had the parameters have left"
BROKEN, LEAVES, RESIZE = "broken", "leaves", "resize"
NEWS, STATUS = "news", "status"  # keys of pulls, followed by a slash and the worker's number
OUT_VERSION = 2**62  # of the last news that a worker hears

MOST_FINGERPRINT_CHARACTERS = 2**16
MOST_WHY_CHARACTERS = 2000
MOST_RUN_CHARACTERS = 64


def version_of(view: int, over: bool) -> int:
    """The version of the news that a view holds, or is over."""
    return 2 * view + over


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """All that a coordinator must know of a worker: one that was restarted asks for it again."""

    number: int
    host: str  # where its view listener is
    port: int
    place: int  # the rank that it would like in the first view; -1 where it does not care
    view: int = 0  # the newest view that it was told of; 0 for none
    ready: bool = False  # as a newcomer
    has_state: bool = False  # parameters and all that belongs to them, as the others have them
    fingerprint: str = ""  # a JSON object; empty before attach
    run: str = ""  # the identity of its run; empty until a coordinator has told it

    @property
    def member(self) -> Member:
        return Member(number=self.number, host=self.host, port=self.port)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> WorkerReport:
        """Read what `text` wrote. Raises MalformedError for anything else."""
        report = _read(cls, text)
        if not (0 <= report.number < 2**63 and 0 < len(report.host) <= 255 and 0 <= report.port < 2**16):
            raise MalformedError("a worker's report has a number, a host or a port that none can have")
        if len(report.run) > MOST_RUN_CHARACTERS:
            raise MalformedError("a worker's report has an identity of a run that is too long")
        if not 0 <= report.view < 2**60 or len(report.fingerprint) > MOST_FINGERPRINT_CHARACTERS:
            raise MalformedError("a worker's report names no view that can be, or has too long a fingerprint")
        return report


@dataclass(frozen=True, kw_only=True)
class BrokenReport:
    """A member could not go on in a view."""

    view: int
    suspects: list[int]  # numbers of members that it did not reach, or that did not finish
    why: str
    went_on: bool = False  # whether anything was completed in this view before

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> BrokenReport:
        """Read what `text` wrote. Raises MalformedError for anything else."""
        report = _read(cls, text)
        if not all(type(each) is int for each in report.suspects) or len(report.why) > MOST_WHY_CHARACTERS:
            raise MalformedError("a report of a broken view suspects something that is no number, or is too long")
        return report


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The answer to a worker's report."""

    formed: bool = False  # training has begun without it
    size: int = 0  # members of the newest view
    began: int = 0  # members of the first view; 0 where that is not known
    most: int = 0  # workers that it may have
    refused: str = ""  # why it cannot be taken in
    run: str = ""  # the identity of the coordinator's run

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Standing:
        return _read(cls, text)


@dataclass(frozen=True, kw_only=True)
class News:
    """What a worker hears when it waits for news; one of these at a time."""

    view: str = ""  # the text of a new one that it belongs to
    over: int = 0  # the number of the view that does not hold any more
    out: str = ""  # why it belongs to the run no more
    again: bool = False  # the coordinator does not know it: it is to report again

    def text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value})

    @classmethod
    def of(cls, text: str) -> News:
        return _read(cls, text)

    def read_view(self) -> View:
        return View.of(self.view)


T = TypeVar("T", WorkerReport, BrokenReport, Standing, News)


def _read(kind: type[T], text: str) -> T:
    try:
        read: Mapping[str, Any] = read_json(text)
        for each in fields(kind):
            if each.name in read and type(read[each.name]).__name__ != str(each.type).partition("[")[0]:
                raise TypeError(f"{each.name} is no {each.type}")
        return kind(**read)
    except (TypeError, ValueError) as error:
        raise MalformedError(f"this is no {kind.__name__} ({type(error).__name__}: {error!s:.200})") from None
