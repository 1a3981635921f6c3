"""Reachability: dials all other ranks at once, so that a blocked network shows as an error and not as a hang later."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice

DIAL_SECONDS = 10.0  # in which a first packet that was lost is sent again three times
MOST_AT_ONCE = 256  # connections under way, each of which takes a descriptor

Address = tuple[str, int]


@contextmanager
def listening(address: str | None, callers: int) -> Iterator[int]:
    """The port at which this process can be dialed by so many; 0 where its address is not known."""
    with socket.socket() as listener:
        if address is not None:
            listener.bind((address, 0))
            listener.listen(callers)  # the kernel completes the handshake without accept
        yield listener.getsockname()[1] if address else 0


def unreachable(places: Mapping[int, Address], seconds: float = DIAL_SECONDS) -> dict[int, str]:
    """Dial all places; the problems, by rank, of those that do not answer within `seconds`."""
    problems: dict[int, str] = {}
    waiting = iter(places.items())
    while some := dict(islice(waiting, MOST_AT_ONCE)):
        problems |= _dial_all(some, seconds)
    return problems


def _dial_all(places: Mapping[int, Address], seconds: float) -> dict[int, str]:
    outcomes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    with ExitStack() as links, selectors.DefaultSelector() as selector:
        for rank, place in places.items():
            link = links.enter_context(socket.socket())
            link.setblocking(False)
            if (outcome := link.connect_ex(place)) == errno.EINPROGRESS:
                selector.register(link, selectors.EVENT_WRITE, rank)
            else:
                outcomes[rank] = outcome
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                outcomes[key.data] = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
    found = {rank: outcomes.get(rank, errno.ETIMEDOUT) for rank in places}
    return {rank: os.strerror(outcome) for rank, outcome in found.items() if outcome}
