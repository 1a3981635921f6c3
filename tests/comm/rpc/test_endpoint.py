"""Endpoints on loopback: asks are answered, strangers are refused, and closing frees everything."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from support.rpc_endpoints import (
    DEAD_SECONDS,
    HERE,
    OTHER,
    THERE,
    Open,
    asking_once,
    counting,
    endpoint,
    push,
    wait_until,
)

from gossamer import events
from gossamer.base.peer_ops import WORKER, Arrived, AtOnce, Await, Elapsed, Peer, PeerScript, Pull, Push, Receipt, Reply
from gossamer.comm.handshake import HEADER_BYTES, NONCE_BYTES
from gossamer.comm.rpc.endpoint import run_peer_script
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


def test_a_script_hears_at_its_yield_that_nobody_answers_and_may_go_on(opened: Open) -> None:
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


def test_an_endpoint_that_is_closed_says_why() -> None:
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


def test_who_asks_too_much_at_once_is_cut_off(opened: Open, notices: list[str]) -> None:
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
