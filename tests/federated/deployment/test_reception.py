"""Reception: numbers of devices, and devices that join, leave and return."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deployed_federations import TOKEN, join, server

from gossamer.base.peer_ops import Arrived, Elapsed, Peer, PeerJoined, PeerLeft, Pull, Push, Receipt, Reply, Stamp
from gossamer.comm.rpc_protocol.connection_state import ConnectionState
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.rpc_protocol.messages import encode_ask
from gossamer.errors import CheckpointError, ConnectError
from gossamer.federated.deployment import files
from gossamer.federated.deployment.limits import largest_frame_bytes
from gossamer.federated.deployment.reception import DEVICE, JOIN, LEAVE, RUN, UNKNOWN, Enrollment, Invitation
from gossamer.federated.deployment.server import FederationServer
from gossamer.federated.messages import PART, REPORT, TASK, THE_SERVER, Report, Task, decode, encode

A, B, C = (Peer(DEVICE, 1000 + number) for number in range(3))


class Desk:
    """A reception that is told what happens, in seconds that a test chooses."""

    def __init__(self, served: FederationServer, script: Any = None) -> None:
        self.served, self._tokens = served, 0
        self._stopped = False
        self._script = script or served.reception.serve(lambda: self._stopped)
        next(self._script)
        self.told(Elapsed(moment=0.0))

    def told(self, event: Any) -> list[Reply]:
        """What is answered until the reception waits again."""
        replies: list[Reply] = []
        op = self._script.send(event)
        while isinstance(op, Reply):
            replies.append(op)
            op = self._script.send(None)
        return replies

    def asked(self, device: Peer, op: Any, moment: float = 0.0) -> list[Reply]:
        self._tokens += 1
        return self.told(Arrived(moment=moment, token=self._tokens, sender=device, op=op))

    def join(self, device: Peer, moment: float = 0.0, about: str = "{}") -> Invitation:
        self.told(PeerJoined(moment=moment, peer=device))
        reply, *_ = self.asked(device, Push(to=THE_SERVER, key=JOIN, stamp=Stamp(0, 0), about=about), moment)
        return decode(reply.answer.about, Invitation, THE_SERVER)

    def asks(self, device: Peer, moment: float = 0.0) -> list[Reply]:
        return self.asked(device, Pull(of=THE_SERVER, key=TASK), moment)

    def task(self, device: Peer, moment: float = 0.0) -> Task | None:
        """The task that a device is told when it asks, if any."""
        told = [decode(each.answer.about, Task, THE_SERVER) for each in self.asks(device, moment)]
        return told[-1] if told else None

    def reports(self, device: Peer, number: int, task: Task, value: float, moment: float = 0.0) -> list[int]:
        """Report a pseudo-gradient of equal numbers; the versions of the receipts that come."""
        state = self.served.rounds.model.state
        report = Report(samples=1, steps=1, counts=(1,), layout=state.fingerprint)
        payload = (torch.full((state.layout.numel,), value, dtype=state.dtype),)
        stamp = Stamp(number, task.round, task.version)
        push = Push(to=THE_SERVER, key=REPORT, stamp=stamp, payload=payload, about=encode(report))
        return [each.answer.version for each in self.asked(device, push, moment)]


@pytest.fixture
def desk() -> Iterator[Desk]:
    served = server("FedAvg(fraction=0.5)", clients=4, rounds=3, absent_seconds=100.0)
    yield Desk(served)
    served.close()


def test_numbers_are_given_in_order_and_asks_of_strangers_are_told_so(desk: Desk) -> None:
    assert [desk.join(each).number for each in (A, B)] == [0, 1]
    (reply,) = desk.asks(C)
    assert reply.answer.about == UNKNOWN
    (reply,) = desk.asked(Peer("worker", 3), Pull(of=THE_SERVER, key=TASK))
    assert "refused" in reply.answer.about


def test_a_device_whose_connection_broke_is_not_chosen_and_keeps_its_task(desk: Desk) -> None:
    for each in (A, B):
        desk.join(each)
    desk.asks(A)
    desk.told(PeerLeft(moment=1.0, peer=A))
    assert desk.asks(B, 2.0) == []  # there are not two who wait
    desk.told(PeerJoined(moment=3.0, peer=A))
    assert len(desk.asks(A, 3.0)) == 2  # both were chosen
    desk.told(PeerLeft(moment=4.0, peer=A))
    desk.told(Elapsed(moment=103.0))
    assert set(desk.served.rounds.assigned) == {0, 1}
    desk.told(PeerJoined(moment=103.5, peer=A))
    assert len(desk.asks(A, 103.5)) == 1  # the same task again
    desk.told(Elapsed(moment=1000.0))
    assert 0 not in desk.served.reception._absent


def test_a_device_that_stays_away_is_not_waited_for(desk: Desk) -> None:
    for each in (A, B):
        desk.join(each)
        desk.asks(each)
    desk.told(PeerLeft(moment=1.0, peer=A))
    gone = desk.served.rounds.roster.away
    desk.told(Elapsed(moment=100.9))
    assert not gone
    desk.told(Elapsed(moment=101.0))
    assert gone == {0}


@pytest.mark.parametrize("stopped_seconds", [0.0, 1000.0])
def test_absences_and_deadlines_do_not_elapse_while_the_server_is_stopped(
    stopped_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by SIGSTOP, or with a paused container. The server checks its deadlines several times a second."""
    served = server("FedAvg(fraction=0.5)", clients=4, rounds=3, absent_seconds=100.0, round_seconds=50.0, fewest=2)
    monkeypatch.setattr(served._endpoint, "start", lambda script: script)
    desk, rounds = Desk(served, served.start()), served.rounds
    for each in (A, B, C):
        desk.join(each)
        desk.asks(each)
    desk.told(PeerLeft(moment=0.1, peer=C))
    desk.told(Elapsed(moment=0.2))
    given_up = rounds.roster.next_round
    for moment in (0.4, *(stopped_seconds + tenth / 10 for tenth in range(5, 499, 2))):
        desk.told(Elapsed(moment=moment))
    assert (rounds.roster.next_round, rounds.roster.away) == (given_up, set())
    for tenth in range(500, 1020, 2):
        desk.told(Elapsed(moment=stopped_seconds + tenth / 10))
    assert rounds.roster.next_round > given_up
    assert rounds.roster.away == {2}
    served.close()


def test_a_device_that_returns_under_another_number_is_not_waited_for_under_the_earlier_one(desk: Desk) -> None:
    for each in (A, B):
        desk.join(each)
    desk.asks(A)
    task = desk.task(B)
    assert task is not None
    desk.told(PeerLeft(moment=1.0, peer=A))
    assert desk.join(A, 2.0, '{"number": 3}').number == 3
    roster = desk.served.rounds.roster
    assert roster.away == {0}
    assert {1, 3} <= roster.known
    assert desk.reports(B, 1, task, 1.0, 3.0) == [1]  # the round is complete without the earlier number
    desk.told(PeerLeft(moment=4.0, peer=A))
    desk.told(Elapsed(moment=200.0))
    assert roster.away == {0, 3}


def test_a_farewell_counts_at_once(desk: Desk) -> None:
    desk.join(A)
    gone = desk.served.rounds.roster.away
    (reply,) = desk.asked(A, Push(to=THE_SERVER, key=LEAVE, stamp=Stamp(0, 0)))
    assert isinstance(reply.answer, Receipt)
    assert gone == {0}
    desk.told(PeerLeft(moment=1.0, peer=A))
    assert not desk.served.reception._absent


def test_what_a_device_asks_now_is_all_that_it_waits_for(desk: Desk) -> None:
    desk.join(A)
    for _ in range(100):
        assert desk.asks(A) == []
    assert len(desk.served.rounds.roster.waiting[0]) == 1


def test_a_full_disk_keeps_newcomers_out_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = server("FedAvg(fraction=0.5)", clients=2, rounds=3, journal=tmp_path)
    desk = Desk(served)
    desk.join(A)

    def full(path: Path, pieces: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_file", full)
        for each in (B, C, B):
            assert "no room" in desk.join(each).refused
        task = desk.task(A)
        assert task is not None
        assert desk.reports(A, 0, task, 1.0) == [1]
    said = [record.message for record in caplog.records if "No further device can join" in record.message]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert desk.join(B).number == 1, "there is room again"
    served.close()
    assert Enrollment(2, tmp_path / "enrollment.json").number(B.number) == 1


def test_a_newcomer_takes_no_number_whose_device_may_be_back() -> None:
    """For each device: what it gave was counted. Were its number another's, nobody could hear of its work any more."""
    served = server("FedAvg(fraction=1.0)", clients=2, rounds=3, absent_seconds=100.0)
    desk, before = Desk(served), served.rounds.model.parameters.clone()
    numbers = {each: desk.join(each).number for each in (A, B)}
    desk.asks(A)
    desk.asks(B)
    tasks = {each: desk.task(each) for each in (A, B)}
    given = {A: 2.0, B: 4.0}
    desk.told(PeerLeft(moment=1.0, peer=A))
    assert "may return" in desk.join(C, 2.0).refused
    desk.told(PeerJoined(moment=3.0, peer=A))
    receipts: list[int] = []
    for each in (A, B):
        task = tasks[each]
        assert task is not None
        receipts += desk.reports(each, numbers[each], task, given[each], 3.0)
    assert receipts == [1, 1]
    assert torch.allclose(before - served.rounds.model.parameters, torch.tensor(sum(given.values()) / 2).double())
    desk.told(PeerLeft(moment=4.0, peer=A))
    assert "may return" in desk.join(C, 103.0).refused
    desk.told(Elapsed(moment=104.0))
    assert desk.join(C, 105.0).number == numbers[A]
    served.close()


def test_a_device_that_sends_a_byte_now_and_then_holds_nothing_up() -> None:
    """One proves the token and begins a part that never ends; the other's rounds are made."""
    served = server("FedAvg(fraction=0.5)", clients=2, rounds=3)
    serving = served.start()
    state = served.rounds.model.state
    credentials = Credentials(
        me=A, token=TOKEN, run=RUN, layout=state.fingerprint, largest_frame_bytes=largest_frame_bytes(state)
    )
    connection = ConnectionState(credentials, THE_SERVER)
    with socket.create_connection(served.address, timeout=10) as slow:
        while connection.authenticated is None:
            for each in connection.control_frames():
                slow.sendall(each)
            list(connection.receive_data(slow.recv_into(connection.receive_buffer())))
        for each in connection.control_frames():
            slow.sendall(each)
        part = Push(to=THE_SERVER, key=PART, stamp=Stamp(0, 0), payload=(torch.zeros(10_000),), about="0")
        slow.sendall(next(iter(connection.send(encode_ask(part, 1))))[:-1])
        device = join(served.address)
        assert device.ended() == 3
        slow.sendall(b"x")
    serving.wait(10)
    served.close()


def test_numbers_stay_with_their_devices(tmp_path: Path) -> None:
    path = tmp_path / "enrollment.json"
    first = Enrollment(4, path)
    assert [first.admit(device, wanted, ()) for device, wanted in ((70, None), (71, 2), (72, None), (70, None))] == [
        0, 2, 1, 0,
    ]  # fmt: skip
    again = Enrollment(4, path)
    assert [again.number(device) for device in (70, 71, 72, 73)] == [0, 2, 1, None]


def test_a_number_has_one_device() -> None:
    numbers = Enrollment(2)
    numbers.admit(70, 0, ())
    with pytest.raises(ConnectError, match="Client 0 is connected already"):
        numbers.admit(71, 0, {70})
    assert numbers.admit(71, 0, ()) == 0  # the other was away: perhaps it lost its state
    assert numbers.number(70) is None
    assert numbers.admit(70, None, {71}) == 1
    with pytest.raises(ConnectError, match="All 2 clients"):
        numbers.admit(72, None, {70, 71})
    assert numbers.admit(72, None, {71}) == 1
    with pytest.raises(ConnectError, match="no client 2 in a federation of 2"):
        numbers.admit(73, 2, ())


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "enrollment.json"
    path.write_text("[1, 2")
    with pytest.raises(CheckpointError, match="each other's numbers"):
        Enrollment(2, path)


def test_a_number_whose_device_may_be_back_is_for_who_asks_for_it() -> None:
    numbers = Enrollment(2)
    for device in (70, 71):
        numbers.admit(device, None, ())
    with pytest.raises(ConnectError, match=r"All 2 clients .* may return"):
        numbers.admit(72, None, {71}, kept={0})
    assert numbers.admit(72, None, {71}, kept={1}) == 0
    assert numbers.admit(70, 0, {71}, kept={0, 1}) == 0


def test_what_cannot_be_kept_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "enrollment.json"
    numbers = Enrollment(2, path)
    numbers.admit(70, None, ())
    path.unlink()
    path.mkdir()
    (path / "file").touch()  # nothing can take its place
    for wanted in (None, 0):
        with pytest.raises(CheckpointError, match="cannot be written"):
            numbers.admit(71, wanted, ())
    assert [numbers.number(device) for device in (70, 71)] == [0, None]
    assert numbers.admit(70, None, ()) == 0
