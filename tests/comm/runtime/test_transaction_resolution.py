"""Resolution of a broken transaction: literal tables, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gossamer.comm.runtime.transaction import Resolution, resolve
from gossamer.errors import MismatchError


@pytest.mark.parametrize(
    ("completed", "continues_from", "donors"),
    [
        ({7: 3}, 3, {}),
        ({7: 3, 8: 3, 2: 3}, 3, {}),
        ({7: 4, 8: 3}, 4, {8: 7}),
        ({9: 4, 1: 3, 5: 4, 3: 3, 2: 3}, 4, {1: 5, 2: 9, 3: 5}),
        ({0: 0, 1: 1}, 1, {0: 1}),
    ],
)
def test_how_survivors_continue(completed: Mapping[int, int], continues_from: int, donors: Mapping[int, int]) -> None:
    found = resolve(completed)
    assert found == Resolution(completed=continues_from, donors=donors)
    assert found.again is (not donors)


def test_the_order_in_which_counts_are_heard_does_not_matter() -> None:
    assert resolve({1: 2, 2: 3, 3: 3, 4: 2}) == resolve({4: 2, 3: 3, 2: 3, 1: 2})


def test_more_than_one_apart_is_refused_by_name() -> None:
    with pytest.raises(MismatchError, match="members 4, 6 completed 3 exchanges and member 5 5"):
        resolve({4: 3, 5: 5, 6: 3})


def test_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="no survivors"):
        resolve({})
