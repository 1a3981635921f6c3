"""TLS contexts: from an optional folder of certificates, of an option or of GOSSAMER_TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from support.certificates import certificates

from gossamer.comm.tls_contexts import encrypts, run_tls, seals, tls_contexts
from gossamer.errors import ConnectError


@pytest.mark.parametrize("folder", [None, ""])
def test_without_a_folder_there_is_no_tls(folder: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tls_contexts(folder) is None
    monkeypatch.delenv("GOSSAMER_TLS", raising=False)
    if folder is not None:
        monkeypatch.setenv("GOSSAMER_TLS", folder)
    assert run_tls() is None
    assert not encrypts()
    assert not seals()
    monkeypatch.setenv("GOSSAMER_SEAL", "1")
    assert encrypts()
    assert seals()


@pytest.mark.parametrize("kind", [str, Path])
def test_both_ends_must_present_a_certificate_of_the_authority(kind: type, tmp_path: Path) -> None:
    tls = tls_contexts(kind(certificates(tmp_path / "tls")))
    assert tls is not None
    assert [context.verify_mode for context in tls] == [ssl.CERT_REQUIRED] * 2
    assert not any(context.check_hostname for context in tls)


def test_a_folder_without_certificates_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_TLS", str(tmp_path))
    assert encrypts()
    monkeypatch.setenv("GOSSAMER_SEAL", "1")
    assert not seals(), "certificates replace sealing"
    with pytest.raises(ConnectError, match=r"cert\.pem, key\.pem and ca\.pem"):
        run_tls()
