"""Endpoint options: timeouts, queue limit and encryption of one endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.comm.rpc.sockets import Tls
from gossamer.errors import require

QUEUED_FRAMES = 4


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """How an endpoint listens, notices failures and limits its queues; the defaults suit a cluster's network."""

    address: str = "127.0.0.1"  # where to listen
    port: int = 0  # 0 takes any that is free
    dead_after_seconds: float = 5.0  # a peer silent, or disconnected, for so long counts as gone (PeerLeft)
    gone_when_closed: bool = False  # PeerLeft comes at once where a connection is closed, also where the peer lives
    asks_end_with_peer: bool = False  # asks of a peer that is gone raise PeerLost; else they wait until it is back
    heartbeat_seconds: float | None = None  # the longest silence towards others; None: a tenth of dead_after_seconds
    queue_bytes: int | None = None  # queued to one peer; further asks wait with their askers. None: 4 largest frames
    most_asks: int | None = None  # of one peer that wait for answers; one with more is cut off. None: any number
    handshake_seconds: float = 2.0  # from a connection to the proof of the token
    most_handshakes: int = 256  # accepted connections that have not proven the token yet; then the oldest is closed
    longest_backoff_seconds: float = 0.5  # between two dials of a peer that does not answer, at most; it doubles
    goodbye_seconds: float | None = None  # for what is queued, once closed; None: dead_after_seconds
    tls: Tls | None = None  # encrypts all connections: where nobody else may read what travels

    def __post_init__(self) -> None:
        require(self.dead_after_seconds > 0, f"dead_after_seconds is positive, not {self.dead_after_seconds}")

    @property
    def beat_seconds(self) -> float:
        return self.dead_after_seconds / 10 if self.heartbeat_seconds is None else self.heartbeat_seconds

    @property
    def farewell_seconds(self) -> float:
        return self.dead_after_seconds if self.goodbye_seconds is None else self.goodbye_seconds

    def queue_limit_bytes(self, largest_frame_bytes: int) -> int:
        return QUEUED_FRAMES * largest_frame_bytes if self.queue_bytes is None else self.queue_bytes
