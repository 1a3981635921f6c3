"""A federation without a network, whose server is killed after any of its ops, or wherever it touches the disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

from support.federated_faults import WholeNumbers

from gossamer.base.peer_ops import Arrived, Elapsed, Peer, PeerScript, Reply
from gossamer.federated.messages import THE_SERVER


class Killed(BaseException):
    """The server's process has ended, in the middle of whatever it did."""


@dataclass
class Desk:
    """Delivers every ask at once, in a drawn order. Asks that a killed server had not answered are asked again."""

    done: WholeNumbers
    kill_after: float = inf  # ops of the server
    ops: int = 0
    kills: int = 0
    moment: float = 0.0
    clients: dict[Peer, PeerScript] = field(default_factory=dict)
    asks: dict[Peer, Any] = field(default_factory=dict)  # not answered yet
    undelivered: list[Peer] = field(default_factory=list)
    tokens: dict[int, Peer] = field(default_factory=dict)

    def run(self) -> None:
        """Until every device has ended."""
        scripts = self.done.scripts()
        start, random = scripts.pop(THE_SERVER), Random(self.done.seed)
        for peer, script in scripts.items():
            self.clients[peer] = script()
            self._resume(peer, None)
        server = None
        while self.clients:
            try:
                if server is None:
                    server = start()
                    next(server)
                    self._hear(server, Elapsed(moment=self.moment))
                self.moment += 1
                assert self.undelivered, f"nothing can happen any more: {self.asks}"
                peer = self.undelivered.pop(random.randrange(len(self.undelivered)))
                token = len(self.tokens)
                self.tokens[token] = peer
                self._hear(server, Arrived(moment=self.moment, token=token, sender=peer, op=self.asks[peer]))
            except Killed:
                self.kills += 1
                server = None
                self.undelivered = sorted(self.asks)

    def _hear(self, server: PeerScript, event: Any) -> None:
        op = server.send(event)
        self._count()
        while isinstance(op, Reply):
            peer = self.tokens[op.token]
            if peer in self.asks:
                del self.asks[peer]
                self._resume(peer, op.answer)
            op = server.send(None)
            self._count()

    def _count(self) -> None:
        self.ops += 1
        if self.ops == self.kill_after:
            raise Killed

    def _resume(self, peer: Peer, answer: Any) -> None:
        try:
            self.asks[peer] = self.clients[peer].send(answer)
            self.undelivered.append(peer)
        except StopIteration:
            del self.clients[peer]


def killed_after(done: WholeNumbers, ops: float) -> Desk:
    """Run with one kill after so many ops."""
    desk = Desk(done, ops)
    desk.run()
    return desk
