"""One worker of `gossamer run`: the launcher's shim, with a recorder listening."""

from __future__ import annotations

import os
from pathlib import Path

from gossamer import events
from gossamer.launch import worker
from gossamer.launch.files import RUN_DIRECTORY
from gossamer.observe.recorder import Recorder
from gossamer.observe.target import Watch, read_target
from gossamer.session import open_sessions

UNTIL, SECONDS = "GOSSAMER_UNTIL", "GOSSAMER_SECONDS"


def main() -> None:
    first_here = os.environ["LOCAL_RANK"] == "0"
    recorder = Recorder(Path(os.environ[RUN_DIRECTORY]), int(os.environ["RANK"]), steps_live=first_here)
    events.subscribe(recorder)
    _watch_for_the_end(int(os.environ["RANK"]))
    worker.main(finish=recorder.write)


def _watch_for_the_end(rank: int) -> None:
    """One rank asks all to stop where a target is reached or time is up."""
    target, seconds = os.environ.get(UNTIL), os.environ.get(SECONDS)
    if rank == 0 and (target or seconds):
        events.subscribe(
            Watch(read_target(target) if target else None, float(seconds) if seconds else None, _ask_to_stop)
        )


def _ask_to_stop() -> None:
    for session in open_sessions():
        session.ask_to_stop()


if __name__ == "__main__":
    main()
