"""Agents and a coordinator over encrypted connections."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from support.elastic_members import TOKEN

from gossamer.comm.elastic.agent import MembershipAgent
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.remote_control import resize
from gossamer.comm.rpc.sockets import Tls


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
    options = {"least": 1, "most": 2, "initial": 2, "journal": None, "note": lambda text: None}
    with CoordinatorServer(token=TOKEN, address="127.0.0.1", dead_after_seconds=20.0, tls=tls, **options) as server:
        agents = [MembershipAgent(server.address, TOKEN, place=place, tls=tls) for place in range(2)]
        for each in agents:
            each.here(("127.0.0.1", 7))
        assert agents[0].first_view(30) == agents[1].first_view(30)
        assert "at most 1 workers" in resize(server.address, TOKEN, 1, tls=tls)
        assert agents[0].view_after(1, 30).world == 1
        for each in agents:
            each.close()
