"""Aside log: notices, warnings, errors of threads and changes of the group, with their moments, each as it comes."""

from __future__ import annotations

import json
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import SOON_SECONDS

from gossamer import events
from gossamer.base import flight_recorder
from gossamer.base.flight_recorder import NOTHING, FlightRecorder
from gossamer.events import GroupChanged, LinkCounters, LinksOpened, Noticed, Skipped, StepEnded
from gossamer.observe.aside_log import (
    MOST_ROWS,
    MOST_WARNINGS,
    ActivityWatch,
    Aside,
    AsideLog,
    LinkWatch,
    aside_log_path,
    full_rate,
    watch_threads,
    watch_warnings,
)
from gossamer.observe.event_log import Entry, read_entries


def test_what_no_record_has_is_reported_with_its_moment() -> None:
    told: list[Entry] = []
    log = AsideLog(told.append, clock=lambda: 12.5)
    log(Noticed(message="slow"))
    log(Skipped(step=3, rank=1, tensor="head"))
    log(GroupChanged(step=4, view=2, world=3, lost=(1,), joined=0, seconds=0.5, finished=True))
    log(StepEnded(step=4, seconds=1.0))
    log.vitals({"rss": 1.0})
    assert [entry["kind"] for entry in told] == ["noticed", "skipped", "group changed", "vitals"]
    assert {entry["moment"] for entry in told} == {12.5}
    assert json.loads(json.dumps(told[2]))["lost"] == [1]


def test_a_signal_handler_that_logs_while_an_entry_is_written_blocks_nothing() -> None:
    told: list[Entry] = []

    def put(entry: Entry) -> None:
        if not told:
            told.append(entry)
            log.warned("UserWarning", "from the handler", "train.py:3")

    log = AsideLog(put)
    thread = threading.Thread(target=log, args=[Noticed(message="slow")], daemon=True)
    thread.start()
    thread.join(SOON_SECONDS)
    assert not thread.is_alive()


def test_a_loop_that_warns_in_every_step_fills_no_disk() -> None:
    told: list[Entry] = []
    log = AsideLog(told.append)
    for _ in range(2 * MOST_WARNINGS):
        log.warned("UserWarning", "again", "train.py:3")
    assert len(told) == MOST_WARNINGS


def test_warnings_are_reported_and_shown_as_before() -> None:
    told: list[tuple[str, str, str]] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        end = watch_warnings(lambda *warned: told.append(warned))
        warnings.warn("careful", UserWarning, stacklevel=1)
        end()
        warnings.warn("unheard", UserWarning, stacklevel=1)
    assert [(category, message) for category, message, _ in told] == [("UserWarning", "careful")]
    assert "test_aside_log.py:" in told[0][2]
    assert [str(each.message) for each in shown][-1] == "unheard"


def test_an_error_that_ends_a_thread_is_reported_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    told: list[Entry] = []
    end = watch_threads(AsideLog(told.append).failed)

    def fail() -> None:
        raise RuntimeError("lost")

    thread = threading.Thread(target=fail, name="loader")
    thread.start()
    thread.join()
    end()
    assert len(shown) == 1
    assert (told[0]["thread"], told[0]["summary"]) == ("loader", "RuntimeError: lost")
    assert "in fail" in told[0]["traceback"]


def test_a_worker_tells_of_itself_from_beginning_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "current", FlightRecorder())
    aside = Aside(tmp_path, 3)
    events.emit(Noticed(message="here"))
    aside.close()
    events.emit(Noticed(message="unheard"))
    told = list(read_entries(aside_log_path(tmp_path, 3)))
    assert [entry["kind"] for entry in told] == ["environment", "noticed", "vitals"]
    assert "torch" in told[0]["versions"]
    assert told[2]["values"]["rss"] > 0


class Group:
    rank, world = 1, 4


class Looked:
    def __init__(self) -> None:
        self.now, self.recorder = 100.0, FlightRecorder()
        self.watch = ActivityWatch(self.recorder, lambda: self.now)

    def begin(self, bucket: int = 0) -> None:
        self.recorder.step += 1
        self.recorder.waiting = self.recorder.begin(Group(), {"Mean"}, 8.0, self.now, bucket)

    def answer(self) -> None:
        self.recorder.waiting.answered, self.recorder.waiting = self.now, NOTHING

    def look(self) -> object:
        self.now += 2.0
        return self.watch.look()


def test_a_rank_that_trains_tells_it_once() -> None:
    """Broken twin: telling whatever a look finds tells of every operation that is under way just then."""
    rank, told = Looked(), list[object]()
    for _ in range(50):
        rank.begin()
        told.append(rank.look())
        rank.answer()
    assert [each for each in told if each] == [{"kind": "activity", "state": "training"}]


def test_an_operation_that_lasts_is_told_with_whom_it_waits_for() -> None:
    rank = Looked()
    rank.begin(bucket=3)
    rank.recorder.buckets = 7
    assert rank.look() == {"kind": "activity", "state": "training"}
    told = rank.look()
    assert told == {
        "kind": "activity",
        "state": "waiting",
        "operation": "all-reduce",
        "under_way": True,
        "number": 0,
        "place": 1,
        "world": 4,
        "step": 1,
        "bucket": 3,
        "buckets": 7,
        "waits_for": [],
        "seconds": 4.0,
    }
    assert rank.look() is None
    rank.recorder.waiting.waits_for = (2,)
    assert rank.look()["waits_for"] == [2]  # type: ignore[index]
    rank.answer()
    assert rank.look() == {"kind": "activity", "state": "training"}


def test_a_rank_that_is_in_no_operation_for_long_tells_its_last_one() -> None:
    rank = Looked()
    rank.begin()
    rank.answer()
    rank.look()
    told = rank.look()
    assert isinstance(told, dict)
    assert (told["state"], told["under_way"], told["number"], told["seconds"]) == ("training", False, 0, 4.0)


def test_saving_is_told_while_it_lasts() -> None:
    rank = Looked()
    rank.begin()
    rank.answer()
    rank.look()
    with rank.recorder.save():
        assert rank.look() == {"kind": "activity", "state": "saving"}
    assert rank.look() == {"kind": "activity", "state": "training"}


IDLE = LinkCounters(0.02, 0, 0, 0.0, 0.0, limited=True)
FULL = LinkCounters(0.02, 500_000, 3, 0.0625, 1e7, limited=False)  # 200 kB are on the way at once


class CountedLinks:
    """Connections whose counters a test sets."""

    def __init__(self, peers: int = 1) -> None:
        self.now = {f"host {peer}": IDLE for peer in range(peers)}
        self.stands = True

    @property
    def opened(self) -> LinksOpened:
        return LinksOpened(
            round_trips=dict.fromkeys(self.now, 0.02),
            bytes_per_second=dict.fromkeys(self.now, 1.25e7),
            read=lambda: self.now,
            is_open=lambda: self.stands,
        )


@pytest.mark.parametrize(
    ("counters", "used", "rate"),
    [
        (FULL, 200_000, 4e5),
        (FULL, 199_999, None),  # the rate may be older than these bytes
        (replace(FULL, limited=True), 500_000, None),  # the sender had no more to send
        (replace(FULL, flight_bytes_per_second=0.0), 500_000, None),  # the kernel does not say
    ],
)
def test_a_rate_is_a_connections_where_it_was_full(counters: LinkCounters, used: int, rate: float | None) -> None:
    assert full_rate(counters, used, 0.5) == rate


def test_a_kernel_that_does_not_say_how_long_it_was_busy_tells_no_rate() -> None:
    assert full_rate(FULL, 500_000, 0.0) is None


def test_first_rows_are_what_was_measured_and_later_ones_what_was_carried_since() -> None:
    watch, group = LinkWatch(), CountedLinks()
    (first,) = watch.opened(group.opened)
    assert first == {
        "process": "host 0",
        "round_trip": 0.02,
        "bytes_per_second": 12_500_000,
        "used_bytes": 0,
        "retransmits": 0,
        "through": None,
    }
    assert watch.sample() == []  # it has carried nothing
    group.now = {"host 0": FULL}
    assert [(row["used_bytes"], row["retransmits"], row["bytes_per_second"]) for row in watch.sample()] == [
        (500_000, 3, 8_000_000)
    ]
    group.now = {"host 0": replace(FULL, acknowledged_bytes=500_100, limited=True)}
    assert [(row["used_bytes"], row["retransmits"], row["bytes_per_second"]) for row in watch.sample()] == [
        (100, 0, None)
    ]


def test_rows_have_the_relay_of_their_connection() -> None:
    watch, group = LinkWatch(), CountedLinks(2)
    first = watch.opened(replace(group.opened, relays={"host 1": "office 7"}))
    group.now = dict.fromkeys(group.now, FULL)
    for rows in (first, watch.sample()):
        assert {row["process"]: row["through"] for row in rows} == {"host 0": None, "host 1": "office 7"}


@pytest.mark.parametrize("peers", [1, MOST_ROWS, 63, 255])
def test_many_peers_take_turns_and_no_byte_is_lost(peers: int) -> None:
    watch, group = LinkWatch(), CountedLinks(peers)
    watch.opened(group.opened)
    watch.sample()
    rows, most = 0, 0
    for sample in range(1, 41):
        group.now = {name: replace(FULL, acknowledged_bytes=1000 * sample) for name in group.now}
        found = watch.sample()
        most, rows = max(most, len(found)), rows + sum(row["used_bytes"] for row in found)
    assert most <= MOST_ROWS
    group.stands = False
    rows += sum(row["used_bytes"] for row in watch.sample())
    assert rows == peers * 40_000
    assert watch.sample() == []  # a closed group is forgotten


def test_two_groups_of_the_same_peer_are_distinguished_and_add_up() -> None:
    watch, one, two = LinkWatch(), CountedLinks(), CountedLinks()
    watch.opened(one.opened)
    watch.opened(two.opened)
    one.now, two.now = {"host 0": FULL}, {"host 0": replace(FULL, acknowledged_bytes=7)}
    assert sorted(row["used_bytes"] for row in watch.sample()) == [7, 500_000]


def test_the_aside_log_tells_of_links_when_they_open_and_when_they_carry() -> None:
    told: list[Entry] = []
    log, group = AsideLog(told.append, clock=lambda: 3.0), CountedLinks()
    log(group.opened)
    log.links()
    group.now = {"host 0": FULL}
    log.links()
    assert [(each["kind"], each["moment"], len(each["links"])) for each in told] == [("links", 3.0, 1)] * 2
    assert json.loads(json.dumps(told)) == told
