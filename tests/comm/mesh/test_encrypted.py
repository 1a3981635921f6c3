"""Encrypted mesh: whatever ranks tell each other is sealed, and a run that cannot seal it does not begin."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certificates import certificates, contexts
from support.mesh_group import both
from support.proxy import Proxy
from support.standalone_group import connected, near

from gossamer.base.host_port import Address
from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllGather, AllReduceMean
from gossamer.base.transport import Transport
from gossamer.comm.mesh import encrypted
from gossamer.comm.mesh.collective_selector import ENGINE
from gossamer.comm.mesh.encrypted import encrypted_mesh
from gossamer.comm.mesh.sealing import agree
from gossamer.comm.mesh.standalone import standalone_mesh
from gossamer.comm.mesh.transport import MeshTransport, mesh_transport
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import ConnectError, MismatchError, PeerLost
from gossamer.train.session import transport_setup

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")

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


BOTH_WAYS = pytest.mark.parametrize("with_certificates", [True, False])


@BOTH_WAYS
def test_everything_is_answered_and_the_engine_is_not_asked(with_certificates: bool, tls: Tls) -> None:
    asked = []

    def act(engine: Transport) -> tuple[Any, ...]:
        mesh = encrypted_mesh(engine, HERE, tls if with_certificates else None)
        for name in ("begin", "broadcast_", "all_gather_text"):
            setattr(engine, name, lambda *_, name=name: asked.append(name))
        found = answers_of(mesh)
        mesh.close()
        return found

    expected = [0.5, 0.5], [1], [[0.0], [1.0]], ["text of 0", "text of 1"], [1, 1, 1]
    assert both(act) == [expected, expected]
    assert asked == []


@BOTH_WAYS
def test_parts_of_the_group_are_encrypted_too(with_certificates: bool, tls: Tls) -> None:
    def act(engine: Transport) -> tuple[bool, bool]:
        mesh = encrypted_mesh(engine, HERE, tls if with_certificates else None)
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


SECRET = torch.tensor([1.5, 2.5, 3.5, 4.5])


def eavesdropped(make: Any) -> bytes:
    """What travels while two ranks gather a tensor and a text."""

    def act(engine: Transport) -> None:
        mesh = make(engine, HERE)
        mesh.answer(AllGather((SECRET,)))
        mesh.all_gather_text("a secret text")
        mesh.close()

    proxies = []
    dial = socket.create_connection

    def dial_proxy(place: Address, seconds: float) -> socket.socket:
        proxies.append(Proxy(place))
        return dial(proxies[-1].address, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", dial_proxy)
        assert both(act) == [None, None]
    (proxy,) = proxies
    proxy.close()
    return bytes(proxy.heard)


@BOTH_WAYS
def test_nothing_can_be_read_on_the_way(with_certificates: bool, tls: Tls) -> None:
    heard = eavesdropped(partial(encrypted_mesh, tls=tls if with_certificates else None))
    assert len(heard) > 1000
    assert SECRET.numpy().tobytes() not in heard
    assert b"a secret text" not in heard


def test_without_encryption_it_can() -> None:
    assert SECRET.numpy().tobytes() in eavesdropped(mesh_transport)


# -- what is refused --------------------------------------------------------------------------------------


def refused(found: list[Any], match: str, kind: type[Exception] = ConnectError) -> None:
    assert [type(each) for each in found] == [kind, kind], found
    assert all(match in str(each) for each in found)


@pytest.mark.parametrize(("with_certificates", "remedy"), [(True, "omit --tls"), (False, "write --plaintext")])
def test_torchs_collectives_are_refused(with_certificates: bool, remedy: str, tls: Tls) -> None:
    found = both(lambda engine: encrypted_mesh(engine, HERE, tls if with_certificates else None, ENGINE))
    refused(found, "torch's own collectives do not")
    refused(found, remedy)


def test_where_the_loops_are_not_there_it_is_refused(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted, "available", lambda: False)
    refused(both(lambda engine: encrypted_mesh(engine, HERE, tls)), "compiled loops, which encrypt, are missing")


def test_workers_that_do_not_reach_each_other_do_not_use_the_engine(tls: Tls) -> None:
    refused(both(lambda engine: encrypted_mesh(engine, "192.0.2.1", tls)), "could not reach the other ranks")


def test_ranks_that_encrypt_in_different_ways_are_reported(tls: Tls) -> None:
    over_tls, sealed = partial(encrypted_mesh, tls=tls), partial(encrypted_mesh, tls=None)
    for makes, requests in (
        ((over_tls, mesh_transport), "auto over TLS, auto"),
        ((mesh_transport, sealed), "auto, auto sealed"),
        ((sealed, over_tls), "auto sealed, auto over TLS"),
    ):
        refused(both(lambda engine, makes=makes: makes[engine.rank](engine, HERE)), requests, MismatchError)


def test_ranks_with_different_tokens_do_not_agree_on_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = iter((b"one", b"two"))
    monkeypatch.setattr(encrypted, "run_token", lambda: next(tokens))
    refused(both(lambda engine: encrypted_mesh(engine, HERE, None)), "different token", MismatchError)


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
    monkeypatch.setattr(transport_setup, "ProcessGroupTransport", lambda ranks: "the group")
    monkeypatch.setattr(transport_setup, "_listening_address", lambda: HERE)
    for kind in ("encrypted_mesh", "mesh_transport"):
        monkeypatch.setattr(
            transport_setup,
            kind,
            lambda engine, address, *given, kind=kind, device: made.append(
                (kind, isinstance(given[0], Tls), given[-1], device.type)
            ),
        )
    for device in ("cpu", "cuda"):
        for name, value in (("GOSSAMER_TLS", str(folder)), ("GOSSAMER_SEAL", "1"), ("GOSSAMER_SEAL", "")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(name, value)
                transport_setup.group_transport(worker(device), "ring")
    kinds = ("encrypted_mesh", True), ("encrypted_mesh", False), ("mesh_transport", False)
    assert made == [(kind, tls, "ring", device) for device in ("cpu", "cuda") for kind, tls in kinds]


def worker(device: str) -> Any:
    class Worker:
        pass

    found = Worker()
    found.device = torch.device(device)  # type: ignore[attr-defined]
    return found
