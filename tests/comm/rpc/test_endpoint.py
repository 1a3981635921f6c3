"""Endpoints on loopback: asks are answered, strangers are refused, and closing frees everything."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from support.on_path import forging
from support.rpc_endpoints import (
    DEAD_SECONDS,
    HERE,
    OTHER,
    SLACK_SECONDS,
    THERE,
    Open,
    asking_once,
    counting,
    endpoint,
    next_of,
    push,
    wait_until,
)

from gossamer import events
from gossamer.base.peer_ops import (
    WORKER,
    Arrived,
    AtOnce,
    Await,
    Elapsed,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    PeerScript,
    Pull,
    Push,
    Receipt,
    Reply,
)
from gossamer.comm.handshake import HEADER_BYTES, NONCE_BYTES
from gossamer.comm.rpc import dispatcher
from gossamer.comm.rpc.endpoint import run_peer_script
from gossamer.comm.rpc.mailbox import Batch
from gossamer.errors import ConnectError, MismatchError, PeerLost


def test_words_are_answered_and_counted_to_the_byte(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    server.start(counting())
    worker.meet({THERE: server.address, HERE: worker.address})
    receipt = worker.answer(push(0, torch.ones(100)))
    assert (receipt.version, receipt.payload[0].tolist()) == (1, [100.0])
    first, again, pulled = worker.answer(
        AtOnce((push(1, torch.ones(3)), push(0, torch.ones(100)), Pull(of=THERE, key="")))
    )
    assert {first.version, again.version} == {2}
    assert (pulled.about, pulled.payload[0].tolist()) == ("total", [103.0])
    said, heard = worker.statistics()[THERE], server.statistics()[HERE]
    wait_until(lambda: said.payload_bytes_received == heard.payload_bytes_sent)  # counted once it is gone
    assert said.payload_bytes_sent == heard.payload_bytes_received == 400 + 16 + 400
    assert said.payload_bytes_received == heard.payload_bytes_sent == 4 * 8
    assert said.overhead_bytes_sent == heard.overhead_bytes_received > 4 * 48
    assert said.reconnects == heard.reconnects == 0


def test_many_threads_ask_at_once_and_each_hears_its_own(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)

    def echo() -> PeerScript:
        while True:
            event = yield Await()
            if isinstance(event, Arrived):
                assert isinstance(event.op, Push)
                yield Reply(token=event.token, answer=Receipt(version=0, payload=event.op.payload))

    server.start(echo())
    worker.meet({THERE: server.address})

    def ask(number: int) -> PeerScript:
        for turn in range(20):
            sent = torch.full((number * 1000,), number + turn)
            receipt = yield push(turn, sent)
            assert torch.equal(receipt.payload[0], sent)
        return number

    handles = [worker.start(ask(number)) for number in range(8)]
    assert [handle.wait(20) for handle in handles] == list(range(8))
    assert all(handle.landed() for handle in handles)


def test_two_that_dial_each_other_at_once_keep_one_connection(opened: Open) -> None:
    for _ in range(5):
        ends = [opened(Peer(WORKER, number)) for number in range(2)]
        for end in ends:
            end.start(counting())
            end.meet({other.me: other.address for other in ends})
        handles = [end.start(_asking(ends[1 - number].me)) for number, end in enumerate(ends)]
        assert [handle.wait(20) for handle in handles] == [10, 10]
        for end in ends:
            end.close()


def _asking(peer: Peer) -> PeerScript:
    for step in range(10):
        yield push(step, torch.ones(2), to=peer)
    return 10


def test_a_script_hears_at_its_yield_that_nobody_answers_and_may_continue(opened: Open) -> None:
    worker = opened(HERE)

    def patient() -> PeerScript:
        try:
            yield push(0, torch.ones(1), within_seconds=0.02)
        except PeerLost as lost:
            return str(lost)

    assert "server 0 did not answer worker 1 in time" in run_peer_script(patient(), worker)

    def careless() -> PeerScript:
        yield AtOnce((Pull(of=THERE, key=""), Pull(of=OTHER, key="", within_seconds=0.02)))

    with pytest.raises(PeerLost, match="server 1 did not answer"):
        worker.start(careless()).wait(10)
    started = worker.answer(Await(until=-1.0))
    assert isinstance(started, Elapsed)
    assert started.moment <= time.monotonic()


def check_hears_why(why: ConnectError | None, expected: type[Exception]) -> None:
    """Whoever waits when an endpoint is closed, and whoever asks afterwards."""
    worker = endpoint(HERE)
    waits = worker.start(asking_once())
    listens = worker.start(counting())
    worker.close(why)
    for handle in (waits, listens):
        with pytest.raises(expected, match="nobody came" if why else "was closed"):
            handle.wait(10)
    with pytest.raises(expected):
        worker.answer(push(1, torch.ones(1)))


def test_an_endpoint_that_is_closed_gives_the_reason() -> None:
    check_hears_why(ConnectError("nobody came"), ConnectError)
    check_hears_why(None, PeerLost)


def test_what_cannot_be_said_is_refused_before_it_is_sent(opened: Open) -> None:
    worker = opened(HERE, largest_frame_bytes=1000)
    with pytest.raises(ValueError, match=r"[Ss]et largest_frame_bytes=\d+"):
        worker.answer(push(0, torch.ones(1000)))
    with pytest.raises(ValueError, match="a request to itself"):
        worker.answer(Pull(of=HERE, key=""))
    with pytest.raises(TypeError, match="not an op"):
        worker.answer("hello")  # type: ignore[arg-type]


def test_promise_11_another_recipe_is_refused_at_both_ends_with_both_values(opened: Open, notices: list[str]) -> None:
    server, worker = opened(THERE), opened(HERE, recipe="OneBit()")
    worker.meet({THERE: server.address})
    start = time.monotonic()
    with pytest.raises(MismatchError, match=r"(?s)'OneBit\(\)' here, 'Dense\(\)' at server 0"):
        worker.answer(push(0, torch.ones(1), within_seconds=None))
    assert time.monotonic() - start < 10
    wait_until(lambda: bool(notices))
    assert "'Dense()' here, 'OneBit()' at worker 1" in notices[0]


def test_another_token_is_refused(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE, token=bytes(32))
    worker.meet({THERE: server.address})
    with pytest.raises(ConnectError, match="another token"):
        worker.answer(push(0, torch.ones(1), within_seconds=None))
    assert isinstance(server.answer(Await(until=0.0)), Elapsed)


def test_another_program_at_the_address_is_named(opened: Open) -> None:
    worker = opened(HERE)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            for _ in range(3):
                connection, _ = other.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request, and what else such servers say\r\n\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        worker.meet({THERE: other.getsockname()})
        with pytest.raises(ConnectError, match=r"The program at .* is not "):
            worker.answer(push(0, torch.ones(1), within_seconds=None))
        thread.join()


CHALLENGE_BYTES = HEADER_BYTES + NONCE_BYTES


def test_strangers_disturb_nobody_and_are_shown_out(opened: Open) -> None:
    server, worker = opened(THERE, dead_after_seconds=DEAD_SECONDS), opened(HERE)
    server.start(counting())
    worker.meet({THERE: server.address})
    strangers = [socket.create_connection(server.address) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\nAccept: */*\r\n\r\n")
    strangers[1].sendall(b"GSMR\x01")
    assert worker.answer(push(0, torch.ones(4))).version == 1
    for stranger in strangers:
        stranger.settimeout(5)
        with stranger, suppress(ConnectionResetError):
            assert len(stranger.recv(100, socket.MSG_WAITALL)) == CHALLENGE_BYTES


def test_there_is_room_for_a_few_strangers_at_once(opened: Open) -> None:
    server = opened(THERE, most_handshakes=3)
    strangers = [socket.create_connection(server.address, timeout=5) for _ in range(5)]
    read = [stranger.recv(100, socket.MSG_WAITALL) for stranger in strangers[:2]]
    assert list(map(len, read)) == 2 * [CHALLENGE_BYTES]  # and no more
    for stranger in strangers:
        stranger.close()


def test_a_peer_that_asks_too_much_at_once_is_cut_off(opened: Open, notices: list[str]) -> None:
    silent, greedy, modest = opened(THERE, most_asks=3), opened(HERE), opened(OTHER)
    for each, asks in ((modest, 3), (greedy, 4)):
        each.meet({THERE: silent.address})
        for step in range(asks):
            each.start(asking_once(torch.full((1,), float(step))))
    wait_until(lambda: any("exceeded the limit of 3" in text for text in notices))
    assert all(str(HERE) in text for text in notices)
    assert [len(peer.outstanding) for peer in modest._dispatcher._peer_states.values()] == [3]


def test_a_server_accepts_less_than_it_sends(opened: Open, notices: list[str]) -> None:
    server, worker = opened(THERE, accepted_frame_bytes=1000), opened(HERE)
    server.start(counting())
    worker.meet({THERE: server.address})
    assert worker.answer(push(0, torch.ones(10))).version == 1
    with pytest.raises(PeerLost):
        worker.answer(push(1, torch.ones(1000), within_seconds=0.5))
    assert any("limit is 1000" in text for text in notices)


def test_a_process_without_file_descriptors_serves_those_that_are_there(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    server.start(counting())
    worker.meet({THERE: server.address})
    worker.answer(push(0, torch.ones(1)))
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    try:
        waiting = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, before[1]))
        waiting.connect(server.address)
        began = time.process_time()
        assert worker.answer(push(1, torch.ones(1))).version == 2
        threading.Event().wait(0.3)
        assert time.process_time() - began < 0.25  # it does not ask again and again
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(taken)
        waiting.close()


def test_promise_14_a_taken_port_is_said_at_once(opened: Open) -> None:
    first = opened(THERE)
    with pytest.raises(ConnectError, match=r"Port \d+ of 127.0.0.1 is in use.*port=0"):
        opened(OTHER, port=first.address[1])


def test_nobody_listens_to_the_world_without_a_secret(opened: Open) -> None:
    with pytest.raises(ConnectError, match="A token of 3 bytes is too short"):
        opened(THERE, token=b"abc", address="0.0.0.0")
    opened(THERE, token=b"abc")


@pytest.fixture
def notices() -> Iterator[list[str]]:
    heard: list[str] = []
    end = events.subscribe(lambda event: heard.append(event.message) if isinstance(event, events.Noticed) else None)
    yield heard
    end()


# -- goodbyes, restarts, stopped and killed processes, forks -----------------------------------------------------------


def test_who_says_goodbye_has_left_at_once(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    worker.meet({THERE: server.address})
    asking = worker.start(asking_once())
    server.answer(Reply(token=next_of(server, Arrived).token, answer=Receipt(version=1)))
    assert asking.wait(10).version == 1  # though nothing is read after it
    start = time.monotonic()
    worker.close()
    assert next_of(server, PeerLeft).peer == HERE
    assert time.monotonic() - start < 4  # of the 5 after which silence counts


def test_a_server_that_is_started_again_hears_what_was_not_answered(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    port = server.address[1]
    worker.meet({THERE: server.address})
    asking = worker.start(asking_once(torch.arange(4.0)))
    first = next_of(server, Arrived)
    server.close()
    again = opened(THERE, port=port)
    second = next_of(again, Arrived)
    assert torch.equal(second.op.payload[0], first.op.payload[0])
    again.answer(Reply(token=second.token, answer=Receipt(version=8)))
    assert asking.wait(10).version == 8
    assert [type(worker.answer(Await())) for _ in range(3)] == [PeerJoined, PeerLeft, PeerJoined]


def test_an_answer_for_a_life_that_ended_does_not_reach_the_next(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    worker.meet({THERE: server.address})
    worker.start(asking_once())
    old = next_of(server, Arrived)
    worker.close()
    again = opened(HERE)
    again.meet({THERE: server.address})
    asking = again.start(asking_once())
    new = next_of(server, Arrived)
    server.answer(Reply(token=old.token, answer=Receipt(version=-7)))
    server.answer(Reply(token=new.token, answer=Receipt(version=1)))
    server.answer(Reply(token=new.token, answer=Receipt(version=-7)))
    assert asking.wait(10).version == 1


@pytest.mark.parametrize("heartbeat_seconds", [None, 100.0], ids=["beats", "silent"])
def test_who_computes_for_long_is_still_here_as_long_as_its_heart_beats(
    opened: Open, heartbeat_seconds: float | None
) -> None:
    server = opened(THERE, dead_after_seconds=0.3)
    worker = opened(HERE, dead_after_seconds=0.3, heartbeat_seconds=heartbeat_seconds)
    worker.meet({THERE: server.address})
    worker.start(asking_once())
    next_of(server, Arrived)
    heard = server.answer(Await(until=time.monotonic() + 0.7))
    assert isinstance(heard, Elapsed if heartbeat_seconds is None else PeerLeft)


def test_peers_of_a_suspended_job_are_still_here_when_it_continues(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, worker = opened(THERE), opened(HERE)
    heard: list[PeerEvent] = []
    server.start(counting(heard))
    worker.meet({THERE: server.address})
    worker.answer(push(0, torch.ones(1)))
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1e6)
    ticks = time.monotonic() + 1.0  # several of both ends
    assert isinstance(worker.answer(Await(until=ticks)), PeerJoined)
    assert isinstance(worker.answer(Await(until=ticks)), Elapsed)
    assert worker.answer(push(1, torch.ones(1))).version == 2
    assert worker.statistics()[THERE].reconnects == 0
    assert [type(event) for event in heard] == [PeerJoined, Arrived, Arrived]


def test_a_request_of_a_suspended_job_has_as_much_time_as_without_the_pause(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait with a timeout ends when the process continues."""
    server, worker = opened(THERE), opened(HERE)
    worker.meet({THERE: server.address})
    clock, wait, waits = time.monotonic, Batch.wait, list[float]()

    def short_wait(batch: Batch, until: float) -> bool:
        waits.append(until)
        return wait(batch, min(until, time.monotonic() + 0.05))

    monkeypatch.setattr(Batch, "wait", short_wait)
    asked = worker.start(asking_once())
    token = next_of(server, Arrived).token
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1e6)
    wait_until(lambda: len(waits) > 4 and waits[-1] == waits[-4] > clock() + 1e6)
    server.answer(Reply(token=token, answer=Receipt(version=1)))
    assert asked.wait(10).version == 1


def test_a_peer_that_does_not_continue_with_the_others_leaves(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    server = opened(THERE, dead_after_seconds=DEAD_SECONDS)
    worker = opened(HERE, heartbeat_seconds=1e9)
    worker.meet({THERE: server.address})
    worker.start(asking_once())
    next_of(server, Arrived)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1e6)
    assert next_of(server, PeerLeft).peer == HERE


def forked(work: Callable[[], object]) -> int:
    """The number of a child that does this and nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return child


def test_promise_4_who_is_stopped_or_killed_is_missed_in_time_and_not_before(opened: Open) -> None:
    server = opened(THERE, dead_after_seconds=DEAD_SECONDS)

    def ask() -> None:
        worker = opened(HERE, dead_after_seconds=DEAD_SECONDS)
        worker.meet({THERE: server.address})
        worker.answer(push(0, torch.ones(1), within_seconds=None))

    child = forked(ask)
    try:
        next_of(server, Arrived)
        os.kill(child, signal.SIGSTOP)
        pause = server.answer(Await(until=time.monotonic() + DEAD_SECONDS / 2))
        assert isinstance(pause, Elapsed)
        os.kill(child, signal.SIGCONT)
        assert isinstance(server.answer(Await(until=time.monotonic() + DEAD_SECONDS)), Elapsed)
        for blow in (signal.SIGSTOP, signal.SIGKILL):
            start = time.monotonic()
            os.kill(child, blow)
            left = next_of(server, PeerLeft)
            assert DEAD_SECONDS / 2 < left.moment - start < DEAD_SECONDS + SLACK_SECONDS
            if blow == signal.SIGSTOP:
                os.kill(child, signal.SIGCONT)
                assert next_of(server, PeerJoined).peer == HERE
                next_of(server, Arrived)  # it says again what was not answered
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_closing_frees_everything_and_everyone(opened: Open) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), threading.active_count()
    server, worker = opened(THERE), opened(HERE)
    worker.meet({THERE: server.address, OTHER: ("127.0.0.1", 9)})
    handles = [worker.start(asking_once()), server.start(_awaiting())]
    unheard = worker.start(_asking_to(OTHER))
    next_of(worker, PeerJoined)
    for each in (worker, server):
        each.close()
    for handle in (*handles, unheard):
        with pytest.raises(PeerLost, match="was closed"):
            handle.wait(0)
    with pytest.raises(PeerLost, match="was closed"):
        worker.answer(push(0, torch.ones(1)))
    assert (descriptors(), threading.active_count()) == (before, threads)
    worker.close()


def _awaiting() -> PeerScript:
    while True:
        yield Await(until=time.monotonic() + 100)


def _asking_to(peer: Peer) -> PeerScript:
    yield push(0, torch.ones(1), to=peer, within_seconds=None)


def test_a_forked_child_reports_nothing_and_holds_nothing(opened: Open) -> None:
    before = _sockets()
    server, worker = opened(THERE), opened(HERE)
    server.start(counting())
    worker.meet({THERE: server.address})
    worker.answer(push(0, torch.ones(1)))
    reading, writing = os.pipe()
    sockets = _sockets() - before

    def ask() -> None:
        try:
            worker.answer(push(1, torch.ones(1)))
        except PeerLost as lost:
            os.write(writing, f"{len(_sockets() & sockets)} {lost}".encode())
        worker.close()

    os.waitpid(forked(ask), 0)
    said = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    assert len(sockets) >= 8
    assert said.startswith("0 The endpoint of worker 1 was closed")
    assert worker.answer(push(1, torch.ones(1))).version == 2
    assert worker.statistics()[THERE].reconnects == 0


def _sockets() -> set[str]:
    names = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            names.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in names if name.startswith("socket:")}


@pytest.mark.parametrize("gone_when_closed", [True, False])
def test_a_connection_that_breaks_may_count_as_gone_at_once(opened: Open, gone_when_closed: bool) -> None:
    """And who lives is back at once."""
    server, worker = opened(THERE, gone_when_closed=gone_when_closed), opened(HERE)
    worker.meet({THERE: server.address})
    worker.start(asking_once())
    next_of(server, Arrived)
    (connection,) = worker._dispatcher._connections.connections
    connection.sock.shutdown(socket.SHUT_RDWR)
    kinds = [type(server.answer(Await(until=time.monotonic() + 2.0))) for _ in range(2)]
    assert kinds == ([PeerLeft, PeerJoined] if gone_when_closed else [Arrived, Elapsed])


# -- endpoints with somebody between them who changes what travels: nothing that was changed is taken ------------------


def thousands(payload: bytes) -> bytes:
    return struct.pack("<f", 1000.0) * (len(payload) // 4)


def test_a_push_that_is_changed_on_its_way_is_not_taken(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    server, worker = opened(THERE), opened(HERE)
    heard: list[PeerEvent] = []
    server.start(counting(heard))
    with forging(server.address, thousands) as between:
        worker.meet({THERE: between.address})
        with pytest.raises(PeerLost, match="did not answer"):
            worker.answer(push(0, torch.ones(10), within_seconds=0.5))
        assert between.forged >= 1
        assert not [event for event in heard if isinstance(event, Arrived)]
        between.forge = lambda payload: payload
        assert worker.answer(push(0, torch.ones(10))).payload[0].item() == 10.0
    assert "The connection to worker 1 is opened again. The payload of a frame does not match its tag" in (caplog.text)


def test_peers_that_left_are_forgotten_and_their_traffic_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MOST_DEPARTED", 2)
    with endpoint(THERE, gone_when_closed=True) as server:
        serving = server.start(counting())
        for number in range(1, 6):
            with endpoint(Peer(WORKER, number)) as worker:
                worker.meet({THERE: server.address})
                worker.start(asking_once()).wait(10)
        wait_until(lambda: len(server.statistics()) == 3)
        traffic = server.statistics()
        assert traffic.keys() == {Peer(WORKER, number) for number in (4, 5, dispatcher.FORGOTTEN)}
        one, three = (traffic[Peer(WORKER, number)].payload_bytes_received for number in (4, dispatcher.FORGOTTEN))
        assert three == 3 * one
        assert not serving.landed()
