"""Machines of a fixed number: launchers find the first one's store by what the meeting tells, and prove a token."""

from __future__ import annotations

import json
import secrets
import sqlite3
from contextlib import closing
from datetime import timedelta

import pytest
from support.processes import eventually

from gossamer.base.peer_ops import Pull
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.errors import ConnectError
from gossamer.observe.telemetry.machines import CLOCK, GlobalRanks, MachineDesk
from gossamer.observe.telemetry.meeting import KEY, FirstMachine, OtherMachine
from gossamer.observe.telemetry.rows import NewRows
from gossamer.observe.telemetry.uplink import Uplink

LOOPBACK = "127.0.0.1"
TOKEN = secrets.token_bytes(32)


class Meeting:
    """A key-value store, as TCPStore is one; a wait for what is not there fails at once."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.said[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.said[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.said.keys() >= set(keys):
            raise RuntimeError(f"wait timeout after {timeout}\n[a trace of C++]")


def source_cell(rank: int) -> NewRows:
    rows = NewRows()
    rows.log(1000.0, rank, 0, "stdout", f"of rank {rank}")
    failure = {"kind": "echo", "message": "", "traceback": None, "caused_by": None}
    rows.add("failure", at=1000.0, rank=rank, attempt=0, **failure)
    return rows


def texts(db: sqlite3.Connection) -> list[str]:
    return [row["text"] for row in db.execute("SELECT text FROM log ORDER BY id")]


@pytest.mark.parametrize("token", [TOKEN, None], ids=["of the run", "told in the meeting"])
def test_the_first_store_has_the_other_machines_rows_under_their_own_ranks(
    db: sqlite3.Connection, token: bytes | None
) -> None:
    meeting, notes = Meeting(), list[str]()
    desk = MachineDesk(numbering=GlobalRanks, patience_seconds=10.0)
    ranks = desk.numbering(db, range(4))
    other = OtherMachine(token, None, notes.append)
    with closing(FirstMachine(desk, token, None, notes.append)) as first:
        with Uplink(other.line) as up:
            up.forward(source_cell(2))  # before they have met: it waits
            first.met(meeting, LOOPBACK)
            other.met(meeting, LOOPBACK)
            up.forward(source_cell(3))
        desk.await_farewells()  # not the ten seconds: the other has said that nothing follows
        assert not desk._here
        desk.drain(db, ranks)
    assert texts(db) == ["of rank 2", "of rank 3"]
    assert [row["rank"] for row in db.execute("SELECT rank FROM failure ORDER BY rank")] == [2, 3]
    assert [row["caused_by"] for row in db.execute("SELECT caused_by FROM failure ORDER BY rank")] == [None, 2]
    assert not notes
    assert (json.loads(meeting.said[KEY])["token"] is None) is (token is not None)
    assert TOKEN.hex() not in meeting.said[KEY].decode()


def test_a_rank_that_has_another_token_is_not_heard(db: sqlite3.Connection) -> None:
    meeting, desk = Meeting(), MachineDesk(numbering=GlobalRanks)
    stranger = OtherMachine(secrets.token_bytes(32), None, pytest.fail)
    with closing(FirstMachine(desk, TOKEN, None, pytest.fail)) as first:
        first.met(meeting, LOOPBACK)
        stranger.met(meeting, LOOPBACK)
        with stranger.line() as line, pytest.raises(ConnectError, match="another token"):
            line.answer(Pull(of=COORDINATOR, key=CLOCK, within_seconds=0.5))
        friend = OtherMachine(TOKEN, None, pytest.fail)  # the twin: the same question, the right token
        friend.met(meeting, LOOPBACK)
        with friend.line() as line:
            assert float(line.answer(Pull(of=COORDINATOR, key=CLOCK, within_seconds=10.0)).about) > 0


def test_a_rank_that_no_machine_has_is_refused(db: sqlite3.Connection) -> None:
    meeting, desk = Meeting(), MachineDesk(numbering=GlobalRanks)
    other = OtherMachine(TOKEN, None, pytest.fail)
    ranks = desk.numbering(db, range(4))
    with closing(FirstMachine(desk, TOKEN, None, pytest.fail)) as first:
        first.met(meeting, LOOPBACK)
        other.met(meeting, LOOPBACK)
        with Uplink(other.line) as up:
            up.forward(source_cell(4))
            up.forward(source_cell(3))
            assert eventually(lambda: (desk.drain(db, ranks), texts(db))[1] != [])
    assert texts(db) == ["of rank 3"]
    (event,) = db.execute("SELECT content FROM event WHERE kind = 'refused'").fetchall()
    assert "rank 4 is not one of 4 ranks" in event["content"]


def test_a_first_machine_that_cannot_listen_or_says_nothing_is_reported_and_hurts_nobody() -> None:
    meeting, notes = Meeting(), list[str]()
    with closing(FirstMachine(MachineDesk(), TOKEN, None, notes.append)) as first:
        first.met(meeting, "192.0.2.1")  # no address of this machine
    for heard in (meeting, Meeting()):
        other = OtherMachine(TOKEN, None, notes.append)
        other.met(heard, LOOPBACK)
        with Uplink(other.line) as up:
            up.forward(source_cell(1))
    assert [note.partition(" (")[0] for note in notes] == [
        "this machine cannot receive rows of the other machines",
        *["machine 0 cannot receive this machine's rows"] * 2,
    ]
    assert all("Training continues" in note and "C++" not in note for note in notes)


def test_a_machine_that_was_lost_is_not_waited_for_longer_than_patience(db: sqlite3.Connection) -> None:
    desk = MachineDesk(patience_seconds=0.0)
    desk._here.add(7)  # it never says farewell
    desk.await_farewells()
    assert desk._here == {7}
