"""Encryption of a process's connections: TLS contexts from the folder of certificates that --tls names, or sealing."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import NamedTuple

from gossamer.errors import ConnectError


class Tls(NamedTuple):
    """SSL contexts: for connections that this process dials, and for those that it accepts."""

    dialing: ssl.SSLContext
    accepting: ssl.SSLContext


SEAL = "GOSSAMER_SEAL"


def seals() -> bool:
    """Whether workers of a fixed number seal their connections without certificates: GOSSAMER_SEAL is set, for example
    by `gossamer run --nnodes 2`, and no certificates are given."""
    return bool(os.environ.get(SEAL)) and not os.environ.get("GOSSAMER_TLS")


def encrypts() -> bool:
    """Whether this run must encrypt, with certificates (`gossamer run --tls FOLDER`) or without."""
    return bool(os.environ.get("GOSSAMER_TLS")) or seals()


def run_tls() -> Tls | None:
    """Return the TLS contexts of this run's connections; None unless GOSSAMER_TLS is set. Raises ConnectError."""
    return tls_contexts(os.environ.get("GOSSAMER_TLS"))


def tls_contexts(folder: Path | str | None) -> Tls | None:
    """Return the TLS contexts for the certificates in a folder.

    Both ends present a certificate of the same authority. Names in certificates are ignored, because the run's token
    proves identity.

    Args:
        folder: Has cert.pem, key.pem and ca.pem. None, or an empty text, for connections without TLS.

    Returns:
        The contexts; None without a folder.

    Raises:
        ConnectError: The certificates cannot be used.
    """
    if not folder:
        return None
    files = Path(folder)
    tls = Tls(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    tls.dialing.check_hostname = False
    tls.accepting.verify_mode = ssl.CERT_REQUIRED
    try:
        for context in tls:
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(files / "cert.pem", files / "key.pem")
            context.load_verify_locations(files / "ca.pem")
    except (OSError, ssl.SSLError) as problem:
        raise ConnectError(
            f"TLS is requested, but the certificates in {folder} cannot be used ({problem}). Put cert.pem, "
            "key.pem and ca.pem there, of this machine and of the authority that signed them, or omit --tls."
        ) from None
    return tls
