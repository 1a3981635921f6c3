"""Remote control of an elastic run, with its token: its status, its maximum number of workers, and invitations."""

from __future__ import annotations

import json
import secrets
from typing import Any

from gossamer.base.peer_ops import Peer, Pull, Pulled, Push, Receipt, Stamp
from gossamer.comm.elastic.agent import LARGEST_FRAME_BYTES, RUN
from gossamer.comm.membership.invitations import INVITE, REVOKE, JoinLink, read_answer, read_issued
from gossamer.comm.membership.messages import COORDINATOR, IDENTITY, RESIZE, STATUS
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import ConnectError, PeerLost

NO_WORKER = 0  # not the number of any worker


def resize(address: tuple[str, int], token: bytes, most: int, *, seconds: float = 10.0, tls: Tls | None = None) -> str:
    """Set the maximum number of workers of the run with this coordinator. Returns a description of the effect.

    Raises ConnectError if no coordinator with this token answers in time.
    """
    receipt: Receipt = _ask(
        address, token, Push(to=COORDINATOR, key=RESIZE, stamp=Stamp(0, most), within_seconds=seconds), seconds, tls
    )
    return receipt.about


def ask_status(address: tuple[str, int], token: bytes, *, seconds: float = 10.0, tls: Tls | None = None) -> str:
    """Return why a run waits, or its number of workers, as text. Raises ConnectError as `resize`."""
    pulled: Pulled = _ask(
        address, token, Pull(of=COORDINATOR, key=f"{STATUS}/{NO_WORKER}", within_seconds=seconds), seconds, tls
    )
    return pulled.about


def ask_identity(address: tuple[str, int], token: bytes, *, seconds: float = 10.0, tls: Tls | None = None) -> str:
    """Return the identity of a run, which a restarted coordinator continues. Raises ConnectError as `resize`."""
    pull = Pull(of=COORDINATOR, key=IDENTITY, within_seconds=seconds)
    pulled: Pulled = _ask(address, token, pull, seconds, tls)
    return pulled.about


def invite(
    address: tuple[str, int],
    token: bytes,
    *,
    lifetime_seconds: float | None,
    uses: int | None,
    seconds: float = 10.0,
    tls: Tls | None = None,
) -> JoinLink:
    """Make an invitation to the run with this coordinator. Its secret is derived here and is not sent.

    Raises ConnectError as `resize`, and for limits that admit no machine.
    """
    limits = json.dumps({"lifetime_seconds": lifetime_seconds, "uses": uses})
    push = Push(to=COORDINATOR, key=INVITE, stamp=Stamp(0, 0), about=limits, within_seconds=seconds)
    receipt: Receipt = _ask(address, token, push, seconds, tls)
    return read_issued(token, receipt.about)


def revoke(
    address: tuple[str, int], token: bytes, number: int, *, seconds: float = 10.0, tls: Tls | None = None
) -> None:
    """Revoke an invitation by its number. Raises ConnectError as `resize`, and for an unknown number."""
    push = Push(to=COORDINATOR, key=REVOKE, stamp=Stamp(0, number), within_seconds=seconds)
    receipt: Receipt = _ask(address, token, push, seconds, tls)
    read_answer(receipt.about)


def _ask(address: tuple[str, int], token: bytes, ask: Push | Pull, seconds: float, tls: Tls | None) -> Any:
    me = Peer("control", secrets.randbits(63))
    credentials = Credentials(me=me, token=token, run=RUN, largest_frame_bytes=LARGEST_FRAME_BYTES)
    with TcpEndpoint(credentials, EndpointOptions(tls=tls)) as endpoint:
        endpoint.meet({COORDINATOR: address})
        try:
            return endpoint.answer(ask)
        except PeerLost:
            raise ConnectError(
                f"no coordinator of an elastic run answered at {address[0]}:{address[1]} within {seconds:g} s, so "
                "nothing was changed. The run's launcher prints the address at its start; the token must be the run's."
            ) from None
