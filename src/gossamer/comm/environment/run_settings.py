"""Run settings: servers, TLS and the run's name from GOSSAMER_* variables."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from gossamer.comm.environment.network_interfaces import interfaces
from gossamer.errors import ConnectError

LARGEST_FRAME_BYTES = 2**31  # of servers, which learn the model after they have begun to listen
Address = tuple[str, int]


def dedicated_servers() -> tuple[Address, ...]:
    """Addresses of this run's dedicated servers; none where each worker hosts its part of the parameters.

    Raises ConnectError for what is no list of HOST:PORT.
    """
    text = os.environ.get("GOSSAMER_SERVERS", "")
    try:
        pairs = [each.rpartition(":") for each in text.split(",") if each]
        return tuple((host, int(port)) for host, _, port in pairs)
    except ValueError:
        raise ConnectError(
            f"GOSSAMER_SERVERS is {text!r}, so nobody knows where the servers are. Write HOST:PORT,HOST:PORT, or start "
            "the run by `gossamer run --servers 2`."
        ) from None


def encrypts() -> bool:
    """Whether this run was told to encrypt: GOSSAMER_TLS, which `gossamer run --tls FOLDER` sets."""
    return bool(os.environ.get("GOSSAMER_TLS"))


def run_tls() -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """TLS contexts of this run's connections: for dialing and for accepting.

    None unless GOSSAMER_TLS names a folder with cert.pem, key.pem and ca.pem. Both ends show a certificate of that
    authority; their identity is proved by the run's token, so names in certificates do not count. Raises ConnectError.
    """
    name = os.environ.get("GOSSAMER_TLS")
    return tls_contexts(name) if name else None


def tls_contexts(name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The same of the folder of this name. Raises ConnectError."""
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
            f"Nothing can be encrypted with what is in {name} ({problem}), and this run was told to. Put cert.pem, "
            "key.pem and ca.pem there, of this machine and of the authority that signed them, or leave out --tls."
        ) from None
    return dialling, accepting


def run_name() -> str:
    """The run's name: processes of different runs refuse each other."""
    return os.environ.get("GOSSAMER_RUN", "")


def restarts_alone() -> bool:
    """Whether this run's launcher restarts lost workers one by one, and keeps a registry of their addresses."""
    return os.environ.get("GOSSAMER_REGISTRY") == "1"


def returns() -> bool:
    """Whether this process replaces a lost worker while the others go on."""
    return os.environ.get("GOSSAMER_REJOIN") == "1"


def own_address() -> str:
    """The address of the interface for this job's traffic; loopback where none was chosen."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return interfaces().get(chosen, "127.0.0.1")
