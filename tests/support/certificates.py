"""Certificates of a run that encrypts, made by the openssl program."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from gossamer.comm.mesh.sealing import mesh_tls
from gossamer.comm.tls_contexts import Tls

MAKE = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"


def certificates(folder: Path) -> Path:
    """A folder as --tls takes it, of an authority of its own, whose certificate is the only one."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    folder.mkdir()
    files = "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")
    subprocess.run([*MAKE.split(), *files], check=True, capture_output=True)
    shutil.copy(folder / "cert.pem", folder / "ca.pem")
    return folder


def contexts(folder: Path) -> Tls:
    """As a worker makes them that is told of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_TLS", str(folder))
        found = mesh_tls()
    assert found is not None
    return found


def old(tls: Tls) -> Tls:
    """The same, but TLS 1.2 at most."""
    for context in tls:
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return tls
