"""Endpoints with certificates: trusted, missing or refused."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import torch
from support.proxy import between
from support.rpc_endpoints import HERE, THERE, Open, counting, push

from gossamer.comm.tls_contexts import Tls, run_tls
from gossamer.errors import ConnectError, PeerLost


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
    return Tls(dialing=ssl.create_default_context(cafile=trusted), accepting=accepting)


def test_words_travel_encrypted_regardless_of_their_size(opened: Open, certificate: Path) -> None:
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
    with pytest.raises(ConnectError, match="peer's certificate cannot be verified"):
        worker.answer(push(0, torch.ones(1), within_seconds=None))


def of_folder(folder: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Tls:
    folder.mkdir()
    for name in ("cert.pem", "key.pem", "ca.pem"):
        shutil.copy(certificate, folder / name)
    monkeypatch.setenv("GOSSAMER_TLS", str(folder))
    tls = run_tls()
    assert tls is not None
    return tls


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
    stranger = opened(HERE, tls=encrypted(certificate, certificate)._replace(dialing=without_certificate(certificate)))
    stranger.meet({THERE: server.address})
    with pytest.raises((ConnectError, PeerLost)):
        stranger.answer(push(0, torch.ones(1), within_seconds=5.0))


def without_certificate(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority)
