"""Endpoint options: timeouts, queue limit and encryption of one endpoint."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gossamer.base.host_port import Address
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import require

QUEUED_FRAMES = 4


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Addresses, timeouts and limits of an endpoint. The defaults suit a cluster's network.

    Attributes:
        address: IP address to listen on.
        port: port to listen on; 0 for any free port.
        dead_after_seconds: a peer that is silent or disconnected for this long counts as gone (PeerLeft).
        gone_when_closed: whether PeerLeft follows a closed connection at once, even if the peer is alive.
        asks_end_with_peer: whether requests to a peer that is gone raise PeerLost; else they wait for its return.
        heartbeat_seconds: longest time without a frame to a peer; None: dead_after_seconds / 10.
        queue_bytes: limit of the send queue per peer; at the limit, requests block. None: 4 largest frames.
        most_asks: limit of unanswered requests of one peer, which is then disconnected. None: no limit.
        handshake_seconds: longest time from the connection to the authentication.
        most_handshakes: limit of unauthenticated connections; at the limit the oldest is closed.
        longest_backoff_seconds: limit of the exponential backoff between dials of an unreachable peer.
        goodbye_seconds: longest time to send queued messages on close; None: dead_after_seconds.
        tls: certificates that encrypt all connections; None: no encryption.
        dial_from: own address of dialed connections, which may be that of another listening socket of this process.
        hand_over: by kind of the dialer, receives its connection after the authentication, instead of this endpoint. It
            must return at once.

    Example:
        options = EndpointOptions(address="0.0.0.0", port=9000, dead_after_seconds=30.0)
    """

    address: str = "127.0.0.1"
    port: int = 0
    dead_after_seconds: float = 5.0
    gone_when_closed: bool = False
    asks_end_with_peer: bool = False
    heartbeat_seconds: float | None = None
    queue_bytes: int | None = None
    most_asks: int | None = None
    handshake_seconds: float = 2.0
    most_handshakes: int = 256
    longest_backoff_seconds: float = 0.5
    goodbye_seconds: float | None = None
    tls: Tls | None = None
    dial_from: Address | None = None
    hand_over: Mapping[str, Callable[[socket.socket], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.dead_after_seconds > 0, f"dead_after_seconds must be positive, got {self.dead_after_seconds}")

    @property
    def beat_seconds(self) -> float:
        return self.dead_after_seconds / 10 if self.heartbeat_seconds is None else self.heartbeat_seconds

    @property
    def farewell_seconds(self) -> float:
        return self.dead_after_seconds if self.goodbye_seconds is None else self.goodbye_seconds

    def queue_limit_bytes(self, largest_frame_bytes: int) -> int:
        return QUEUED_FRAMES * largest_frame_bytes if self.queue_bytes is None else self.queue_bytes
