"""Remote control of an elastic run: queries its status and changes its maximum number of workers, with its token."""

from __future__ import annotations

import secrets
from typing import Any

from gossamer.base.peer_ops import Peer, Pull, Pulled, Push, Receipt, Stamp
from gossamer.comm.elastic.agent import LARGEST_FRAME_BYTES, RUN
from gossamer.comm.membership.messages import COORDINATOR, RESIZE, STATUS
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc.sockets import Tls
from gossamer.comm.wire.authentication import Credentials
from gossamer.errors import ConnectError, PeerLost

NOBODY = 0  # not the number of any worker


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
        address, token, Pull(of=COORDINATOR, key=f"{STATUS}/{NOBODY}", within_seconds=seconds), seconds, tls
    )
    return pulled.about


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
