"""Encrypted mesh: whatever ranks tell each other is sealed, and a run that cannot seal it does not begin."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certificates import certificates, contexts
from support.mesh_group import both
from support.standalone_group import connected, near

from gossamer.base.kernels.library import library
from gossamer.base.ops import AllGather, AllReduceMean
from gossamer.base.transport import Transport
from gossamer.comm.mesh import encrypted, transport
from gossamer.comm.mesh.collective_selector import ENGINE
from gossamer.comm.mesh.encrypted import encrypted_mesh
from gossamer.comm.mesh.sealing import agree
from gossamer.comm.mesh.standalone import standalone_mesh
from gossamer.comm.mesh.transport import MeshTransport, mesh_transport
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import ConnectError, MismatchError, PeerLost
from gossamer.train.session import transport_setup

pytestmark = pytest.mark.skipif(library() is None, reason="the compiled loops are not there")

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture
def tls(folder: Path) -> Tls:
    return contexts(folder)


def answers_of(mesh: Transport) -> tuple[Any, ...]:
    number = torch.tensor([float(mesh.rank)])
    filled = torch.full((3,), mesh.rank)
    mesh.broadcast_([filled], 1)
    return (
        mesh.answer(AllReduceMean(number.expand(300_000))).tolist()[::299_999],
        mesh.answer(AllReduceMean(number.long() * 2)).tolist(),
        [each.tolist() for (each,) in mesh.answer(AllGather((number,)))],
        mesh.all_gather_text(f"text of {mesh.rank}"),
        filled.tolist(),
    )


def test_everything_is_answered_and_the_engine_is_not_asked(tls: Tls) -> None:
    asked = []

    def act(engine: Transport) -> tuple[Any, ...]:
        mesh = encrypted_mesh(engine, HERE, tls)
        for name in ("begin", "broadcast_", "all_gather_text"):
            setattr(engine, name, lambda *_, name=name: asked.append(name))
        found = answers_of(mesh)
        mesh.close()
        return found

    expected = [0.5, 0.5], [1], [[0.0], [1.0]], ["text of 0", "text of 1"], [1, 1, 1]
    assert both(act) == [expected, expected]
    assert asked == []


def test_parts_of_the_group_are_encrypted_too(tls: Tls) -> None:
    def act(engine: Transport) -> tuple[bool, bool]:
        mesh = encrypted_mesh(engine, HERE, tls)
        part = mesh.part(2)
        assert part.all_gather_text(str(mesh.rank)) == ["0", "1"]
        sealed = isinstance(part, MeshTransport) and isinstance(part._fallback, encrypted.EncryptedFallback)
        mesh.close()
        return sealed

    assert both(act) == [True, True]


def test_a_mesh_without_an_engine_is_encrypted_by_keys_that_its_connections_agreed_on(tls: Tls) -> None:
    sockets = connected(3)

    def act(rank: int) -> tuple[Any, ...]:
        keys = agree(rank, sockets[rank], tls, b"token", b"the view's secret")
        mesh = standalone_mesh(rank, sockets[rank], "direct", near(3), gives_notice=False, keys=keys)
        found = answers_of(mesh)
        mesh.close()
        return found

    with ThreadPoolExecutor(3) as pool:
        found = [ticket.result(30) for ticket in [pool.submit(act, rank) for rank in range(3)]]
    texts = [f"text of {rank}" for rank in range(3)]
    assert found == [([1.0, 1.0], [2], [[0.0], [1.0], [2.0]], texts, [1, 1, 1])] * 3


# -- what an eavesdropper hears ----------------------------------------------------------------------------


class Tap:
    """Two connected sockets, and all that went from the one to the other."""

    def __init__(self) -> None:
        (self.low, left), (self.high, right) = socket.socketpair(), socket.socketpair()
        self._own = left, right
        self.heard = bytearray()
        self._threads = [threading.Thread(target=self._carry, args=way) for way in ((left, right), (right, left))]
        for thread in self._threads:
            thread.start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # the other end has left before
            while data := source.recv(2**16):
                self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def end(self) -> bytes:
        for thread in self._threads:
            thread.join(20)
        for each in self._own:
            each.close()
        return bytes(self.heard)


@contextmanager
def tapped() -> Iterator[Tap]:
    tap = Tap()

    def joined(rank: int, *_: object) -> list[socket.socket | None]:
        found = [None, tap.low] if rank == 0 else [tap.high, None]
        for each in filter(None, found):
            each.setblocking(False)
        return found

    with ExitStack() as undone:
        for module in (encrypted, transport):
            patch = undone.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(module, "connect", joined)
        yield tap


SECRET = torch.tensor([1.5, 2.5, 3.5, 4.5])


def eavesdropped(make: Any) -> bytes:
    """What travels while two ranks gather a tensor and a text."""

    def act(engine: Transport) -> None:
        mesh = make(engine, HERE)
        mesh.answer(AllGather((SECRET,)))
        mesh.all_gather_text("a secret text")
        mesh.close()

    with tapped() as tap:
        assert both(act) == [None, None]
        return tap.end()


def test_nothing_can_be_read_on_the_way(tls: Tls) -> None:
    heard = eavesdropped(partial(encrypted_mesh, tls=tls))
    assert len(heard) > 1000
    assert SECRET.numpy().tobytes() not in heard
    assert b"a secret text" not in heard


def test_without_encryption_it_can() -> None:
    assert SECRET.numpy().tobytes() in eavesdropped(mesh_transport)


# -- what is refused --------------------------------------------------------------------------------------


def refused(found: list[Any], match: str, kind: type[Exception] = ConnectError) -> None:
    assert [type(each) for each in found] == [kind, kind], found
    assert all(match in str(each) for each in found)


def test_torchs_collectives_are_refused(tls: Tls) -> None:
    refused(both(lambda engine: encrypted_mesh(engine, HERE, tls, ENGINE)), "torch's own collectives do not")


def test_where_the_loops_are_not_there_it_is_refused(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted, "available", lambda: False)
    refused(both(lambda engine: encrypted_mesh(engine, HERE, tls)), "compiled loops, which encrypt, are missing")


def test_workers_that_do_not_reach_each_other_do_not_use_the_engine(tls: Tls) -> None:
    refused(both(lambda engine: encrypted_mesh(engine, "192.0.2.1", tls)), "could not reach the other ranks")


def test_ranks_of_which_only_one_encrypts_are_reported(tls: Tls) -> None:
    makes = partial(encrypted_mesh, tls=tls), mesh_transport
    refused(both(lambda engine: makes[engine.rank](engine, HERE)), "auto over TLS, auto", MismatchError)


def test_certificates_of_two_authorities_are_told_to_all(tls: Tls, tmp_path: Path) -> None:
    each = tls, contexts(certificates(tmp_path / "theirs"))
    refused(both(lambda engine: encrypted_mesh(engine, HERE, each[engine.rank])), "could not agree on keys")


def test_where_a_rank_leaves_meanwhile_nothing_is_left_open(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails once its mesh is there; an open socket would be a warning, which is an error here."""

    def fails(rank: int, *_: object) -> dict[int, Any]:
        if rank == 1:
            raise KeyError("something else")
        return {}

    monkeypatch.setattr(encrypted, "share", fails)
    found = both(lambda engine: encrypted_mesh(engine, HERE, tls))
    assert [type(each) for each in found] == [PeerLost, KeyError]


def test_a_run_that_was_told_to_encrypt_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setenv("GOSSAMER_TLS", str(folder))
    monkeypatch.setattr(transport_setup, "ProcessGroupTransport", lambda ranks: "the group")
    monkeypatch.setattr(transport_setup, "_listening_address", lambda: HERE)
    for kind in ("encrypted_mesh", "mesh_transport"):
        monkeypatch.setattr(
            transport_setup, kind, lambda *given, kind=kind, device: made.append((kind, given[-1], device.type))
        )
    for device in ("cpu", "cuda"):
        transport_setup.group_transport(worker(device), "ring")
        monkeypatch.delenv("GOSSAMER_TLS")
        transport_setup.group_transport(worker(device), "ring")
        monkeypatch.setenv("GOSSAMER_TLS", str(folder))
    assert made == [
        ("encrypted_mesh", "ring", "cpu"),
        ("mesh_transport", "ring", "cpu"),
        ("encrypted_mesh", "ring", "cuda"),
        ("mesh_transport", "ring", "cuda"),
    ]


def worker(device: str) -> Any:
    class Worker:
        pass

    found = Worker()
    found.device = torch.device(device)  # type: ignore[attr-defined]
    return found
