"""Elastic transport without a next view: the error of the wait is final, so the wait is not made twice."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.comm.elastic.transport import ElasticTransport
from gossamer.comm.membership.view import Member, View
from gossamer.errors import ConnectError, CoordinatorLost, PeerLost

VIEW = View(number=1, members=(Member(number=7, host="h", port=1),), newcomers=frozenset(), secret=bytes(32))


class Unanswered:
    """The membership of a worker whose run has no next view."""

    number = 7

    def __init__(self, error: Exception) -> None:
        self.waits, self._error = 0, error

    def view_after(self, number: int, seconds: float) -> View:
        self.waits += 1
        raise self._error

    def broken(self, *_: Any, **__: Any) -> None: ...


class Alone:
    """A group of one."""

    rank, world, links = 0, 1, ""

    def close(self) -> None: ...


@pytest.mark.parametrize("error", [PeerLost, ConnectError, CoordinatorLost])
def test_a_wait_for_the_next_view_that_ends_with_an_error_is_not_repeated(error: type[Exception]) -> None:
    membership = Unanswered(error("no view came"))
    transport = ElasticTransport(membership, lambda view: Alone(), VIEW, 1.0)  # type: ignore
    transport.enter(admits=True)
    transport.complete()
    transport.view_over(1)
    with pytest.raises(error, match="no view came"):
        transport.enter(admits=True)
    assert membership.waits == 1
