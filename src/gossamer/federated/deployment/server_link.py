"""Server link: watches a device's connection to its server, says when it breaks and comes back, and gives up once."""

from __future__ import annotations

import threading
import time
from math import inf
from typing import Protocol

from gossamer.base.peer_ops import Await, Elapsed, PeerEvent, PeerJoined, PeerLeft
from gossamer.base.units import seconds_text
from gossamer.errors import GossamerError, PeerLost
from gossamer.federated.deployment.round_report import Line

FIRST_WORD_SECONDS = 5.0  # without a connection at first, before that is said


class ClosableEndpoint(Protocol):
    """What the watch needs of an endpoint."""

    def answer(self, op: Await) -> PeerEvent: ...

    def close(self, why: GossamerError | None = None) -> None: ...


class ServerLink:
    """A thread that takes the events of a device's endpoint."""

    def __init__(self, endpoint: ClosableEndpoint, name: str, say: Line, give_up_seconds: float) -> None:
        """name: of the server, as the user wrote it."""
        self._endpoint, self._name, self._say, self._give_up = endpoint, name, say, give_up_seconds
        threading.Thread(target=self._watch, name="gossamer link", daemon=True).start()

    def _watch(self) -> None:
        lost_at, said = time.monotonic(), False
        try:
            while True:
                due = lost_at + (self._give_up if said else min(FIRST_WORD_SECONDS, self._give_up))
                match self._endpoint.answer(Await(until=due)):
                    case PeerJoined():
                        if said:
                            self._say(f"connected to {self._name}")
                        lost_at, said = inf, False
                    case PeerLeft(moment=moment):
                        lost_at = moment
                    case Elapsed(moment=moment) if moment >= lost_at + self._give_up:
                        self._endpoint.close(self._gave_up())
                        return
                    case Elapsed():
                        said = True
                        self._say(f"{self._name} does not answer; trying again until it does")
        except GossamerError:  # the endpoint was closed
            return

    def _gave_up(self) -> PeerLost:
        return PeerLost(
            f"{self._name} did not answer for {seconds_text(self._give_up)}, so this device has left. Start it again "
            "once the server is there: with --state it goes on from where it was"
        )
