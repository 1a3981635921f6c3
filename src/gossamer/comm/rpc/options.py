"""Endpoint options: timeouts, queue limit and encryption of one endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.comm.rpc.sockets import Tls
from gossamer.errors import require

QUEUED_FRAMES = 4


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Addresses, timeouts and limits of an endpoint. The defaults suit a cluster's network."""

    address: str = "127.0.0.1"  # to listen on
    port: int = 0  # 0 for any free port
    dead_after_seconds: float = 5.0  # a peer that is silent or disconnected for this long counts as gone (PeerLeft)
    gone_when_closed: bool = False  # PeerLeft follows a closed connection at once, even if the peer is alive
    asks_end_with_peer: bool = False  # requests to a peer that is gone raise PeerLost; else they wait for its return
    heartbeat_seconds: float | None = None  # longest silence towards peers; None: dead_after_seconds / 10
    queue_bytes: int | None = None  # send queue per peer; at the limit, requests block. None: 4 largest frames
    most_asks: int | None = None  # unanswered requests of one peer, before it is disconnected. None: no limit
    handshake_seconds: float = 2.0  # from the connection to the authentication
    most_handshakes: int = 256  # unauthenticated accepted connections; at the limit the oldest is closed
    longest_backoff_seconds: float = 0.5  # limit of the exponential backoff between dials of an unreachable peer
    goodbye_seconds: float | None = None  # to send queued messages on close; None: dead_after_seconds
    tls: Tls | None = None  # encrypts all connections

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
