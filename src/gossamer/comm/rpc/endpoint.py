"""TCP endpoint: executes the ops of a peer's scripts over connections that may break; peers join, leave and return."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import Any

from gossamer.base import system
from gossamer.base.host_port import Address, is_loopback
from gossamer.base.peer_ops import Answer, Ask, AtOnce, Await, Peer, PeerOp, PeerScript, Pull, Push, Reply
from gossamer.comm.environment.run_token import TOKEN_BYTES
from gossamer.comm.rpc.dispatcher import Dispatcher
from gossamer.comm.rpc.mailbox import Batch, Mailbox, Pending
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc.tls_sockets import listen, resolve_address
from gossamer.comm.rpc.unanswered_requests import Traffic
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.rpc_protocol.frames import Message
from gossamer.comm.rpc_protocol.messages import encode_answer, encode_ask
from gossamer.comm.runtime.peer_thread import PeerThread as PeerThread
from gossamer.comm.runtime.peer_thread import run_peer_script as run_peer_script
from gossamer.errors import ConnectError, GossamerError, PeerLost, require

JOIN_SECONDS = 10.0  # for a script that computes; a waiting script ends at once


class TcpEndpoint:
    """Executes the ops of one peer, from any number of threads.

    Requests are delivered at least once, with identical bytes: a broken connection is dialed again, and unanswered
    requests are resent. The tensors of a request must not be modified until it is answered, and those of a Reply never.
    Received tensors share the memory of their frame.

    Every frame carries a MAC with a key of its connection: a process without the token can neither join nor modify the
    traffic. It can read the traffic, unless options.tls encrypts it.

    Args:
        credentials: Identity of this peer, the run's token and the largest frame.
        options: Timeouts, limits and encryption.

    Raises:
        ConnectError: The address cannot be used, or is reachable from other machines while the token is too short.

    Example:
        endpoint = TcpEndpoint(credentials, EndpointOptions(address="0.0.0.0", port=9000))
        grid = TcpGrid(endpoint)
    """

    def __init__(self, credentials: Credentials, options: EndpointOptions | None = None) -> None:
        options = options or EndpointOptions()
        self.me, self._largest_frame_bytes = credentials.me, credentials.largest_frame_bytes
        require(self._largest_frame_bytes > 0, f"largest_frame_bytes must be positive, got {self._largest_frame_bytes}")
        if len(credentials.token) != TOKEN_BYTES and not is_loopback(options.address):
            raise ConnectError(
                f"A token of {len(credentials.token)} bytes is too short for {options.address}, which is reachable "
                f"from other machines. Give all processes one secrets.token_bytes({TOKEN_BYTES}), or use 127.0.0.1"
            )
        listening = listen(options.address, options.port)
        host, port = listening.getsockname()[:2]
        self.address: Address = (host, port)
        self._mailbox = Mailbox()
        self._dispatcher = Dispatcher(credentials, listening, self._mailbox, options)
        self._handles: list[PeerThread] = []
        self._thread = threading.Thread(target=self._dispatcher.run, name=f"gossamer {self.me}", daemon=True)
        self._thread.start()
        _open_endpoints.add(self)

    def meet(self, addresses: Mapping[Peer, Address]) -> None:
        """Set the addresses of peers. A peer is dialed at the first request to it. Call again if a peer has moved.

        Names are resolved here. Raises ConnectError for an unknown name.
        """
        for peer, address in addresses.items():
            if peer != self.me:
                self._dispatcher.loop.post(partial(self._dispatcher.set_address, peer, resolve_address(address)))

    def answer(self, op: PeerOp) -> Any:
        """Execute an op and wait for its answer. Raises PeerLost after within_seconds, or if the endpoint is closed."""
        match op:
            case Push() | Pull():
                return self._ask((op,))[0]
            case AtOnce(ops):
                return self._ask(ops)
            case Await(until=until):
                return self._mailbox.next_event(until)
            case Reply(token=token, answer=answer):
                asker = self._mailbox.take_asker(token)
                if asker is not None:
                    self._dispatcher.loop.run_or_post(
                        partial(self._dispatcher.reply, asker, self._checked_size(encode_answer(answer, asker.request)))
                    )
                return None
            case _:
                raise TypeError(f"{self.me} issued {op!r}, which is not an op of asynchronous peers")

    def start(self, script: PeerScript) -> PeerThread:
        """Run a script in a separate thread."""
        handle = PeerThread(script, self, f"gossamer script of {self.me}")
        self._handles = [each for each in self._handles if not each.landed()] + [handle]
        return handle

    def address_of(self, peer: Peer) -> Address | None:
        """Return the address from which a peer is connected, behind a router that of the router; None if it is not."""
        return self._dispatcher.address_of(peer)

    def statistics(self) -> dict[Peer, Traffic]:
        """Return the traffic with each peer so far."""
        return self._dispatcher.traffic()

    def close(self, why: GossamerError | None = None) -> None:
        """Send a goodbye to all peers and close. Pending requests and scripts raise `why`, else PeerLost."""
        self._dispatcher.loop.post(partial(self._dispatcher.close, why))
        if self._thread is not threading.current_thread():
            self._thread.join()
        for handle in self._handles:
            if handle.thread is not threading.current_thread():
                handle.thread.join(JOIN_SECONDS)

    def abandon(self) -> None:
        """In a forked child: requests raise PeerLost from now on. The parent is not affected."""
        if self._thread.ident is not None:
            self._dispatcher.abandon()

    def __enter__(self) -> TcpEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, ops: tuple[Ask, ...]) -> list[Answer]:
        """Return the answers in the order of the ops. The first failed request fails all, and cancels the rest."""
        self._mailbox.check_open()
        batch = Batch(len(ops))
        pendings = [self._pending(op, batch) for op in ops]
        try:
            self._dispatcher.loop.run_or_post(partial(self._dispatcher.ask, pendings))
            self._mailbox.check_open()  # if it was closed meanwhile, the requests would not be served
            excused = self._dispatcher.excused_seconds
            while not batch.wait(_first_due(pendings)):
                overdue = [pending for pending in pendings if pending.until <= time.monotonic() and not pending.settled]
                if not overdue:
                    continue
                self._dispatcher.loop.run_exclusively(self._dispatcher.excuse_pause)
                more, excused = self._dispatcher.excused_seconds - excused, self._dispatcher.excused_seconds
                if not more:
                    raise self._timed_out(overdue[0])
                for pending in pendings:
                    pending.until += more
        except BaseException:
            self._give_up(pendings)
            raise
        return [pending.answer for pending in pendings if pending.answer is not None]

    def _pending(self, op: Ask, batch: Batch) -> Pending:
        request = self._mailbox.next_request()
        until = inf if op.within_seconds is None else time.monotonic() + op.within_seconds
        peer = op.to if isinstance(op, Push) else op.of
        require(peer != self.me, f"{self.me} sent a request to itself, which has no answer. Send it to another peer.")
        return Pending(peer, request, self._checked_size(encode_ask(op, request)), until, batch)

    def _checked_size(self, message: Message) -> Message:
        require(
            message.frame_bytes <= self._largest_frame_bytes,
            f"a message of {self.me} has {message.frame_bytes} bytes, above the agreed largest frame. Set "
            f"largest_frame_bytes={message.frame_bytes} at both ends, or split the message.",
        )
        return message

    def _give_up(self, pendings: list[Pending]) -> None:
        """Cancel requests, and return once their tensors are no longer read."""
        released = threading.Event()
        self._dispatcher.loop.post(partial(self._dispatcher.give_up, pendings, released))
        while not released.wait(0.05) and self._thread.is_alive():
            pass

    def _timed_out(self, pending: Pending) -> PeerLost:
        return PeerLost(
            f"{pending.peer} did not answer {self.me} in time, so it is unknown whether it executed the request. "
            "Repeat the request with the same stamp, or send it to another peer."
        )


_open_endpoints: weakref.WeakSet[TcpEndpoint] = weakref.WeakSet()


def _abandon_all() -> None:
    """Close the copies of a forked child, which sends nothing, so that it does not keep the parent's port open."""
    for endpoint in list(_open_endpoints):
        endpoint.abandon()


system.after_fork_in_child(_abandon_all)


def _first_due(pendings: list[Pending]) -> float:
    return min((pending.until for pending in pendings if not pending.settled), default=inf)
