"""Endpoints on loopback: what is asked is answered, whatever happens to connections; who is gone is missed in time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.proxy import between
from torch import Tensor

from gossamer import events
from gossamer.core.peer_ops import (
    SERVER,
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
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.environment.run_settings import run_tls
from gossamer.errors import ConnectError, MismatchError, PeerLost
from gossamer.transports.rpc import connection_pool
from gossamer.transports.rpc.endpoint import TcpEndpoint, run_peer_script
from gossamer.transports.rpc.peer_state import PeerState
from gossamer.transports.rpc.sockets import Tls, find

HERE, THERE, OTHER = Peer(WORKER, 1), Peer(SERVER, 0), Peer(SERVER, 1)
TOKEN = bytes(range(32))
DEAD_SECONDS = 0.5
SLACK_SECONDS = 0.5
Open = Callable[..., TcpEndpoint]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens endpoints that are closed after the test."""
    endpoints: list[TcpEndpoint] = []

    def open_(me: Peer, **other: Any) -> TcpEndpoint:
        standard = {"token": TOKEN, "run": "run", "recipe": "Dense()", "layout": "abcd", "dead_after_seconds": 5.0}
        endpoint = TcpEndpoint(me, **{**standard, "largest_frame_bytes": 2**24, **other})
        endpoints.append(endpoint)
        return endpoint

    yield open_
    for endpoint in endpoints:
        endpoint.close()


def counting(heard: list[PeerEvent] | None = None) -> PeerScript:
    """A server that adds up every contribution once, whoever brings it."""
    total, taken = torch.zeros(1), set[Stamp]()
    while True:
        event = yield Await()
        if heard is not None:
            heard.append(event)
        match event:
            case Arrived(token=token, op=Push(stamp=stamp, payload=payload)):
                if stamp not in taken:
                    total = total + payload[0].double().sum()
                taken.add(stamp)
                yield Reply(token=token, answer=Receipt(version=len(taken), payload=(total,)))
            case Arrived(token=token, op=Pull()):
                yield Reply(token=token, answer=Pulled(version=len(taken), payload=(total,), about="total"))


def push(step: int, payload: Tensor, to: Peer = THERE, within_seconds: float | None = 20.0) -> Push:
    return Push(to=to, key="", stamp=Stamp(1, step), payload=(payload,), within_seconds=within_seconds)


def next_of(endpoint: TcpEndpoint, kind: type[PeerEvent], within_seconds: float = 10.0) -> Any:
    until = time.monotonic() + within_seconds
    while True:
        heard = endpoint.answer(Await(until=until))
        assert not isinstance(heard, Elapsed), f"no {kind.__name__} within {within_seconds} s"
        if isinstance(heard, kind):
            return heard


# -- words ---------------------------------------------------------------------------------------------


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
    _wait_until(lambda: said.payload_bytes_received == heard.payload_bytes_sent)  # counted once it is gone
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

    assert "server 0 did not answer worker 1 within" in run_peer_script(patient(), worker)

    def careless() -> PeerScript:
        yield AtOnce((Pull(of=THERE, key=""), Pull(of=OTHER, key="", within_seconds=0.02)))

    with pytest.raises(PeerLost, match="server 1 did not answer"):
        worker.start(careless()).wait(10)
    started = worker.answer(Await(until=-1.0))
    assert isinstance(started, Elapsed)
    assert started.moment <= time.monotonic()


def check_hears_why(why: ConnectError | None, expected: type[Exception]) -> None:
    """Whoever waits when an endpoint is closed, and whoever asks afterwards."""
    standard: Any = {"token": TOKEN, "run": "run", "recipe": "", "layout": "", "largest_frame_bytes": 2**20}
    worker = TcpEndpoint(HERE, **standard)
    waits = worker.start(_asking_once())
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
    with pytest.raises(ValueError, match=r"write largest_frame_bytes=\d+"):
        worker.answer(push(0, torch.ones(1000)))
    with pytest.raises(ValueError, match="asks itself"):
        worker.answer(Pull(of=HERE, key=""))
    with pytest.raises(TypeError, match="no word of peers"):
        worker.answer("hello")  # type: ignore[arg-type]


# -- who does not belong here ------------------------------------------------------------------------


def test_another_recipe_is_refused_at_both_ends_with_both_values(opened: Open, notices: list[str]) -> None:
    server, worker = opened(THERE), opened(HERE, recipe="OneBit()")
    worker.meet({THERE: server.address})
    start = time.monotonic()
    with pytest.raises(MismatchError, match=r"(?s)'OneBit\(\)' here, 'Dense\(\)' at server 0"):
        worker.answer(push(0, torch.ones(1), within_seconds=None))
    assert time.monotonic() - start < 2
    _wait_until(lambda: bool(notices))
    assert "'Dense()' here, 'OneBit()' at worker 1" in notices[0]


def test_another_token_is_refused(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE, token=bytes(32))
    worker.meet({THERE: server.address})
    with pytest.raises(ConnectError, match="holds another token"):
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
        with pytest.raises(ConnectError, match="Another program answers"):
            worker.answer(push(0, torch.ones(1), within_seconds=None))
        thread.join()


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
            assert stranger.recv(100) == b""


def test_there_is_room_for_a_few_strangers_at_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "STRANGERS", 3)
    server = opened(THERE)
    strangers = [socket.create_connection(server.address, timeout=5) for _ in range(5)]
    assert [stranger.recv(1) for stranger in strangers[:2]] == [b"", b""]
    for stranger in strangers:
        stranger.close()


def test_a_taken_port_is_said_at_once(opened: Open) -> None:
    first = opened(THERE)
    with pytest.raises(ConnectError, match=r"Port \d+ of 127.0.0.1 is taken.*port=0"):
        opened(OTHER, port=first.address[1])


def test_nobody_listens_to_the_world_without_a_secret(opened: Open) -> None:
    with pytest.raises(ConnectError, match="A token of 3 bytes keeps nobody out"):
        opened(THERE, token=b"abc", address="0.0.0.0")
    opened(THERE, token=b"abc")


# -- connections that break ----------------------------------------------------------------------------


def test_a_word_cut_in_its_middle_is_said_again(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    heard: list[PeerEvent] = []
    server.start(counting(heard))
    with between(server.address, [300_000, 30, 500_000]) as proxy:
        worker.meet({THERE: proxy.address})
        receipt = worker.answer(push(0, torch.arange(250_000)))
        assert receipt.payload[0].item() == float(torch.arange(250_000).double().sum().float())
        assert proxy.connections == 4
        assert len([event for event in heard if isinstance(event, Arrived)]) == 1
        assert len([event for event in heard if isinstance(event, (PeerJoined, PeerLeft))]) == 1
        assert worker.statistics()[THERE].reconnects == 2


def test_who_does_not_say_it_again_waits_in_vain(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(peer_state: PeerState) -> None:
        peer_state._parcels.clear()

    monkeypatch.setattr(PeerState, "ask_again", forget)
    server, worker = opened(THERE), opened(HERE)
    server.start(counting())
    with between(server.address, [300_000]) as proxy:
        worker.meet({THERE: proxy.address})
        with pytest.raises(PeerLost):
            worker.answer(push(0, torch.arange(250_000), within_seconds=0.5))


@pytest.mark.parametrize("seed", [1, 2])
def test_everything_is_done_once_however_often_connections_break(opened: Open, seed: int) -> None:
    draw = random.Random(seed)
    server, worker = opened(THERE), opened(HERE)
    server.start(counting())
    cuts = [draw.randrange(1, 30_000) for _ in range(15)]
    with between(server.address, cuts) as proxy:
        worker.meet({THERE: proxy.address})
        for step in range(10):
            ops = tuple(push(3 * step + part, torch.full((1000,), step)) for part in range(3))
            worker.answer(AtOnce(ops))
        total = worker.answer(Pull(of=THERE, key=""))
        assert (total.version, total.payload[0].item()) == (30, 3 * 1000 * 45)
        assert proxy.connections > 2


def test_a_half_open_connection_is_found_and_made_anew(opened: Open) -> None:
    server = opened(THERE, dead_after_seconds=DEAD_SECONDS)
    worker = opened(HERE, dead_after_seconds=DEAD_SECONDS)
    with between(server.address) as proxy:
        worker.meet({THERE: proxy.address})
        asking = worker.start(_asking_once())
        arrived = next_of(server, Arrived)
        server.answer(Reply(token=arrived.token, answer=Receipt(version=1)))
        asking.wait(10)
        next_of(worker, PeerJoined)
        proxy.hold_all()
        start = time.monotonic()
        for end in (server, worker):
            assert next_of(end, PeerLeft).moment - start < DEAD_SECONDS + SLACK_SECONDS
        asking = worker.start(_asking_once())
        proxy.heal()
        assert next_of(server, PeerJoined).peer == HERE
        server.answer(Reply(token=next_of(server, Arrived).token, answer=Receipt(version=2)))
        assert asking.wait(10).version == 2


def _asking_once(payload: Tensor | None = None) -> PeerScript:
    return (yield push(0, torch.ones(1) if payload is None else payload))


def test_a_connection_that_breaks_while_somebody_waits_in_flight_is_replaced(opened: Open) -> None:
    server, worker = opened(THERE, dead_after_seconds=0.3), opened(HERE, dead_after_seconds=0.3)
    server.start(counting())
    with between(server.address) as proxy:
        worker.meet({THERE: proxy.address})
        worker.answer(push(0, torch.ones(1)))
        proxy.hold()
        start = time.monotonic()
        assert worker.answer(push(1, torch.ones(2**18))).version == 2
        assert time.monotonic() - start < 0.3 + SLACK_SECONDS


def test_a_peer_that_does_not_read_holds_up_nobody_else_and_gives_memory_back(opened: Open) -> None:
    slow, quick = opened(THERE), opened(OTHER)
    worker = opened(HERE, queue_bytes=2**21)
    slow.start(counting())
    quick.start(counting())
    with between(slow.address) as proxy:
        worker.meet({THERE: proxy.address, OTHER: quick.address})
        worker.answer(push(0, torch.ones(1)))
        proxy.hold_all()
        payloads = [torch.ones(2**20) for _ in range(6)]
        stuck = [worker.start(_asking_of(step + 1, payload)) for step, payload in enumerate(payloads)]
        for step in range(20):
            assert worker.answer(push(step, torch.ones(2**10), to=OTHER)).version == step + 1
        lost = payloads[0].clone()
        with pytest.raises(PeerLost):
            worker.answer(push(99, lost, within_seconds=0.05))
        lost.fill_(float("nan"))
        assert not any(handle.landed() for handle in stuck)
        proxy.heal()
        for handle in stuck:
            handle.wait(20)
        assert worker.answer(Pull(of=THERE, key="")).payload[0].item() in (1 + 6 * 2**20, 1 + 7 * 2**20)
        assert worker.statistics()[THERE].blocked_seconds > 0
        assert worker.statistics()[OTHER].blocked_seconds == 0


def _asking_of(step: int, payload: Tensor) -> PeerScript:
    return (yield push(step, payload))


def test_a_peer_that_has_moved_is_dialled_where_it_is_now(opened: Open) -> None:
    """Where it was, nothing is accepted or refused any more."""
    server, worker = opened(THERE), opened(HERE, dead_after_seconds=DEAD_SECONDS)
    server.start(counting())
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, ExitStack() as full:
        for _ in range(3):
            filling = full.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(deaf.getsockname())
        worker.meet({THERE: deaf.getsockname()})
        asking = worker.start(_asking_once())
        start = time.monotonic()
        worker.meet({THERE: server.address})
        assert asking.wait(10).version == 1
        assert time.monotonic() - start < DEAD_SECONDS + SLACK_SECONDS


def test_names_are_looked_up_where_they_are_listened_to() -> None:
    assert find(("localhost", 7)) == ("localhost", ("127.0.0.1", 7))
    assert find(("::1", 7)).address == ("::1", 7)


def test_nobody_knows_where_it_is(opened: Open) -> None:
    with pytest.raises(ConnectError, match=r"Nobody knows a machine named 'no-such-machine\.invalid'"):
        opened(HERE).meet({THERE: ("no-such-machine.invalid", 1)})


# -- peers that come and go ----------------------------------------------------------------------------


def test_who_says_goodbye_has_left_at_once(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    worker.meet({THERE: server.address})
    asking = worker.start(_asking_once())
    server.answer(Reply(token=next_of(server, Arrived).token, answer=Receipt(version=1)))
    assert asking.wait(10).version == 1  # though nothing is read after it
    start = time.monotonic()
    worker.close()
    assert next_of(server, PeerLeft).peer == HERE
    assert time.monotonic() - start < 2.5  # of the 5 after which silence counts


def test_a_server_that_is_started_anew_hears_what_was_not_answered(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    port = server.address[1]
    worker.meet({THERE: server.address})
    asking = worker.start(_asking_once(torch.arange(4.0)))
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
    worker.start(_asking_once())
    old = next_of(server, Arrived)
    worker.close()
    again = opened(HERE)
    again.meet({THERE: server.address})
    asking = again.start(_asking_once())
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
    worker.start(_asking_once())
    next_of(server, Arrived)
    heard = server.answer(Await(until=time.monotonic() + 0.7))
    assert isinstance(heard, Elapsed if heartbeat_seconds is None else PeerLeft)


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


def test_who_is_stopped_or_killed_is_missed_in_time_and_not_before(opened: Open) -> None:
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
    handles = [worker.start(_asking_once()), server.start(_awaiting())]
    unheard = worker.start(_asking_to(OTHER))
    next_of(worker, PeerJoined)
    for endpoint in (worker, server):
        endpoint.close()
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


def test_a_forked_child_says_nothing_and_holds_nothing(opened: Open) -> None:
    server, worker = opened(THERE), opened(HERE)
    server.start(counting())
    worker.meet({THERE: server.address})
    worker.answer(push(0, torch.ones(1)))
    reading, writing = os.pipe()
    sockets = len(_sockets())

    def ask() -> None:
        try:
            worker.answer(push(1, torch.ones(1)))
        except PeerLost as lost:
            os.write(writing, f"{len(_sockets())} {lost}".encode())
        worker.close()

    os.waitpid(forked(ask), 0)
    said = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    assert sockets >= 8
    assert said.startswith("0 The endpoint of worker 1 was closed")
    assert worker.answer(push(1, torch.ones(1))).version == 2
    assert worker.statistics()[THERE].reconnects == 0


def _sockets() -> list[str]:
    names = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in names if name.startswith("socket:")]


# -- encrypted -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    making = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    command = [*making.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


def encrypted(certificate: Path, trusted: Path | None) -> Tls:
    accepting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    accepting.load_cert_chain(certificate)
    return Tls(dialling=ssl.create_default_context(cafile=trusted), accepting=accepting)


def test_words_travel_encrypted_whatever_their_size(opened: Open, certificate: Path) -> None:
    tls = encrypted(certificate, certificate)
    server, worker = opened(THERE, tls=tls), opened(HERE, tls=tls)
    server.start(counting())
    with between(server.address, [100, 700_000]) as proxy:
        worker.meet({THERE: proxy.address})
        for step, numel in enumerate((1, 5000, 2**20, 2**21)):
            assert worker.answer(push(step, torch.ones(numel))).version == step + 1
        assert proxy.connections == 3


def test_a_certificate_nobody_vouches_for_is_refused(opened: Open, certificate: Path) -> None:
    server = opened(THERE, tls=encrypted(certificate, None))
    worker = opened(HERE, tls=encrypted(certificate, None))
    worker.meet({THERE: server.address})
    with pytest.raises(ConnectError, match="certificate of whoever answers"):
        worker.answer(push(0, torch.ones(1), within_seconds=None))


def of_folder(folder: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Tls:
    folder.mkdir()
    for name in ("cert.pem", "key.pem", "ca.pem"):
        shutil.copy(certificate, folder / name)
    monkeypatch.setenv("GOSSAMER_TLS", str(folder))
    contexts = run_tls()
    assert contexts is not None
    return Tls(*contexts)


def test_a_folder_of_certificates_encrypts_a_run(
    opened: Open, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = of_folder(tmp_path / "ours", certificate, monkeypatch)
    server, worker = opened(THERE, tls=tls), opened(HERE, tls=tls)
    server.start(counting())
    worker.meet({THERE: server.address})
    assert worker.answer(push(0, torch.ones(5000))).version == 1


def test_who_shows_no_certificate_of_the_authority_is_not_heard(
    opened: Open, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = opened(THERE, tls=of_folder(tmp_path / "ours", certificate, monkeypatch))
    server.start(counting())
    stranger = opened(HERE, tls=encrypted(certificate, certificate)._replace(dialling=without_certificate(certificate)))
    stranger.meet({THERE: server.address})
    with pytest.raises((ConnectError, PeerLost)):
        stranger.answer(push(0, torch.ones(1), within_seconds=5.0))


def without_certificate(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority)


def test_a_folder_without_certificates_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_TLS", str(tmp_path))
    with pytest.raises(ConnectError, match=r"cert\.pem, key\.pem and ca\.pem"):
        run_tls()


# -- helpers -------------------------------------------------------------------------------------------


@pytest.fixture
def notices() -> Iterator[list[str]]:
    heard: list[str] = []
    end = events.subscribe(lambda event: heard.append(event.message) if isinstance(event, events.Noticed) else None)
    yield heard
    end()


def _wait_until(condition: Callable[[], bool], within_seconds: float = 10.0) -> None:
    until = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < until
        threading.Event().wait(0.01)
