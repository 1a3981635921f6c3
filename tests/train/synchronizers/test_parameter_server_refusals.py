"""What servers cannot do for a session, and servers that are late, too small, broken or not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.served_training import ROUNDS, check_joined, trained
from support.virtual_workers import Worker, cluster, heard, network

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.peer_ops import SERVER, Peer
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.wire.authentication import Credentials
from gossamer.errors import AttachError, ConnectError, PeerLost, RecipeError
from gossamer.train import parameter_server
from gossamer.train.parameter_server.shard import ServerShard
from gossamer.train.synchronizers import parameter_server as served
from gossamer.train.synchronizers import peer_endpoints


def test_what_cannot_be_served_is_refused() -> None:
    def scales(worker: Worker) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(AttachError, match="GradScaler"):
            worker.attach(model, optimizer, ROUNDS["sync"], scaler=torch.amp.GradScaler("cpu"))

    cluster(scales, 2)

    def clips(worker: Worker) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(AttachError, match="clip_grad_norm_"):
            worker.attach(model, optimizer, ROUNDS["sync"], clip_norm=1.0)

    cluster(clips, 2)
    with pytest.raises(RecipeError, match="push"):
        resolve("ParameterServer(push=TopK(0.1)) + Int8()")
    with pytest.raises(RecipeError, match="Omit it"):
        resolve("ParameterServer() + Ring()")


@contextmanager
def dedicated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """A server of its own, as the launcher would have started it."""
    token = folder / "token"
    token.write_bytes(bytes(range(32)))
    monkeypatch.setenv("GOSSAMER_TOKEN_FILE", str(token))
    monkeypatch.setenv("GOSSAMER_RUN", "run")
    secret = run_token()
    assert secret is not None
    limit = peer_endpoints.LARGEST_FRAME_BYTES
    with TcpEndpoint(Credentials(me=Peer(SERVER, 0), token=secret, run="run", largest_frame_bytes=limit)) as endpoint:
        host, port = endpoint.address
        monkeypatch.setenv("GOSSAMER_SERVERS", f"{host}:{port}")
        endpoint.start(parameter_server.host(0, keep_serving=True))
        yield


def check_large(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What a server cannot be told in one message is refused before anything is said, with the line to write."""
    count = 8 * sum(parameter.numel() for parameter in network().parameters())
    monkeypatch.setattr(peer_endpoints, "SLACK_BYTES", 1000)
    monkeypatch.setattr(peer_endpoints, "LARGEST_FRAME_BYTES", peer_endpoints.SLACK_BYTES + count // 2 - 1)
    with dedicated(monkeypatch, folder):
        with pytest.raises(AttachError, match=rf"{count:,} bytes.*gossamer run --servers 3 "):
            cluster(lambda worker: trained(worker, ROUNDS["sync"]), 2)
        monkeypatch.setattr(peer_endpoints, "LARGEST_FRAME_BYTES", peer_endpoints.SLACK_BYTES + 1)
        with pytest.raises(AttachError, match=r"one row of a tensor.*Write EveryStep\(\)"):
            cluster(lambda worker: trained(worker, ROUNDS["sync"]), 2)


def test_a_part_that_is_too_large_names_how_many_servers_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_large(monkeypatch, tmp_path)


def test_a_count_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(served, "servers_for", lambda *_: 2)
    with pytest.raises(AssertionError, match="servers 2"):
        check_large(monkeypatch, tmp_path)


def check_absent() -> None:
    """A server that nobody started: who waits says so, and gives up with the place where it should have been."""
    with (
        heard(events.Noticed) as said,
        pytest.raises(ConnectError, match=r"could not connect to server 0 at 127\.0"),
    ):
        cluster(lambda worker: trained(worker, ROUNDS["sync"]), 2)
    late = [event.message for event in said if isinstance(event, events.Noticed)]
    assert sorted(each[:8] for each in late if "waited for server 0 at 127.0.0.1" in each) == ["worker 0", "worker 1"]


def absent(monkeypatch: pytest.MonkeyPatch, folder: Path, late_seconds: float) -> None:
    with dedicated(monkeypatch, folder):
        pass  # its port is known, and it has ended
    monkeypatch.setattr(peer_endpoints, "LATE_SECONDS", late_seconds)
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "0.3")


def test_a_server_that_never_comes_is_waited_for_aloud_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absent(monkeypatch, tmp_path, 0.05)
    check_absent()


def test_waiting_in_silence_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent(monkeypatch, tmp_path, 10.0)
    with pytest.raises(AssertionError):
        check_absent()


def test_a_server_of_its_own_trains_what_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with dedicated(monkeypatch, tmp_path):
        check_joined(ROUNDS["sync"], 2)


def test_a_server_that_cannot_go_on_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections would stay, and everybody would wait for an answer for ever."""

    def breaks(shard: ServerShard, rate: float = 1.0) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(ServerShard, "apply", breaks)

    def run(worker: Worker) -> None:
        with pytest.raises(PeerLost):
            trained(worker, ROUNDS["one shard"])

    with heard(events.Noticed) as said:
        cluster(run, 2)
    assert any("no room" in event.message for event in said if isinstance(event, events.Noticed))


def test_what_is_refused_leaves_no_endpoint_open() -> None:
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("gossamer server")]

    def run(worker: Worker) -> None:
        model = network()
        with pytest.raises(AttachError, match="LBFGS"):
            worker.attach(model, torch.optim.LBFGS(model.parameters()), ROUNDS["sync"])

    before = threads()
    cluster(run, 2)
    assert threads() == before
