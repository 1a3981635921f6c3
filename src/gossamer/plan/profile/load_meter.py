"""Load meter: use of this machine's cores while steps are timed, from the kernel's counters.

It needs Linux with /proc: on other systems the load is unknown, and estimates are not corrected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from gossamer.base import system
from gossamer.plan.estimate.workload_profile import OtherLoad

PROC = Path("/proc")
IDLE, WAITS_FOR_DISK, STOLEN = 3, 4, 7  # columns of /proc/stat's first line: proc_stat(5)
COUNTED = 8  # the later columns are parts of the earlier ones
LEAST_SECONDS = 0.3  # minimum interval, since counters count hundredths
PARENT, USER, WAITED_CHILDREN = 1, 11, 4  # columns of /proc/PID/stat after the name, and the number of time columns


class Counters(NamedTuple):
    """Seconds since the machine started."""

    now: float
    busy: float  # all cores, all processes
    stolen: float
    own: float  # of a process and its descendants
    running: float  # of the training thread
    ready: float


@dataclass
class LoadMeter:
    """Measures the load between two times. family: process with the profiled descendants, including this process."""

    family: int
    proc: Path = PROC
    begun: Counters | None = None

    def start(self) -> None:
        self.begun = self._read()

    def stop(self) -> OtherLoad:
        """Load since `start`; all 0 if the kernel does not report it, or the interval is too short."""
        begun, ended = self.begun, self._read()
        if begun is None or ended is None or ended.now < begun.now + LEAST_SECONDS:
            return OtherLoad()
        passed = ended.now - begun.now
        busy, stolen, own, running, ready = (
            max(0.0, after - before) / passed for before, after in zip(begun[1:], ended[1:], strict=True)
        )
        return OtherLoad(
            cores=float(os.cpu_count() or 1),
            own=own,
            other=max(0.0, busy - own),
            stolen=stolen,
            running=running,
            ready=ready,
        )

    def _read(self) -> Counters | None:
        try:
            ticks = [
                int(each) for each in (self.proc / "stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
            ][:COUNTED]
            running, ready, *_ = map(int, (self.proc / "self" / "schedstat").read_text(encoding="utf-8").split())
            own = family_ticks(self.proc, self.family)
            second = system.clock_ticks_per_second()
            busy = sum(ticks) - ticks[IDLE] - ticks[WAITS_FOR_DISK] - ticks[STOLEN]
            return Counters(
                time.monotonic(), busy / second, ticks[STOLEN] / second, own / second, running / 1e9, ready / 1e9
            )
        except (OSError, ValueError, IndexError):
            return None


def family_ticks(proc: Path, ancestor: int) -> int:
    """Clock ticks of a process and its descendants, including ended children."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(folder.name)] = int(stat[PARENT])
            ticks[int(folder.name)] = sum(map(int, stat[USER : USER + WAITED_CHILDREN]))
    return sum(count for process, count in ticks.items() if _descends(process, ancestor, parents))


def _descends(process: int, ancestor: int, parents: dict[int, int]) -> bool:
    while process != ancestor and process in parents:
        process = parents[process]
    return process == ancestor


def mean_load(found: Sequence[OtherLoad]) -> OtherLoad:
    """Mean of each number over copies."""
    return OtherLoad(**{each.name: fmean(getattr(load, each.name) for load in found) for each in fields(OtherLoad)})
