"""Uplinks: what another machine's launcher collects comes to the first, once, on its clock; nothing waits for it."""

from __future__ import annotations

import json
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
from support.elastic_members import TOKEN
from support.processes import eventually

from gossamer.base.peer_ops import Answer, Ask, Pull, Receipt
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.membership.next_view import CoordinatorOptions
from gossamer.errors import PeerLost
from gossamer.observe.telemetry.batches import MOST_BYTES
from gossamer.observe.telemetry.hangs import find_hang, read_activities
from gossamer.observe.telemetry.machines import BATCH, CLOCK, MOST_WAITING, MachineDesk, RankBook
from gossamer.observe.telemetry.rows import NewRows
from gossamer.observe.telemetry.uplink import MOST_DRIFT, ClockOffset, Line, Offset, Uplink, to_coordinator

AHEAD = 100.0  # by which the first machine's clock is ahead, at moments around 1000


@pytest.fixture
def desk() -> MachineDesk:
    return MachineDesk(clock=lambda: 1000.0 + AHEAD)


class Straight:
    """Hands asks to a desk; where `broken`, answers get lost, though the ask has come."""

    def __init__(self, desk: MachineDesk) -> None:
        self._desk, self.broken = desk, 0

    def answer(self, op: Ask) -> Answer:
        found = self._desk.answers[op.key](op)
        if self.broken and not isinstance(op, Pull):
            self.broken -= 1
            raise PeerLost("cut")
        return found


def line(step: int, rank: int = 0) -> NewRows:
    rows = NewRows()
    rows.log(1000.0 + step, rank, 0, "stdout", f"step {step}")
    rows.know(rank, state="training", began=999.0)
    return rows


def texts(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in db.execute("SELECT rank, at, text FROM log ORDER BY id")]


def uplink(way: Callable[[], AbstractContextManager[Line]]) -> Uplink:
    return Uplink(way, clock=lambda: 1000.0)


def test_rows_come_once_though_answers_get_lost(db: sqlite3.Connection, desk: MachineDesk) -> None:
    way = Straight(desk)
    way.broken = 1
    with uplink(lambda: nullcontext(way)) as up:
        for step in range(3):
            up.forward(line(step))
        up.forward(NewRows())  # nothing to send
        assert eventually(lambda: not way.broken and up._waiting.empty())
    desk.drain(db, RankBook(db, own=range(2)))
    assert texts(db) == [(2, 1100.0 + step, f"step {step}") for step in range(3)]
    known = db.execute("SELECT rank, state, began, clock_offset, clock_error FROM rank").fetchone()
    assert tuple(known) == (2, "training", 1099.0, AHEAD, 0.0)


def test_an_operation_of_another_machine_has_the_clock_and_the_ranks_of_the_first(
    db: sqlite3.Connection, desk: MachineDesk
) -> None:
    rows, since = NewRows(), 990.0
    activity = {"operation": "all-reduce", "under_way": True, "number": 7, "step": 3, "since": since}
    rows.know(
        0, state="waiting", waits_for="rank 1", activity=json.dumps(activity | {"group": [-2, 4], "waits_for": [1]})
    )
    with uplink(lambda: nullcontext(Straight(desk))) as up:
        up.forward(rows)
        assert eventually(up._waiting.empty)
    desk.drain(db, RankBook(db, own=range(2)))
    (found,) = read_activities(db, now=since + AHEAD + 4.0)
    assert (found.rank, found.since, found.group, found.waits_for) == (2, since + AHEAD, (0, 4), (3,))
    assert db.execute("SELECT waits_for FROM rank").fetchone()[0] == "rank 3"
    assert find_hang([found], since + AHEAD + 4.0, patience_seconds=5.0) is None
    hang = find_hang([found], since + AHEAD + 6.0, patience_seconds=5.0)
    assert hang is not None
    assert hang.ranks == (3,)


def test_what_finds_no_room_is_dropped_counted_and_told(db: sqlite3.Connection, desk: MachineDesk) -> None:
    up = uplink(lambda: nullcontext(Straight(desk)))
    for step in range(MOST_WAITING + 5):  # its thread has not begun: nothing is taken from the queue
        up.forward(line(step))
    assert up.dropped == 5
    book = RankBook(db)
    with up:
        assert eventually(lambda: (desk.drain(db, book), up._waiting.empty())[1])
    desk.drain(db, book)
    assert len(texts(db)) == MOST_WAITING
    told = [
        json.loads(row["content"])["rows"] for row in db.execute("SELECT content FROM event WHERE kind = 'dropped'")
    ]
    assert told == [5]


def test_a_flood_of_printed_lines_does_not_take_the_failure_with_it(db: sqlite3.Connection, desk: MachineDesk) -> None:
    rows, draw = line(1), random.Random(0)
    for _ in range(400):  # lines that do not compress, more than one batch holds
        rows.log(1001.0, 0, 0, "stdout", draw.randbytes(8000).hex())
    failure = {"kind": "raised", "message": "ValueError", "traceback": "Traceback", "caused_by": None}
    rows.add("failure", at=1002.0, rank=0, attempt=0, **failure)
    rows.know(0, state="failed")
    with uplink(lambda: nullcontext(Straight(desk))) as up:
        up.forward(rows)
        up.forward(line(2))
    assert up.dropped == 401
    desk.drain(db, RankBook(db))
    assert [text for *_, text in texts(db)] == ["step 2"]
    assert [tuple(row) for row in db.execute("SELECT at, message FROM failure")] == [(1002.0 + AHEAD, "ValueError")]
    told = [json.loads(row["content"])["rows"] for row in db.execute("SELECT content FROM event")]
    assert told == [401]


def test_a_first_machine_that_says_nothing_holds_nobody_up() -> None:
    over = threading.Event()

    class Silent:
        def answer(self, op: Ask) -> Answer:
            over.wait()
            raise PeerLost("silent")

    up = uplink(lambda: nullcontext(Silent()))
    with up:
        for step in range(2 * MOST_WAITING):
            up.forward(line(step))
        over.set()
    assert up.dropped >= MOST_WAITING - 1


def push(payload: bytes, about: str) -> Ask:
    import torch

    from gossamer.base.peer_ops import Push, Stamp
    from gossamer.comm.membership.messages import COORDINATOR

    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return Push(to=COORDINATOR, key=BATCH, stamp=Stamp(7, 1), payload=(tensor,), about=about)


@pytest.mark.parametrize(
    ("payload", "about"),
    [
        (b"x", '{"offset": 0, "error": 0}'),
        (b"x", "[]"),
        (b"x", "nothing"),
        (bytes(MOST_BYTES + 1), '{"offset": 0, "error": 0}'),
    ],
)
def test_nonsense_is_refused_and_training_continues(
    db: sqlite3.Connection, desk: MachineDesk, payload: bytes, about: str
) -> None:
    assert isinstance(desk.take(push(payload, about)), Receipt)
    desk.drain(db, RankBook(db))
    assert texts(db) == []


def test_columns_that_the_store_has_not_are_refused(db: sqlite3.Connection, desk: MachineDesk) -> None:
    rows = NewRows()
    rows.add("log", **{"text) SELECT 1 --": 1})
    with uplink(lambda: nullcontext(Straight(desk))) as up:
        up.forward(rows)
    desk.drain(db, RankBook(db))
    (event,) = db.execute("SELECT kind, content FROM event").fetchall()
    assert event["kind"] == "refused"
    assert "unknown columns" in event["content"]


def test_ranks_are_nobody_elses_and_stay(db: sqlite3.Connection) -> None:
    book = RankBook(db, own=range(2))
    assert [book.rank(5, 0), book.rank(5, 1), book.rank(9, 0)] == [2, 3, 4]
    assert [book.rank(0, 0), book.rank(0, 1), book.rank(0, 2)] == [0, 1, 5]
    db.commit()
    assert [RankBook(db).rank(*key) for key in ((5, 1), (0, 2), (9, 0))] == [3, 5, 4]


@contextmanager
def coordinator(desk: MachineDesk) -> Iterator[CoordinatorServer]:
    with CoordinatorServer(
        CoordinatorOptions(least=1, most=2, initial=1),
        token=TOKEN,
        address="127.0.0.1",
        journal=None,
        note=lambda text: None,
        more_handlers=desk.answers,
    ) as server:
        yield server


def test_next_to_a_real_coordinator(db: sqlite3.Connection, desk: MachineDesk) -> None:
    book = RankBook(db)
    with coordinator(desk) as server, uplink(partial(to_coordinator, server.address, TOKEN)) as up:
        up.forward(line(1))
        assert eventually(lambda: (desk.drain(db, book), texts(db))[1] != [])
    assert texts(db) == [(0, 1101.0, "step 1")]
    assert desk.answers[CLOCK](push(b"x", "")).about == "1100.0"


SKEW = 3.7  # seconds between the clocks at the beginning
Delays = Callable[[random.Random], tuple[float, float]]  # there and back, in seconds


def symmetric(draws: random.Random) -> tuple[float, float]:
    return 0.010, 0.010


def jittered(draws: random.Random) -> tuple[float, float]:
    return 0.010 + draws.expovariate(1 / 0.002), 0.010 + draws.expovariate(1 / 0.002)


def one_way_slower(draws: random.Random) -> tuple[float, float]:
    return 0.004, 0.016


def follow(drift: float, delays: Delays, seconds: int = 1800) -> list[tuple[Offset, float]]:
    """Offsets asked for now and then, each with the true one. True time is that of this machine's clock."""
    draws, clocks, found = random.Random(3), ClockOffset(), []

    def other(moment: float) -> float:
        return moment + SKEW + drift * moment

    for second in range(0, seconds, 5):
        there, back = delays(draws)
        sent = second + draws.random()
        clocks.add(sent, other(sent + there), sent + there + back)
        asked = sent + there + back + draws.random() * 4
        offset = clocks.at(asked)
        assert offset is not None
        found.append((offset, other(asked) - asked))
    return found


@pytest.mark.parametrize("drift", [0.0, 5e-5, -2e-4])
def test_equal_ways_of_twenty_milliseconds_are_right_within_one(drift: float) -> None:
    found = follow(drift, symmetric)
    assert max(abs(offset.seconds - true) for offset, true in found) < 0.001
    assert max(offset.error for offset, _ in found) < 0.013


@pytest.mark.parametrize("delays", [symmetric, jittered, one_way_slower])
@pytest.mark.parametrize("drift", [0.0, 5e-5, -2e-4])
def test_the_bound_holds_whatever_the_ways_take(drift: float, delays: Delays) -> None:
    for offset, true in follow(drift, delays):
        assert abs(offset.seconds - true) <= offset.error


def test_jitter_is_outlived_by_the_shortest_round_trips() -> None:
    late = follow(5e-5, jittered)[60:]
    assert max(abs(offset.seconds - true) for offset, true in late) < 0.001


def test_a_mutant_that_takes_the_newest_trip_would_be_worse() -> None:
    draws = random.Random(3)
    newest = [abs(there - back) / 2 for there, back in (jittered(draws) for _ in range(300))]
    assert max(newest) > 0.003


def test_nothing_is_known_before_the_first_trip_and_age_makes_it_worse() -> None:
    clocks = ClockOffset()
    assert clocks.at(0.0) is None
    clocks.add(10.0, 15.01, 10.02)
    assert clocks.at(10.01) == pytest.approx((5.0, 0.01))
    later = clocks.at(110.01)
    assert later is not None
    assert later.error == pytest.approx(0.01 + 100 * MOST_DRIFT)


def test_a_clock_that_is_set_begins_again() -> None:
    clocks = ClockOffset()
    clocks.add(1000.0, 1000.01, 1000.02)
    clocks.add(500.0, 1005.01, 500.02)
    assert clocks.at(500.01) == pytest.approx((505.0, 0.01))


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 300.0, -300.0, 1.0])
@pytest.mark.parametrize("whose", ["this", "other"])
def test_a_clock_that_is_set_is_followed_at_the_next_round_trip(jump: float, whose: str) -> None:
    """The broken twin remembers the trips of before, the shortest of which it goes on to believe."""
    clocks, true = ClockOffset(), SKEW
    mine = 1e6
    for trip in range(20):
        if trip == 10:
            mine, true = (mine + jump, true - jump) if whose == "this" else (mine, true + jump)
        seconds = 0.010 if trip < 10 else 0.020  # those of before look better
        clocks.add(mine, mine + seconds / 2 + true, mine + seconds)
        offset = clocks.at(mine + seconds)
        assert offset is not None
        assert abs(offset.seconds - true) <= offset.error < 0.1
        mine += 5.0
