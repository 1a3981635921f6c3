"""Where workers ask, before a turn, who comes to it and with what weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gossamer.control import Presence, meet, refuse_to_save_apart
from gossamer.runtime.comm_thread import Lane
from gossamer.runtime.runner import Performed, perform
from gossamer.runtime.transport import Transport


class Desk:
    """Asks on the lane that carries the turns, or `apart` from it, over a group and a lane of its own.

    Apart, the question of a turn does not wait for the turns before it; every rank asks in the same order either way.
    """

    def __init__(self, transport: Transport, lane: Lane, *, apart: bool) -> None:
        self._lane = lane.beside() if apart else lane
        self._transport = transport.part(transport.world) if apart else transport
        self._apart = apart

    def ask(self, weight: float, passes: int, presence: Presence) -> Callable[[], Performed]:
        """What waits for the answer on the turns' lane, which is a Meeting. Raises LoopError there."""
        if not self._apart:
            return partial(self._meet, weight, passes, presence)
        return self._lane.submit(partial(self._meet, weight, passes, presence)).wait

    def hear(self, weight: float, passes: int, presence: Presence) -> Performed:
        """Ask, and wait for the answer in this thread."""
        return self._lane.submit(partial(self._meet, weight, passes, presence)).wait()

    def _meet(self, weight: float, passes: int, presence: Presence) -> Performed:
        met = perform(meet(weight, passes, presence), self._transport)
        refuse_to_save_apart(met.result)
        return met

    def close(self) -> None:
        if self._apart:
            self._lane.close()
