"""A coordinator in a process of its own, which says where it listens and what happens.

python elastic_coordinator.py JOURNAL INITIAL DEAD_AFTER_SECONDS PORT
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from support.elastic_members import TOKEN

from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.membership.next_view import CoordinatorOptions


def main(journal: str, initial: str, dead_after_seconds: str, port: str) -> None:
    server = CoordinatorServer(
        CoordinatorOptions(least=1, most=8, initial=int(initial), dead_after_seconds=float(dead_after_seconds)),
        token=TOKEN,
        address="127.0.0.1",
        port=int(port),
        journal=Path(journal),
        note=lambda text: print("note", text, flush=True),
    )
    print("address", f"{server.address[0]}:{server.address[1]}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
