"""One worker of `gossamer run`: the launcher's shim, with a recorder listening."""

from __future__ import annotations

import os
from pathlib import Path

from gossamer import events
from gossamer.launch import worker
from gossamer.launch.files import RUN_DIRECTORY
from gossamer.observe.recorder import Recorder


def main() -> None:
    first_here = os.environ["LOCAL_RANK"] == "0"
    recorder = Recorder(Path(os.environ[RUN_DIRECTORY]), int(os.environ["RANK"]), steps_live=first_here)
    events.subscribe(recorder)
    worker.main(finish=recorder.write)


if __name__ == "__main__":
    main()
