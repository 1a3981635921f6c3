"""Reads a run's files again and again until it is killed: python collecting.py FOLDER. Says when a look is over."""

from __future__ import annotations

import sys
from pathlib import Path

from gossamer.observe.telemetry import Ingest


def main(folder: str) -> None:
    ingest = Ingest(Path(folder))
    while True:
        begun = sys.stdin.readline()  # how many lines are written by now
        ingest.look()
        print(begun, end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
