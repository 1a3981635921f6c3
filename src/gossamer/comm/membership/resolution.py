"""Resolution: decides which survivors finish a broken transaction, with whose answers, or that all make it again.

A transaction ends with an operation that hears of everybody, so nobody completes one before all have begun it: when a
view breaks, its members have completed equally many, or some one more than the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.errors import MismatchError


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """How the survivors of a view go on."""

    completed: int  # transactions that all of them have completed once this is done, and continue from
    donors: Mapping[int, int]  # who finishes the broken one from whose answers; empty where all make it again

    @property
    def again(self) -> bool:
        """Whether nobody has completed the transaction that broke, if any: who was inside makes it again."""
        return not self.donors


def resolve(completed: Mapping[int, int]) -> Resolution:
    """What the survivors do, each by the same rule. completed: transactions by survivor, newcomers left out.

    Those behind are dealt out in turns to those ahead, both in ascending order. Raises MismatchError where they differ
    by more than one, and ValueError where there is nobody.
    """
    if not completed:
        raise ValueError("nobody is left, so there is nothing to go on from: give the survivors' counts")
    least, most = min(completed.values()), max(completed.values())
    if most - least > 1:
        behind, ahead = (sorted(each for each, count in completed.items() if count == end) for end in (least, most))
        raise MismatchError(
            f"after the change of members, {_named(behind)} completed {least} exchanges and {_named(ahead)} {most}. "
            "They can differ by one, so somebody counts wrongly, and going on would mix two runs. Start again from "
            "the last checkpoint."
        )
    ahead = sorted(each for each, count in completed.items() if count > least)
    behind = sorted(each for each, count in completed.items() if count == least) if ahead else []
    return Resolution(completed=most, donors={each: ahead[turn % len(ahead)] for turn, each in enumerate(behind)})


def _named(members: list[int]) -> str:
    return f"member{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"
