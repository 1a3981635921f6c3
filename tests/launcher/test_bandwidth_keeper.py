"""Bandwidth keeper: rates by the hour, changes while a run trains, and the cap of a day."""

from __future__ import annotations

import mmap
import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from gossamer.comm.bandwidth.limits import MachineLimits
from gossamer.comm.bandwidth.shared_buckets import BANDWIDTH, DOWN, NBYTES, UP, Bandwidth, available, current
from gossamer.errors import GossamerError
from gossamer.launcher.bandwidth_keeper import (
    LIMITS_FILE,
    BandwidthKeeper,
    DailyUsage,
    check_cap,
    keep_limits,
    read_limits,
    write_limits,
)

pytestmark = pytest.mark.skipif(not available(), reason="the compiled loops are missing")


class Machine:
    """A keeper with a clock that the test sets."""

    def __init__(self, folder: Path, now: str = "2026-03-01 12:00", usage: DailyUsage | None = None, **texts: str):
        self.folder, self.now = folder, datetime.fromisoformat(now)
        self.notes, self.stops = [], []
        self.bandwidth = Bandwidth(mmap.mmap(-1, NBYTES))
        self.usage = usage or DailyUsage(folder / "traffic.json")
        self.keeper = BandwidthKeeper(
            MachineLimits().changed(texts),
            self.bandwidth,
            folder,
            self.notes.append,
            lambda: self.stops.append(self.now),
            self.usage,
            lambda: self.now,
        )

    def at(self, text: str):
        self.now = datetime.fromisoformat(text)
        self.keeper.tick()

    def write(self, **texts: str):
        """As `gossamer limit` does."""
        before = os.stat(self.folder / LIMITS_FILE).st_mtime_ns
        write_limits(self.folder, read_limits(self.folder).changed(texts))
        os.utime(self.folder / LIMITS_FILE, ns=(before + 1, before + 1))

    def is_limited(self, way=UP):
        """Whether a connection must wait after a large transfer."""
        return self.bandwidth.room(way, self.bandwidth.transfer(way, 10**8, 0), 0) <= 0

    def transfers(self):
        return self.bandwidth.room(UP, 0, 10**15) > 0


def test_the_limit_follows_the_hours_across_midnight(tmp_path):
    machine = Machine(tmp_path, "2026-03-01 21:59", upload="5mbit; none at 22:00-06:00")
    assert machine.is_limited()
    machine.at("2026-03-01 22:00")
    assert not machine.is_limited()
    machine.at("2026-03-02 05:59")
    assert not machine.is_limited()
    machine.at("2026-03-02 06:00")
    assert machine.is_limited()
    assert not machine.is_limited(DOWN)
    assert [note.rpartition(" now ")[2] for note in machine.notes] == ["none", "5.0 Mbit/s"]


def test_a_change_of_the_file_is_applied_at_the_next_tick(tmp_path):
    machine = Machine(tmp_path, upload="none")
    assert not machine.is_limited()
    machine.write(upload="2mbit", download="20mbit")
    assert machine.keeper.tick()
    assert machine.is_limited()
    assert machine.is_limited(DOWN)
    assert not machine.keeper.tick()


def test_an_invalid_change_is_reported_and_changes_nothing(tmp_path):
    machine = Machine(tmp_path, upload="5mbit")
    (tmp_path / LIMITS_FILE).write_text('{"upload": "0mbit", "download": "none", "daily_cap": "none"}')
    machine.keeper.tick()
    assert "not applied" in machine.notes[-1]
    assert machine.keeper.limits.upload.text == "5mbit"
    assert machine.is_limited()


def test_workers_stop_before_the_cap_and_nothing_is_transferred_behind_it(tmp_path):
    machine = Machine(tmp_path, daily_cap="10MB")
    machine.bandwidth.transfer(UP, 9_100_000, 0)  # 9.7 MB with headers and acknowledgments
    machine.keeper.tick()
    assert not machine.stops
    machine.bandwidth.transfer(DOWN, 100_000, 0)
    machine.keeper.tick()
    machine.keeper.tick()
    assert len(machine.stops) == 1
    assert "10.0 MB" in machine.notes[-1]
    assert machine.transfers()
    machine.bandwidth.transfer(UP, 500_000, 0)
    assert not machine.transfers()


def test_the_cap_begins_again_at_midnight(tmp_path):
    machine = Machine(tmp_path, "2026-03-01 23:00", daily_cap="10MB")
    machine.bandwidth.transfer(UP, 8_000_000, 0)
    machine.at("2026-03-01 23:59")
    machine.at("2026-03-02 00:01")
    machine.bandwidth.transfer(UP, 8_000_000, 0)
    machine.at("2026-03-02 12:00")
    assert not machine.stops
    assert machine.transfers()
    machine.bandwidth.transfer(UP, 8_000_000, 0)
    machine.at("2026-03-02 12:01")
    assert machine.stops
    assert not machine.transfers()


def test_a_cap_that_is_set_during_a_run_does_not_count_earlier_days(tmp_path):
    machine = Machine(tmp_path, upload="none")
    machine.bandwidth.transfer(UP, 50_000_000, 0)
    machine.at("2026-03-01 23:59")
    machine.at("2026-03-02 12:00")
    machine.write(daily_cap="10MB")
    machine.at("2026-03-02 12:01")
    assert not machine.stops
    assert machine.transfers()


def test_a_run_without_a_cap_adds_its_bytes_to_the_day_while_it_trains(tmp_path):
    machine = Machine(tmp_path, upload="none")
    machine.bandwidth.transfer(UP, 9_500_000, 0)
    machine.at("2026-03-01 12:01")
    assert Machine(tmp_path, daily_cap="10MB", usage=DailyUsage(tmp_path / "traffic.json")).stops


def test_the_cap_begins_again_at_midnight_after_the_clock_was_set_back(tmp_path):
    machine = Machine(tmp_path, "2030-01-01 12:00", daily_cap="10MB")
    machine.bandwidth.transfer(UP, 8_000_000, 0)
    machine.at("2026-03-01 12:00")
    machine.at("2026-03-02 00:01")
    machine.bandwidth.transfer(UP, 8_000_000, 0)
    machine.at("2026-03-02 12:00")
    assert not machine.stops
    assert machine.transfers()


def test_the_bytes_of_other_runs_of_the_day_count(tmp_path):
    usage = DailyUsage(tmp_path / "traffic.json")
    first = Machine(tmp_path, daily_cap="10MB", usage=usage)
    first.bandwidth.transfer(UP, 9_500_000, 0)
    first.keeper.close()
    again = DailyUsage(tmp_path / "traffic.json")
    limits = MachineLimits().changed({"daily_cap": "10MB"})
    with pytest.raises(GossamerError, match="Start again after midnight"):
        check_cap(limits, again, lambda: first.now)
    assert Machine(tmp_path, daily_cap="10MB", usage=again).stops
    check_cap(limits, again, lambda: first.now + timedelta(days=1))


def test_a_higher_cap_continues_the_transfers(tmp_path):
    machine = Machine(tmp_path, daily_cap="10MB")
    machine.bandwidth.transfer(UP, 12_000_000, 0)
    machine.keeper.tick()
    assert not machine.transfers()
    machine.write(daily_cap="100MB")
    machine.keeper.tick()
    assert machine.transfers()


def test_a_damaged_file_of_the_day_counts_from_zero(tmp_path):
    (tmp_path / "traffic.json").write_text("{")
    day = datetime(2026, 3, 1).date()
    assert DailyUsage(tmp_path / "traffic.json").add(day, 5) == 5
    assert DailyUsage(tmp_path / "traffic.json").add(day, 5) == 10


def test_bytes_are_not_lost_while_another_run_writes_the_file(tmp_path, monkeypatch):
    usage, day = DailyUsage(tmp_path / "traffic.json"), datetime(2026, 3, 1).date()

    def locked(handle):
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr("gossamer.base.system.lock_file", locked)
        assert usage.add(day, 5) == 5
    assert usage.add(day, 5) == 10
    assert DailyUsage(tmp_path / "traffic.json").add(day, 0) == 10


def test_without_a_place_for_the_file_the_bytes_of_this_run_count(tmp_path):
    (tmp_path / "file").touch()
    usage, day = DailyUsage(tmp_path / "file" / "traffic.json"), datetime(2026, 3, 1).date()
    assert [usage.add(day, 5), usage.add(day, 5)] == [5, 10]


def test_a_launcher_and_its_workers_find_the_limits_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    limits = MachineLimits().changed({"upload": "5mbit"})
    (tmp_path / "private").mkdir()
    assert current() is None
    with keep_limits(limits, tmp_path / "private", tmp_path, print, print) as keeper:
        assert os.environ[BANDWIDTH] == str(tmp_path / "private" / "bandwidth")
        assert current() is not None
        assert read_limits(tmp_path) == keeper.limits
    assert BANDWIDTH not in os.environ
    with pytest.raises(GossamerError, match="--upload-limit none"):
        read_limits(tmp_path)
