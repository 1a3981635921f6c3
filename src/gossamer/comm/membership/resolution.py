"""Resolution: decides how the survivors of a broken view continue.

A transaction ends with an operation that depends on every rank, so no rank completes a transaction before all ranks
have begun it. When a view breaks, the numbers of completed transactions therefore differ by at most one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.errors import MismatchError


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """How the survivors of a view continue."""

    completed: int  # transactions that every survivor has completed afterwards
    donors: Mapping[int, int]  # donor of each survivor that is one behind; empty if all repeat the transaction

    @property
    def again(self) -> bool:
        """Whether no survivor completed the transaction that broke, so that every participant repeats it."""
        return not self.donors


def resolve(completed: Mapping[int, int]) -> Resolution:
    """Assign a donor to each survivor that is one transaction behind. Every survivor computes the same result.

    Survivors that are behind are assigned round-robin to those that are ahead, both in ascending order.

    Args:
        completed: Number of completed transactions of each survivor, without newcomers.

    Raises:
        MismatchError: The counts differ by more than one.
        ValueError: `completed` is empty.
    """
    if not completed:
        raise ValueError("there are no survivors to continue from: pass the survivors' counts")
    least, most = min(completed.values()), max(completed.values())
    if most - least > 1:
        behind, ahead = (sorted(each for each, count in completed.items() if count == end) for end in (least, most))
        raise MismatchError(
            f"after the change of members, {_named(behind)} completed {least} exchanges and {_named(ahead)} {most}. "
            "The counts may differ by at most one, so a count is wrong, and continuing would mix two states. Restart "
            "from the last checkpoint."
        )
    ahead = sorted(each for each, count in completed.items() if count > least)
    behind = sorted(each for each, count in completed.items() if count == least) if ahead else []
    return Resolution(completed=most, donors={each: ahead[turn % len(ahead)] for turn, each in enumerate(behind)})


def _named(members: list[int]) -> str:
    return f"member{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"
