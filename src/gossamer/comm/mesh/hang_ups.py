"""Hang-ups: which peers have ended their connections, whatever they have sent before that nobody has read."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

# Linux tells of an end behind what is unread. Elsewhere it is seen where all is ended, both ways
_ENDED = getattr(select, "POLLRDHUP", 0)
_SEEN = _ENDED | getattr(select, "POLLHUP", 0) | getattr(select, "POLLERR", 0)


def hung_up(connections: Sequence[socket.socket | None]) -> list[int]:
    """Ranks. Nothing is taken from their connections, and nobody is waited for."""
    if not hasattr(select, "poll"):
        return []
    ranks = {each.fileno(): rank for rank, each in enumerate(connections) if each is not None}
    asked = select.poll()
    for number in ranks:
        asked.register(number, _ENDED)
    return sorted(ranks[number] for number, told in asked.poll(0) if told & _SEEN)
