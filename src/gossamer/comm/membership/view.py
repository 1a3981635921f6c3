"""View: a numbered set of workers that train together, with their ranks and listening addresses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gossamer.base.host_port import Address
from gossamer.base.json_text import read_json
from gossamer.errors import MalformedError

SECRET_BYTES = 32
MOST_MEMBERS = 2**16
MOST_OTHERS = 4
MOST_RELAYS = 8
MOST_TEXT_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a worker."""

    number: int  # random, 63 bits: a restarted process is a new member
    host: str
    port: int
    others: tuple[Address, ...] = ()  # further addresses: IPv6, and the one that a router has given to it

    @property
    def addresses(self) -> tuple[Address, ...]:
        return ((self.host, self.port), *self.others)

    def record(self) -> list[Any]:
        """As JSON."""
        return [self.number, self.host, self.port, *self.others]

    @classmethod
    def of(cls, record: Sequence[Any]) -> Member:
        """Read the result of `record`. Raises TypeError and ValueError."""
        number, host, port, *others = record
        if len(others) > MOST_OTHERS:
            raise ValueError(f"a member with {len(others)} further addresses")
        return cls(
            number=_whole(number),
            host=_word(host),
            port=_whole(port, 2**16),
            others=tuple((_word(host), _whole(port, 2**16)) for host, port in others),
        )


@dataclass(frozen=True, kw_only=True)
class RelayAddress:
    """Where a relay other than the coordinator listens. number: of its peer, with which its handshake begins."""

    host: str
    port: int
    number: int

    @classmethod
    def of(cls, record: Sequence[Any]) -> RelayAddress:
        """Read a list of its fields. Raises TypeError and ValueError."""
        host, port, number = record
        return cls(host=_word(host), port=_whole(port, 2**16), number=_whole(number))


@dataclass(frozen=True, kw_only=True)
class View:
    """A set of members that is active until the view with the next higher number."""

    number: int
    members: tuple[Member, ...]  # by rank: members of the previous view in their order, then newcomers
    newcomers: frozenset[int]  # numbers of members without state; empty in the first view
    secret: bytes  # drawn for each view
    relays: tuple[RelayAddress, ...] = ()  # relays other than the coordinator, when this view was sent

    @property
    def world(self) -> int:
        return len(self.members)

    def rank_of(self, number: int) -> int:
        """Return the rank of a member. Raises KeyError if it is not in this view."""
        return self._ranks[number]

    def holds(self, number: int) -> bool:
        return number in self._ranks

    @cached_property
    def _ranks(self) -> Mapping[int, int]:
        return {member.number: rank for rank, member in enumerate(self.members)}

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
        record = {
            "number": self.number,
            "members": [each.record() for each in self.members],
            "newcomers": sorted(self.newcomers),
            "secret": self.secret.hex(),
        }
        return json.dumps(record | self._relay_record())

    def _relay_record(self) -> dict[str, Any]:
        return {"relays": [[each.host, each.port, each.number] for each in self.relays]} if self.relays else {}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the number, the members and the newcomers."""
        record = [self.number, [each.record() for each in self.members], sorted(self.newcomers)]
        return hashlib.sha256(json.dumps(record).encode()).hexdigest()

    def change_text(self, base: View) -> str:
        """The difference to an earlier view, as JSON: its size depends on the changes, not on the number of members.

        Empty if the members that stay have another order than in `base`.
        """
        before = {member.number: member for member in base.members}
        stayed = [member for member in self.members if member.number in before]
        added = self.members[len(stayed) :]
        if [each.number for each in stayed] != [number for number in base.numbers if self.holds(number)]:
            return ""
        if any(each.number in before for each in added):
            return ""
        record = {
            "number": self.number,
            "base": base.number,
            "removed": [number for number in base.numbers if not self.holds(number)],
            "replaced": [each.record() for each in stayed if each != before[each.number]],
            "added": [each.record() for each in added],
            "newcomers": sorted(self.newcomers),
            "secret": self.secret.hex(),
            "digest": self.digest,
        }
        return json.dumps(record | self._relay_record())

    def changed(self, text: str) -> View:
        """Apply the result of `change_text` to its base. Raises MalformedError if the result has another digest."""
        if len(text) > MOST_TEXT_BYTES:
            raise MalformedError(f"a change of a view of {len(text)} bytes exceeds the limit of {MOST_TEXT_BYTES}")
        try:
            read = read_json(text)
            if read["base"] != self.number:
                raise ValueError(f"it changes view {read['base']!r:.40}, and the last view here is {self.number}")
            removed = frozenset(_whole(number) for number in read["removed"])
            replaced = {member.number: member for member in map(Member.of, read["replaced"])}
            stayed = (each for each in self.members if each.number not in removed)
            view = View(
                number=_whole(read["number"]),
                members=(*(replaced.get(each.number, each) for each in stayed), *map(Member.of, read["added"])),
                newcomers=frozenset(_whole(number) for number in read["newcomers"]),
                secret=bytes.fromhex(_word(read["secret"])),
                relays=tuple(map(RelayAddress.of, read.get("relays", ()))),
            )
            if view.digest != read["digest"]:
                raise ValueError("the resulting members differ from the coordinator's")
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedError(f"invalid change of a view ({type(error).__name__}: {error})") from None
        _check(view)
        return view

    @classmethod
    def of(cls, text: str) -> View:
        """Parse the result of `text`. Raises MalformedError for anything else."""
        if len(text) > MOST_TEXT_BYTES:
            raise MalformedError(f"a view of {len(text)} bytes exceeds the limit of {MOST_TEXT_BYTES}")
        try:
            read = read_json(text)
            members = tuple(map(Member.of, read["members"]))
            newcomers = frozenset(_whole(number) for number in read["newcomers"])
            view = cls(
                number=_whole(read["number"]),
                members=members,
                newcomers=newcomers,
                secret=bytes.fromhex(_word(read["secret"])),
                relays=tuple(map(RelayAddress.of, read.get("relays", ()))),
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
