"""torch's store with and without libuv: processes of one job may have different builds of torch."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.joining import in_threads, job

from gossamer.comm.environment import join, tcp_store
from gossamer.comm.environment.store import RendezvousStore
from gossamer.comm.environment.tcp_store import hosted_store, remote_store

REFUSAL = "use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it."
SOON = timedelta(seconds=10)
Build = Callable[..., dist.Store]


def with_libuv(*args: Any, **options: Any) -> dist.Store:
    return dist.TCPStore(*args, **options)


def without_libuv(*args: Any, use_libuv: bool = True, **options: Any) -> dist.Store:
    """TCPStore of a build without libuv: it rejects its own default before anything else."""
    if use_libuv:
        raise RuntimeError(REFUSAL)
    return dist.TCPStore(*args, **options, use_libuv=False)


def pair(monkeypatch: pytest.MonkeyPatch, server: Build, client: Build) -> tuple[dist.Store, dist.Store]:
    """A store that one build serves, and the connection of another build."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    monkeypatch.setattr(tcp_store, "TCPStore", server)
    hosted = hosted_store("127.0.0.1", listener, timeout=SOON)
    monkeypatch.setattr(tcp_store, "TCPStore", client)
    return hosted, remote_store("127.0.0.1", port, timeout=SOON)


MIXTURES = pytest.mark.parametrize(
    ("server", "client"),
    [(without_libuv, without_libuv), (without_libuv, with_libuv), (with_libuv, without_libuv)],
    ids=["neither", "client", "server"],
)


@MIXTURES
def test_builds_with_and_without_libuv_share_a_store(
    monkeypatch: pytest.MonkeyPatch, server: Build, client: Build
) -> None:
    hosted, remote = pair(monkeypatch, server, client)
    remote.set("text", "with ö")
    assert hosted.get("text").decode() == "with ö"
    assert [remote.add("count", 2), hosted.add("count", 3)] == [2, 5]
    assert not remote.check(["text", "later"])
    assert remote.compare_set("once", "", "first") == hosted.compare_set("once", "", "second") == b"first"
    found, _ = in_threads(lambda: remote.wait(["later"], SOON), lambda: hosted.set("later", ""))
    assert found is None
    assert remote.multi_get(["once", "count"]) == [b"first", b"5"]
    with pytest.raises(RuntimeError):
        remote.wait(["never"], timedelta(seconds=0.05))
    assert remote.get("once") == b"first"  # a wait that ran out leaves the connection usable


@MIXTURES
def test_a_process_group_forms_over_a_shared_store(
    monkeypatch: pytest.MonkeyPatch, server: Build, client: Build
) -> None:
    stores = pair(monkeypatch, server, client)

    def total(rank: int) -> float:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(stores[rank], rank, 2, options)
        tensor = torch.tensor([rank + 1.0])
        group.allreduce([tensor]).wait()
        return float(tensor)

    assert in_threads(partial(total, 0), partial(total, 1)) == [3.0, 3.0]


def test_the_server_without_libuv_listens_at_its_listener_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "TCPStore", without_libuv)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    hosted_store("127.0.0.1", listener).set("key", "value")
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # is refused if the store listens at all addresses


def test_a_server_waits_for_as_many_processes_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "TCPStore", without_libuv)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    hosted, remote = in_threads(
        lambda: hosted_store("127.0.0.1", listener, world=2, timeout=SOON),
        lambda: remote_store("127.0.0.1", port, world=2, timeout=SOON),
    )
    hosted.set("key", "value")
    assert remote.get("key") == b"value"
    with pytest.raises(RuntimeError, match="1/2 clients joined"):
        hosted_store("127.0.0.1", socket.create_server(("127.0.0.1", 0)), world=2, timeout=timedelta(seconds=1))


@pytest.mark.usefixtures("environ")
def test_workers_join_without_libuv(port: int, formed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "TCPStore", without_libuv)
    in_threads(lambda: join(job(0, port), 5.0), lambda: join(job(1, port), 5.0))
    assert formed == ["gloo", "gloo"]


def test_a_rendezvous_store_works_without_libuv(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "TCPStore", without_libuv)
    first = RendezvousStore("doctor", "127.0.0.1", port, serves=True, seconds=5)
    RendezvousStore("doctor", "127.0.0.1", port, serves=False, seconds=5).pin("topic", "text")
    assert first.read("topic", 5) == "text"


def test_any_other_error_is_raised_after_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = list[dict[str, Any]]()

    def refuse(*args: Any, **options: Any) -> dist.Store:
        attempts.append(options)
        raise RuntimeError("the connection was refused")

    monkeypatch.setattr(tcp_store, "TCPStore", refuse)
    with pytest.raises(RuntimeError, match="was refused"):
        remote_store("127.0.0.1", 1)
    assert attempts == [{"world_size": None, "wait_for_workers": False}]
