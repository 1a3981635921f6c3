"""Server script: hands events to the rounds until the federation has ended and nobody waits any more."""

from __future__ import annotations

from math import inf

from gossamer.base.peer_ops import Await, PeerEvent, PeerScript
from gossamer.federated.server.rounds import Rounds


def serve(rounds: Rounds) -> PeerScript:
    """Serve for ever: also after the last round, devices may come and ask whether there is something to do."""
    event: PeerEvent = yield Await(until=-inf)
    rounds.begin(event.moment)
    while True:
        yield from rounds.react(event)
        due = rounds.due
        event = yield Await(until=due if due < inf else None)
