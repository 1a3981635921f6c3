"""The page on federations: its lines of openssl make certificates by which a server and a device talk."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.deployed_federations import join, server
from support.page_commands import FENCE
from support.paths import ROOT

from gossamer.comm.tls_contexts import Tls, tls_contexts

PAGE = (ROOT / "docs" / "how-to" / "federated-deployment.md").read_text(encoding="utf-8")


def tls(folder: Path) -> Tls:
    return tls_contexts(str(folder))


def test_certificates_are_made_by_the_lines_that_the_page_shows(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates, and is not installed")
    blocks = [block for _, block in FENCE.findall(PAGE) if "openssl" in block]
    authority, machine = blocks
    for lines in (authority, machine, machine.replace("device-3", "server")):
        subprocess.run(["bash", "-e", "-c", lines], cwd=tmp_path, check=True, capture_output=True)
    assert {each.name for each in (tmp_path / "device-3").iterdir()} == {"cert.pem", "key.pem", "ca.pem"}
    served = server(clients=1, rounds=1, tls=tls(tmp_path / "server"))
    device = join(served.address, tls=tls(tmp_path / "device-3"))
    assert served.run() == "finished"
    assert device.ended() == 1
