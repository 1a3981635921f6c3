"""Peer endpoints whose servers never come, or are gone for good: no worker waits for ever, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import pytest
from support.virtual_workers import notices

from gossamer.base.peer_ops import SERVER, WORKER, Await, Peer, PeerScript
from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind, Untraced
from gossamer.base.spans.step_range import StepRange
from gossamer.comm.simulation import Trace, compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Cut, Fault, Kill, Pause, Restart, VirtualNetwork
from gossamer.errors import ConnectError, GossamerError, PeerLost
from gossamer.observe.trace.span_files import read_run
from gossamer.train.synchronizers import peer_endpoints
from gossamer.train.synchronizers.peer_endpoints import connect_to_servers, connect_workers, watch_servers

ME, FIRST, SECOND = Peer(WORKER, 0), Peer(SERVER, 0), Peer(SERVER, 1)
PLACES = {FIRST: ("127.0.0.1", 4321), SECOND: ("10.0.0.2", 4322)}


class Endpoint:
    """Remembers why it was closed."""

    def __init__(self) -> None:
        self.me, self.why = ME, list[GossamerError]()

    def close(self, why: GossamerError) -> None:
        self.why.append(why)


def deaf() -> PeerScript:
    while True:
        yield Await()


def away(server: Peer, until: float, since: float = 0.0) -> Sequence[Fault]:
    """Nothing of a server is heard between two moments."""
    return [Cut((server,), (ME,), since, until)]


def watched(faults: Sequence[Fault], seconds: float) -> tuple[Endpoint, Trace, list[str]]:
    """A worker watches for so long, if its endpoint is not closed before."""
    endpoint = Endpoint()

    def script() -> PeerScript:
        yield from watch_servers(endpoint, PLACES, patience_seconds=60.0)

    training = Peer(WORKER, 1)
    scripts: dict[Peer, Callable[[], PeerScript]] = {ME: script, FIRST: deaf, SECOND: deaf}
    net = VirtualNetwork(dead_after_seconds=5.0, faults=tuple(faults))
    with notices() as said:
        trace = simulate_peers(scripts | {training: lambda: compute(seconds)}, net, 0, servers=(ME, FIRST, SECOND))
    return endpoint, trace, said


def check_says_for_whom_it_waits() -> None:
    endpoint, _, said = watched(away(SECOND, until=28.0), 200.0)
    assert [each.rpartition(" for ")[2][:5] for each in said] == ["5 s, ", "15 s,", "25 s,"]
    assert all(part in said[0] for part in ("worker 0", "server 1 at 10.0.0.2:4322", "30 min", "GOSSAMER_TIMEOUT"))
    assert endpoint.why == []


def check_gives_up() -> None:
    endpoint, trace, said = watched([*away(FIRST, until=inf), *away(SECOND, until=inf)], 2000.0)
    assert len(said) == 180
    (why,) = endpoint.why
    assert isinstance(why, ConnectError)
    assert "worker 0 could not connect to server 0 at 127.0.0.1:4321, server 1 at 10.0.0.2:4322 for 30 min" in str(why)
    assert all(line in str(why) for line in ("gossamer run --servers 1 SCRIPT", "GOSSAMER_SERVERS=HOST:PORT"))
    assert trace.ended[ME].moment == 1800.0


def check_quiet_where_all_come_in_time() -> None:
    endpoint, _, said = watched(away(SECOND, until=4.5), 1000.0)
    assert (endpoint.why, said) == ([], [])


def check_a_server_that_was_there_has_a_patience_of_its_own() -> None:
    """It is heard no more from 10 on, counts as gone at 15, and is given up at 75; who comes back before is not."""
    gone, back = [Kill(FIRST, 10.0)], [Kill(FIRST, 10.0), Restart(FIRST, 60.0)]
    endpoint, trace, _ = watched(gone, 1000.0)
    assert [type(why) for why in endpoint.why] == [PeerLost]
    assert trace.ended[ME].moment == pytest.approx(75.0, abs=1.0)
    assert watched(back, 1000.0)[0].why == []


def check_a_pause_of_the_worker_is_no_absence_of_a_server() -> None:
    """The worker is stopped while a server is restarted, and when it waits for the first answer of one."""
    late = [Kill(FIRST, 10.0), Pause(ME, 20.0, 3000.0), Restart(FIRST, 3050.0)]
    assert watched(late, 4000.0)[0].why == []
    assert watched([*away(SECOND, until=3300.0), Pause(ME, 20.0, 3000.0)], 4000.0)[0].why == []


CHECKS = [
    check_a_pause_of_the_worker_is_no_absence_of_a_server,
    check_says_for_whom_it_waits,
    check_gives_up,
    check_quiet_where_all_come_in_time,
    check_a_server_that_was_there_has_a_patience_of_its_own,
]


@pytest.mark.parametrize("check", CHECKS)
def test_watching(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "name", "broken"),
    [
        (check_says_for_whom_it_waits, "LATE_SECONDS", inf),
        (check_says_for_whom_it_waits, "NOTICE_SECONDS", inf),
        (check_says_for_whom_it_waits, "timeout_seconds", lambda: 20.0),
        (check_gives_up, "timeout_seconds", lambda: inf),
        (check_quiet_where_all_come_in_time, "LATE_SECONDS", 4.0),
        (check_a_server_that_was_there_has_a_patience_of_its_own, "PeerLeft", PeerLost),
    ],
)
def test_watchers_that_miss_something_are_found(
    check: Callable[[], None], name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_endpoints, name, broken)
    with pytest.raises((AssertionError, ValueError)):
        check()


def tell(text: str) -> list[str]:
    return [text]


def found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dedicated: list[tuple[str, int]], connect: Callable[[], object]
) -> set[int]:
    """What a trace says it lacks, where nobody can be reached."""

    def refuse(token: bytes, frame_bytes: int, asks_end_with_peer: bool = False) -> None:
        raise ConnectError("nobody")

    monkeypatch.setattr(peer_endpoints, "_opener", refuse)
    monkeypatch.setattr(peer_endpoints, "run_token", lambda: bytes(32))
    monkeypatch.setattr(peer_endpoints, "dedicated_servers", lambda: dedicated)
    active.begin(folder, 0, 2, StepRange(100, 110))
    try:
        with pytest.raises(ConnectError, match="nobody"):
            connect()
    finally:
        active.end()
    (spans,) = read_run(folder)
    return {int(number) for number in spans.of(SpanKind.NOT_TRACED)["number"]}


def test_trace_names_untraced_connections_for_any_step_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve() -> object:
        return connect_to_servers(0, 2, None, 100, tell)

    assert found(tmp_path / "1", monkeypatch, [("127.0.0.1", 9)], serve) == {Untraced.SERVERS}
    assert found(tmp_path / "2", monkeypatch, [], serve) == set()  # servers within workers are traced
    assert found(tmp_path / "3", monkeypatch, [], lambda: connect_workers(0, 100, tell)) == {Untraced.PAIRS}


@pytest.mark.parametrize(
    "connect", [lambda: connect_workers(0, 1000, tell), lambda: connect_to_servers(0, 1, None, 1000, tell)]
)
def test_a_run_that_encrypts_without_certificates_opens_no_plain_endpoint(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[], object]
) -> None:
    monkeypatch.setattr(peer_endpoints, "run_token", lambda: bytes(32))
    monkeypatch.setattr(peer_endpoints, "TcpEndpoint", lambda *given: pytest.fail("was opened"))
    monkeypatch.setenv("GOSSAMER_SEAL", "1")
    with pytest.raises(ConnectError, match=r"Add --tls FOLDER; or, .* --private-network 10\.0\.0\.0/8"):
        connect()
