"""Worker registry: where workers listen, for a restarted one to find."""

from __future__ import annotations

import pytest

from gossamer.comm.environment import worker_registry
from gossamer.comm.environment.worker_registry import claim_end, has_ended, mark_end, publish, published
from gossamer.errors import ConnectError
from gossamer.launcher.rendezvous import serve_store


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> object:
    store, meeting = serve_store("127.0.0.1:0")
    host, _, port = meeting.rpartition(":")
    for name, text in {
        "GOSSAMER_REGISTRY": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, text)
    return store


@pytest.mark.usefixtures("launched")
def test_a_peer_that_comes_back_finds_where_the_others_said_last_that_they_are() -> None:
    publish(0, ("127.0.0.1", 1000))
    publish(2, ("10.0.0.2", 2000))
    publish(0, ("127.0.0.1", 3000))
    assert published(3) == {0: ("127.0.0.1", 3000), 2: ("10.0.0.2", 2000)}
    assert published(2) == {0: ("127.0.0.1", 3000)}


@pytest.mark.usefixtures("launched")
def test_a_peer_that_came_to_the_end_reports_it() -> None:
    assert not has_ended()
    mark_end()
    assert has_ended()


@pytest.mark.usefixtures("launched")
def test_of_two_ends_the_first_one_stays() -> None:
    """Of each training its own."""
    assert [claim_end(0, "a"), claim_end(0, "b"), claim_end(0, "a")] == ["a", "a", "a"]
    assert claim_end(1, "b") == "b"


def test_an_end_that_cannot_be_asked_about_is_none(launched: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(worker_registry, "STORE_SECONDS", 0.2)
    with pytest.raises(ConnectError, match="does not answer"):
        claim_end(0, "a")


@pytest.mark.parametrize("name", ["GOSSAMER_REGISTRY", "TORCHELASTIC_USE_AGENT_STORE"])
@pytest.mark.usefixtures("launched")
def test_where_nobody_is_taken_back_nobody_keeps_a_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name)
    publish(0, ("127.0.0.1", 1000))
    mark_end()
    assert not has_ended()
    assert claim_end(0, "a") is None
    with pytest.raises(ConnectError, match=r"cannot rejoin.*gossamer run"):
        published(3)
