"""Bandwidth keeper: a launcher's limits for all of its processes: by the hour, per day, and changed while it runs.

The limits are in shared memory (comm/bandwidth), which GOSSAMER_BANDWIDTH names for this process and its workers. The
folder of logs has them as text in LIMITS_FILE, which `gossamer limit` overwrites.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date, datetime
from pathlib import Path

from gossamer.base import bounded_file, system
from gossamer.base.json_text import read_json
from gossamer.base.run_files import write_json
from gossamer.base.units import bytes_text, rate_text
from gossamer.comm.bandwidth.limits import MachineLimits
from gossamer.comm.bandwidth.shared_buckets import BANDWIDTH, DOWN, UP, Bandwidth
from gossamer.errors import GossamerError

LIMITS_FILE = "limits.json"
USAGE_SECONDS = 2.0  # between two reports of counted bytes to the user's other runs
STOP_SHARE = 0.98  # of the daily cap, at which workers stop: ending takes some bytes, too
STOPS = (
    "{used} of the daily cap of {cap} were transferred today, so this machine's workers stop. The cap begins again at "
    "midnight; for a higher one, write --daily-cap"
)
NOT_CHANGED = "the new bandwidth limits were not applied: {reason}"


class DailyUsage:
    """Bytes that all runs of this user transferred today on this machine, in a file.

    path: None for $XDG_STATE_HOME/gossamer/traffic.json, by default in ~/.local/state.
    """

    def __init__(self, path: Path | None = None) -> None:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self._path = path or Path(state, "gossamer", "traffic.json")
        self._day, self._known, self._unwritten = date.min, 0, 0

    def add(self, day: date, nbytes: int) -> int:
        """Add bytes to a day. Returns the total of that day; another day begins at 0.

        Bytes are written later if another run has the file locked. If it cannot be written, this run's bytes count.
        """
        if day != self._day:
            self._day, self._known, self._unwritten = day, 0, 0
        self._unwritten += nbytes
        with suppress(OSError):
            self._known, self._unwritten = self._write(), 0
        return self._known + self._unwritten

    def _write(self) -> int:
        """Add the unwritten bytes to the file, and return the total."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with system.open_file(self._path, os.O_RDWR | os.O_CREAT, 0o600) as file:
            system.lock_file(file.fileno())
            total = _of_day(file.read(1000), self._day) + self._unwritten
            file.seek(0)
            file.write(json.dumps({"day": self._day.isoformat(), "bytes": total}).encode().ljust(100))
            return total


def _of_day(content: bytes, day: date) -> int:
    try:
        found = json.loads(content)
        return int(found["bytes"]) if found["day"] == day.isoformat() else 0
    except (ValueError, KeyError, TypeError):
        return 0  # a new or damaged file


class BandwidthKeeper:
    """Sets the limits of the present minute. Call `tick` often.

    Args:
        limits: of this machine.
        bandwidth: the shared buckets.
        logs: folder of logs, for changes by `gossamer limit`.
        note: shows a message.
        stop: stops this launcher's workers, once the daily cap is reached.
        usage: bytes of this day.
        now: local time.
    """

    def __init__(
        self,
        limits: MachineLimits,
        bandwidth: Bandwidth,
        logs: Path,
        note: Callable[[str], None],
        stop: Callable[[], None],
        usage: DailyUsage | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.limits, self._bandwidth, self._file = limits, bandwidth, logs / LIMITS_FILE
        self._note, self._stop, self._usage, self._now = note, stop, usage or DailyUsage(), now
        self._rates: dict[int, float | None] = {}
        self._reported, self._reported_at, self._used = 0, datetime.min, 0
        self._stop_day = date.min  # for which workers were stopped
        write_limits(logs, limits)
        self._changed_at = self._change_time()
        self._apply(first=True)

    def tick(self) -> bool:
        """Apply the limits of this minute, the cap of this day, and changes by `gossamer limit`.

        Returns whether `limits` has changed.
        """
        before, changed_at = self.limits, self._change_time()
        if changed_at != self._changed_at:
            self._changed_at = changed_at
            self._read_change()
        self._apply()
        return self.limits != before

    def close(self) -> None:
        """Report the last counted bytes, and remove the text of the limits."""
        self._report(self._now())
        self._file.unlink(missing_ok=True)

    def _apply(self, *, first: bool = False) -> None:
        now = self._now()
        minute = 60 * now.hour + now.minute
        for way, schedule, name in ((UP, self.limits.upload, "upload"), (DOWN, self.limits.download, "download")):
            rate = schedule.at(minute)
            if way not in self._rates or rate != self._rates[way]:
                self._rates[way] = rate
                self._bandwidth.limit(way, rate)
                if not first:
                    self._note(f"the {name} limit is now {'none' if rate is None else rate_text(rate)}")
        self._apply_cap(now)

    def _apply_cap(self, now: datetime) -> None:
        if not 0 <= (now - self._reported_at).total_seconds() < USAGE_SECONDS:  # negative if the clock was set back
            self._report(now)  # without a cap, too: one that is set later counts the bytes of its day only
        cap = self.limits.daily_cap_bytes
        if cap is None:
            self._bandwidth.set_cap(None)
            return
        self._bandwidth.set_cap(self._reported + max(0, cap - self._used))
        used = self._used + self._bandwidth.counted - self._reported
        if used >= STOP_SHARE * cap and self._stop_day != now.date():
            self._stop_day = now.date()
            self._note(STOPS.format(used=bytes_text(used), cap=bytes_text(cap)))
            self._stop()

    def _report(self, now: datetime) -> None:
        counted = self._bandwidth.counted
        self._used = self._usage.add(now.date(), counted - self._reported)
        self._reported, self._reported_at = counted, now

    def _change_time(self) -> int:
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return 0

    def _read_change(self) -> None:
        try:
            self.limits = read_limits(self._file.parent)
        except GossamerError as error:
            self._note(NOT_CHANGED.format(reason=error))


@contextmanager
def keep_limits(
    limits: MachineLimits,
    directory: Path,
    logs: Path,
    note: Callable[[str], None],
    stop: Callable[[], None],
) -> Iterator[BandwidthKeeper]:
    """Context manager: limits for this process and the workers that it starts.

    directory: private directory of the run.
    """
    path = directory / "bandwidth"
    keeper = BandwidthKeeper(limits, Bandwidth.create(path), logs, note, stop)
    before = os.environ.get(BANDWIDTH)
    os.environ[BANDWIDTH] = str(path)
    try:
        yield keeper
    finally:
        os.environ.pop(BANDWIDTH)
        if before is not None:
            os.environ[BANDWIDTH] = before
        keeper.close()


def check_cap(
    limits: MachineLimits, usage: DailyUsage | None = None, now: Callable[[], datetime] = datetime.now
) -> None:
    """Raise GossamerError if the cap of this day is used up."""
    cap = limits.daily_cap_bytes
    if cap is not None and (used := (usage or DailyUsage()).add(now().date(), 0)) >= STOP_SHARE * cap:
        raise GossamerError(
            f"{bytes_text(used)} of the daily cap of {bytes_text(cap)} were transferred today. Start again after "
            "midnight, or write a higher --daily-cap."
        )


def write_limits(logs: Path, limits: MachineLimits) -> None:
    """Write the limits of a run into its folder of logs."""
    write_json(logs / LIMITS_FILE, dict(limits.texts()))


def read_limits(logs: Path) -> MachineLimits:
    """Limits of a run with these logs. Raises GossamerError if it has none."""
    path = logs / LIMITS_FILE
    try:
        content = read_json(bounded_file.read_text(path))
        return MachineLimits().changed({name: str(content[name]) for name in MachineLimits().texts()})
    except (FileNotFoundError, NotADirectoryError):
        raise GossamerError(
            f"there is no {path}: no run with these logs is in progress here, or it was started without limits. A run "
            "that begins with --upload-limit none can be limited later."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise GossamerError(f"{path} has no valid limits: {problem}. Write them again: gossamer limit RUN") from None
