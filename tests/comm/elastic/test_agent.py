"""Agents and a coordinator over loopback: views after losses, leaves and newcomers."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.elastic_members import LIKE, PATIENCE_SECONDS, TOKEN, elastic_run

from gossamer.comm.elastic import agent
from gossamer.comm.elastic.agent import MembershipAgent, read_address
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.remote_control import resize
from gossamer.comm.membership.messages import Standing
from gossamer.comm.membership.next_view import CoordinatorOptions
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import ConnectError, CoordinatorLost, MalformedError, MismatchError, PeerLost, Stopped


def numbers(agents: list[MembershipAgent]) -> list[int]:
    return [each.number for each in agents]


def test_the_first_view_holds_all_by_place() -> None:
    with elastic_run(initial=3) as run:
        agents = run.begin(3)
        assert not any(each.formed for each in agents)


@pytest.mark.parametrize("options", [{}, {"seals": True}, {"relays": True}], ids=str)
def test_workers_learn_from_the_coordinator_whether_they_seal_their_connections(options: dict[str, bool]) -> None:
    server = CoordinatorServer(
        CoordinatorOptions(least=1, most=2, initial=2, **options),
        token=TOKEN,
        address="127.0.0.1",
        journal=None,
        note=print,
    )
    with closing(server), closing(MembershipAgent(server.address, TOKEN)) as worker:
        worker.here(("127.0.0.1", 7))
        assert worker.seal is bool(options)
        assert worker.relay is ("relays" in options)


def test_a_closed_connection_is_a_loss_at_once() -> None:
    with elastic_run(initial=3, dead_after_seconds=20.0) as run:
        first, second, third = run.begin(3)
        second.close()
        began = time.monotonic()
        views = [each.view_after(1, PATIENCE_SECONDS) for each in (first, third)]
        assert time.monotonic() - began < 5.0
        assert views[0] == views[1]
        assert [each.number for each in views[0].members] == numbers([first, third])
        assert views[0].number == 2
        assert views[0].newcomers == frozenset()
        assert {(first, 1), (third, 1)} <= set(run.closed)
        assert "its connection was closed" in run.wait_for_note("view 2")


def test_a_view_that_broke_by_mistake_is_followed_by_the_same_members() -> None:
    with elastic_run() as run:
        first, second = run.begin(2)
        before = first.view_after(0, PATIENCE_SECONDS)
        second.broken(1, [], "its mesh was closed")
        after = first.view_after(1, PATIENCE_SECONDS)
        assert second.view_after(1, PATIENCE_SECONDS) == after
        assert after.members == before.members
        assert after.secret != before.secret


def test_a_newcomer_is_compared_and_then_taken_in_last() -> None:
    with elastic_run() as run:
        first, second = run.begin(2)
        unlike, newcomer = run.agent(), run.agent(place=0)
        for each in (unlike, newcomer):
            each.here(("127.0.0.1", 7))
            assert each.formed
            assert each.size == 2
        with pytest.raises(MismatchError, match=r"torch: '2\.13\.0' in the run, '2\.12\.0' here"):
            unlike.ready(json.dumps(json.loads(LIKE) | {"torch": "2.12.0"}))
        newcomer.ready(LIKE)
        views = [each.view_after(1, PATIENCE_SECONDS) for each in (newcomer, first, second)]
        assert views[0] == views[1] == views[2]
        assert [each.number for each in views[0].members] == numbers([first, second, newcomer])
        assert views[0].newcomers == {newcomer.number}


def test_the_next_newcomer_waits_until_the_last_has_caught_up() -> None:
    with elastic_run() as run:
        first, _ = run.begin(2)
        one, other = run.agent(), run.agent()
        for each in (one, other):
            each.here(("127.0.0.1", 7))
        one.ready(LIKE)
        assert first.view_after(1, PATIENCE_SECONDS).world == 3
        other.ready(LIKE)
        with pytest.raises(PeerLost, match="no view"):
            other.view_after(0, 0.5)
        one.caught_up()
        view = other.view_after(0, PATIENCE_SECONDS)
        assert view.world == 4
        assert view.newcomers == {other.number}


def test_a_peer_that_leaves_is_out_at_once_and_the_rest_continues() -> None:
    with elastic_run() as run:
        first, second = run.begin(2)
        first.leave()
        view = second.view_after(1, PATIENCE_SECONDS)
        assert [each.number for each in view.members] == [second.number]
        with pytest.raises(PeerLost, match="it left"):
            first.view_after(1, PATIENCE_SECONDS)


def test_a_run_is_resized_from_afar_and_the_newest_go() -> None:
    with elastic_run(initial=3, least=2) as run:
        first, second, third = run.begin(3)
        assert "refused" in resize(run.server.address, bytes(range(32)), 1)
        assert "the newest 1 of 3 are evicted" in resize(run.server.address, bytes(range(32)), 2)
        assert [each.number for each in first.view_after(1, PATIENCE_SECONDS).members] == numbers([first, second])
        with pytest.raises(Stopped):  # it has done nothing wrong
            third.view_after(1, PATIENCE_SECONDS)
        with pytest.raises(ConnectError):
            resize(run.server.address, bytes(32), 3, seconds=2.0)


def test_a_peer_that_does_not_close_is_silent_and_out() -> None:
    """Its connection lives, and its agent does not come to say so: as where a callback hangs."""
    hangs = threading.Event()
    with elastic_run() as run:
        stuck = run.agent(0, lambda view: hangs.wait(PATIENCE_SECONDS) and None)
        other = run.agent(1)
        for each in (stuck, other):
            each.here(("127.0.0.1", 7))
        assert other.first_view(PATIENCE_SECONDS) == stuck.first_view(PATIENCE_SECONDS)
        other.broken(1, [stuck.number], "it does not move")
        assert [each.number for each in other.view_after(1, PATIENCE_SECONDS).members] == [other.number]
        hangs.set()
        with pytest.raises(PeerLost, match="did not answer"):
            stuck.view_after(1, PATIENCE_SECONDS)


def test_a_coordinator_that_is_started_again_changes_nothing(tmp_path: Path) -> None:
    with elastic_run(tmp_path / "journal") as run:
        first, second = run.begin(2)
        run.restart()
        with pytest.raises(PeerLost, match="no view"):
            first.view_after(1, 2.5)
        newcomer = run.agent()
        newcomer.here(("127.0.0.1", 7))
        assert newcomer.formed
        newcomer.ready(LIKE)
        view = newcomer.view_after(0, PATIENCE_SECONDS)
        assert [each.number for each in view.members] == numbers([first, second, newcomer])
        assert view.number == 2


def test_a_loss_while_the_coordinator_is_away_is_found_when_it_is_back(tmp_path: Path) -> None:
    with elastic_run(tmp_path / "journal") as run:
        first, second = run.begin(2)
        run.server.close()
        second.close()
        first.broken(1, [second.number], "it is gone")
        run.restart()
        view = first.view_after(1, PATIENCE_SECONDS)
        assert [each.number for each in view.members] == [first.number]
        assert view.number == 2


def test_promise_22_a_coordinator_without_the_journal_refuses_earlier_workers_and_serves_others() -> None:
    with elastic_run() as run:
        first, _ = run.begin(2)
        run.restart()
        with pytest.raises(PeerLost, match="belongs to run"):
            first.view_after(1, PATIENCE_SECONDS)
        with pytest.raises(PeerLost, match="belongs to run"):
            first.ready(LIKE)
        assert not run.server.ended
        run.begin(2)


@pytest.mark.parametrize("begun", [True, False])
def test_promise_22_a_coordinator_that_stays_away_ends_its_workers_in_the_stated_time(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Long before the time that they wait for other workers."""
    said: list[str] = []
    monkeypatch.setattr(agent, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(agent, "STATUS_SECONDS", 0.05)
    monkeypatch.setattr(agent, "notice", said.append)
    with elastic_run(initial=1 if begun else 2) as run:
        one = run.agent(coordinator_seconds=0.2)
        one.here(("127.0.0.1", 7))
        if begun:
            one.first_view(PATIENCE_SECONDS)
        run.server.close()
        with pytest.raises(CoordinatorLost, match="Run the first launcher's command again"):
            one.view_after(int(begun), 1e9)
        run.server = run._serve(0)
    assert any("does not answer. Run the first launcher's command again" in each for each in said)
    assert any("Otherwise this worker fails in" in each for each in said)


def test_the_time_without_a_coordinator_begins_again_with_each_answer() -> None:
    with elastic_run(initial=2) as run:
        one = run.agent()
        one.here(("127.0.0.1", 7))
        one._unheard_since = 0.0
        one._endpoint.start(one._saying("waits")).wait(PATIENCE_SECONDS)
        assert one._unheard_since is None


def test_a_refused_newcomer_hears_the_difference_also_where_the_news_came_first() -> None:
    with elastic_run(initial=2) as run:
        one = run.agent()
        one.here(("127.0.0.1", 7))
        one._scripts.out = "torch differs"
        with pytest.raises(MismatchError, match="torch differs"):
            one._check_refused(Standing(refused="torch differs", run=run.server._coordinator.rule.run))
        with pytest.raises(PeerLost, match="another run"):
            one._check_refused(Standing(refused="another run", run="f" * 32))


def test_a_coordinator_that_answers_is_waited_for_as_long_as_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "NOTICE_SECONDS", 0.05)
    with elastic_run(initial=2) as run:
        one = run.agent(coordinator_seconds=0.0)
        one.here(("127.0.0.1", 7))
        with pytest.raises(PeerLost, match="too few workers are left") as caught:
            one.first_view(0.5)
        assert not isinstance(caught.value, CoordinatorLost)


def test_a_loss_that_the_launcher_saw_needs_no_connection() -> None:
    with elastic_run() as run:
        first, second = run.begin(2)
        assert run.server.number_at(1) == second.number
        run.server.gone(second.number)
        assert first.view_after(1, PATIENCE_SECONDS).world == 1
        assert "its process ended" in run.wait_for_note("view 2")


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(MalformedError, match="address of a coordinator"):
        read_address("host:0")
    assert read_address("[::1]:7") == ("::1", 7)


def test_promise_3_twenty_come_and_go() -> None:
    """Views are numbered one after the other, and all tell of the same ones."""
    with elastic_run() as run:
        first, second = run.begin(2)
        for turn in range(20):
            newcomer = run.agent()
            newcomer.here(("127.0.0.1", 7))
            newcomer.ready(LIKE)
            joined = 2 * turn + 2
            views = [each.view_after(joined - 1, PATIENCE_SECONDS) for each in (newcomer, first, second)]
            assert views[0] == views[1] == views[2]
            assert (views[0].number, views[0].newcomers) == (joined, {newcomer.number})
            newcomer.caught_up()
            newcomer.leave()
            left = [each.view_after(joined, PATIENCE_SECONDS) for each in (first, second)]
            assert left[0] == left[1]
            assert (left[0].number, left[0].world) == (joined + 1, 2)
            newcomer.close()


def test_a_peer_that_waits_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(agent, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(agent, "notice", said.append)
    with elastic_run(initial=3) as run:
        one = run.agent()
        one.here(("127.0.0.1", 7))
        with pytest.raises(PeerLost, match="no view after view"):
            one.first_view(0.5)
        run.server.close()
        with pytest.raises(PeerLost):
            one.first_view(2.5)
        lost = run.agent()
        with pytest.raises(ConnectError, match=r"did not answer for 0\.5 s"):
            lost.here(("127.0.0.1", 7), seconds=0.5)
        run.server = run._serve(0)
    assert any(each.endswith("for the run to begin: 1 of 3 workers are connected.") for each in said)
    assert any("does not answer. Run the first launcher's command again" in each for each in said)
    assert any("for the coordinator to answer" in each for each in said)


def test_a_peer_that_leaves_while_the_coordinator_is_away_does_not_wait_for_long() -> None:
    with elastic_run(initial=1) as run:
        (one,) = run.begin(1)
        run.server.close()
        began = time.monotonic()
        one.leave(seconds=0.5)
        assert time.monotonic() - began < 5.0
        run.server = run._serve(0)


# -- agents and a coordinator over encrypted connections ---------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_views_travel_encrypted(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    making = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    addresses = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*making.split(), *addresses, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    accepting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    accepting.load_cert_chain(certificate, key)
    tls = Tls(dialing=ssl.create_default_context(cafile=certificate), accepting=accepting)
    options = CoordinatorOptions(least=1, most=2, initial=2, dead_after_seconds=20.0)
    with CoordinatorServer(options, token=TOKEN, address="127.0.0.1", journal=None, note=print, tls=tls) as server:
        agents = [MembershipAgent(server.address, TOKEN, place=place, tls=tls) for place in range(2)]
        for each in agents:
            each.here(("127.0.0.1", 7))
        assert agents[0].first_view(30) == agents[1].first_view(30)
        assert "at most 1 workers" in resize(server.address, TOKEN, 1, tls=tls)
        assert agents[0].view_after(1, 30).world == 1
        for each in agents:
            each.close()
