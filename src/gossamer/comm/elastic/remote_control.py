"""Remote control of an elastic run: asks how it stands and changes how many workers it may have, with its token."""

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

NOBODY = 0  # the number of no worker


def resize(address: tuple[str, int], token: bytes, most: int, *, seconds: float = 10.0, tls: Tls | None = None) -> str:
    """Have at most `most` workers in the run whose coordinator listens there; returns what happens, in words.

    Raises ConnectError where no coordinator that holds the token answers in time.
    """
    receipt: Receipt = _ask(
        address, token, Push(to=COORDINATOR, key=RESIZE, stamp=Stamp(0, most), within_seconds=seconds), seconds, tls
    )
    return receipt.about


def ask_status(address: tuple[str, int], token: bytes, *, seconds: float = 10.0, tls: Tls | None = None) -> str:
    """What a run waits for, or how many workers it has, in words. Raises ConnectError as `resize`."""
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
                "nothing was changed. The run's launcher says at its start where it listens; the token must be its."
            ) from None
