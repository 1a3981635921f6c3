"""A worker process of an elastic run that trains nothing: it says in which views it is, until it is out.

python elastic_worker.py HOST:PORT PLACE DEAD_AFTER_SECONDS
"""

from __future__ import annotations

import signal
import sys
import time

from support.elastic_members import LIKE, TOKEN

from gossamer.comm.elastic.agent import MembershipAgent, read_address
from gossamer.errors import PeerLost


def main(where: str, place: str, dead_after_seconds: str) -> None:
    agent = MembershipAgent(read_address(where), TOKEN, place=int(place), dead_after_seconds=float(dead_after_seconds))
    agent.here(("127.0.0.1", 1000 + int(place)))
    if agent.formed:
        agent.ready(LIKE)
    number = 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for whom it starts in background
    try:
        while True:
            view = agent.view_after(number, 60)
            number = view.number
            if agent.number in view.newcomers:
                agent.caught_up()
            else:
                agent.attached(LIKE)
            print("view", number, view.world, time.time(), flush=True)
    except PeerLost as lost:
        print("out", lost, flush=True)
    except KeyboardInterrupt:
        print("interrupted", time.time(), flush=True)
    agent.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
