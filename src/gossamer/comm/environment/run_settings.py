"""Run settings: servers, TLS and the run's name from GOSSAMER_* variables."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from gossamer.comm.environment.network_interfaces import interfaces
from gossamer.errors import ConnectError

LARGEST_FRAME_BYTES = 2**31  # for servers, which begin to listen before they know the model
Address = tuple[str, int]


def dedicated_servers() -> tuple[Address, ...]:
    """Return the addresses of this run's dedicated servers; empty if each worker hosts a part of the parameters.

    Raises ConnectError if GOSSAMER_SERVERS is not a list of HOST:PORT.
    """
    text = os.environ.get("GOSSAMER_SERVERS", "")
    try:
        pairs = [each.rpartition(":") for each in text.split(",") if each]
        return tuple((host, int(port)) for host, _, port in pairs)
    except ValueError:
        raise ConnectError(
            f"GOSSAMER_SERVERS={text!r} is not a list of addresses. Write GOSSAMER_SERVERS=HOST:PORT,HOST:PORT, or "
            "start the run with `gossamer run --servers 2`."
        ) from None


def encrypts() -> bool:
    """Whether this run must encrypt: GOSSAMER_TLS is set, for example by `gossamer run --tls FOLDER`."""
    return bool(os.environ.get("GOSSAMER_TLS"))


def run_tls() -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Return the TLS contexts of this run's connections, for dialing and for accepting.

    None unless GOSSAMER_TLS names a folder with cert.pem, key.pem and ca.pem. Both ends present a certificate of that
    authority. Names in certificates are ignored, because the run's token proves identity. Raises ConnectError.
    """
    name = os.environ.get("GOSSAMER_TLS")
    return tls_contexts(name) if name else None


def tls_contexts(name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts for the certificates in this folder. Raises ConnectError."""
    folder = Path(name)
    dialling, accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    dialling.check_hostname = False
    accepting.verify_mode = ssl.CERT_REQUIRED
    try:
        for context in (dialling, accepting):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
            context.load_verify_locations(folder / "ca.pem")
    except (OSError, ssl.SSLError) as problem:
        raise ConnectError(
            f"TLS is requested, but the certificates in {name} cannot be used ({problem}). Put cert.pem, "
            "key.pem and ca.pem there, of this machine and of the authority that signed them, or omit --tls."
        ) from None
    return dialling, accepting


def run_name() -> str:
    """The run's name. Processes of different runs refuse each other."""
    return os.environ.get("GOSSAMER_RUN", "")


def restarts_alone() -> bool:
    """Whether this run's launcher restarts lost workers individually, and keeps a registry of their addresses."""
    return os.environ.get("GOSSAMER_REGISTRY") == "1"


def returns() -> bool:
    """Whether this process replaces a lost worker while the others continue."""
    return os.environ.get("GOSSAMER_REJOIN") == "1"


def own_address() -> str:
    """Return the address of the interface for this job's traffic; loopback if none was chosen."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return interfaces().get(chosen, "127.0.0.1")
