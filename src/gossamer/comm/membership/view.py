"""View: a numbered set of workers that train together, with their ranks and listening addresses."""

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
    """One process of a worker."""

    number: int  # random, 63 bits: a restarted process is a new member
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class View:
    """A set of members that is active until the view with the next higher number."""

    number: int
    members: tuple[Member, ...]  # by rank: members of the previous view in their order, then newcomers
    newcomers: frozenset[int]  # numbers of members without state; empty in the first view
    secret: bytes  # drawn for each view

    @property
    def world(self) -> int:
        return len(self.members)

    def rank_of(self, number: int) -> int:
        """Return the rank of a member. Raises KeyError if it is not in this view."""
        for rank, member in enumerate(self.members):
            if member.number == number:
                return rank
        raise KeyError(number)

    def holds(self, number: int) -> bool:
        return any(member.number == number for member in self.members)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of all members, by rank."""
        return tuple(member.number for member in self.members)

    def stage(self, *, whole: bool = False) -> View:
        """Return one of the two stages of a view as a view of its own.

        The first stage (whole=False) has the members with state, which may have to finish a transaction. The second
        (whole=True) has all members.
        """
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
        """Parse the result of `text`. Raises MalformedError for anything else."""
        if len(text) > MOST_TEXT_BYTES:
            raise MalformedError(f"a view of {len(text)} bytes exceeds the limit of {MOST_TEXT_BYTES}")
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
            raise MalformedError(f"invalid view of an elastic run ({type(error).__name__}: {error})") from None
        _check(view)
        return view


def _check(view: View) -> None:
    numbers: Collection[int] = {member.number for member in view.members}
    if not 0 < view.world <= MOST_MEMBERS or len(numbers) != view.world:
        raise MalformedError(f"invalid view: {view.world} members, of which {len(numbers)} are distinct")
    if not view.newcomers <= set(numbers) or len(view.secret) != SECRET_BYTES:
        raise MalformedError("invalid view: a newcomer is not a member, or the secret has the wrong length")


def _whole(value: object, below: int = 2**63) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r:.40} is not an integer from 0 to {below - 1}")
    return value


def _word(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 255:
        raise ValueError(f"{value!r:.40} is not a string of 1 to 255 characters")
    return value
