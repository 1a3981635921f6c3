"""View: lists the workers that train together under a number, with their ranks and where each of them listens."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace

from gossamer.base.json_text import read_json
from gossamer.errors import MalformedError

SECRET_BYTES = 32
MOST_MEMBERS = 2**16
MOST_TEXT_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Member:
    """One start of a worker's process."""

    number: int  # random, of 63 bits: a process that is started again is another member
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class View:
    """A set of members that holds until the next one, of a higher number."""

    number: int
    members: tuple[Member, ...]  # by rank: those of the view before in their order, then newcomers
    newcomers: frozenset[int]  # numbers of members that have no state yet; none in the first view
    secret: bytes  # fresh in every view

    @property
    def world(self) -> int:
        return len(self.members)

    def rank_of(self, number: int) -> int:
        """The rank of a member. Raises KeyError where it is none."""
        for rank, member in enumerate(self.members):
            if member.number == number:
                return rank
        raise KeyError(number)

    def holds(self, number: int) -> bool:
        return any(member.number == number for member in self.members)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of all members, by rank."""
        return tuple(member.number for member in self.members)

    def stage(self, *, whole: bool = False) -> View:
        """As a view of its own: the members that connect first, who have a state and may have something to finish; or,
        after them, the whole view."""
        if whole:
            return replace(self, number=2 * self.number + 1)
        old = tuple(member for member in self.members if member.number not in self.newcomers)
        return replace(self, number=2 * self.number, members=old, newcomers=frozenset())

    def text(self) -> str:
        """As JSON."""
        return json.dumps(
            {
                "number": self.number,
                "members": [[each.number, each.host, each.port] for each in self.members],
                "newcomers": sorted(self.newcomers),
                "secret": self.secret.hex(),
            }
        )

    @classmethod
    def of(cls, text: str) -> View:
        """Read what `text` wrote. Raises MalformedError for anything else."""
        if len(text) > MOST_TEXT_BYTES:
            raise MalformedError(f"a view of {len(text)} bytes is longer than any run's")
        try:
            read = read_json(text)
            members = tuple(
                Member(number=_whole(number), host=_word(host), port=_whole(port, 2**16))
                for number, host, port in read["members"]
            )
            newcomers = frozenset(_whole(number) for number in read["newcomers"])
            view = cls(
                number=_whole(read["number"]),
                members=members,
                newcomers=newcomers,
                secret=bytes.fromhex(_word(read["secret"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedError(f"this is no view of an elastic run ({type(error).__name__}: {error})") from None
        _check(view)
        return view


def _check(view: View) -> None:
    numbers: Collection[int] = {member.number for member in view.members}
    if not 0 < view.world <= MOST_MEMBERS or len(numbers) != view.world:
        raise MalformedError(f"a view of {view.world} members, {len(numbers)} of them different, is none")
    if not view.newcomers <= set(numbers) or len(view.secret) != SECRET_BYTES:
        raise MalformedError("a view names newcomers that are no members, or has no secret of its own")


def _whole(value: object, below: int = 2**63) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r:.40} is no whole number from 0 to {below - 1}")
    return value


def _word(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 255:
        raise ValueError(f"{value!r:.40} is no text of 1 to 255 characters")
    return value
