"""TCP endpoint: answers the ops of peers' scripts over connections that may break; peers come, go and come back."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import Any

from gossamer.base.peer_ops import Answer, Ask, AtOnce, Await, Peer, PeerOp, PeerScript, Pull, Push, Reply
from gossamer.comm.environment.run_token import TOKEN_BYTES
from gossamer.comm.rpc.dispatcher import Dispatcher
from gossamer.comm.rpc.mailbox import Batch, Mailbox, Pending
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc.peer_state import Traffic
from gossamer.comm.rpc.sockets import Address, is_loopback, listen, resolve_address
from gossamer.comm.runtime.peer_thread import PeerThread as PeerThread
from gossamer.comm.runtime.peer_thread import run_peer_script as run_peer_script
from gossamer.comm.wire.authentication import Credentials
from gossamer.comm.wire.frames import Message
from gossamer.comm.wire.messages import encode_answer, encode_ask
from gossamer.errors import ConnectError, GossamerError, PeerLost, require

JOIN_SECONDS = 10.0  # for a script that computes; one that waits ends at once


class TcpEndpoint:
    """Answers the ops of one peer, from any number of threads.

    Asks are delivered at least once, with identical bytes: a connection that breaks is dialed again, and what was not
    answered is resent. Tensors in an ask belong to the endpoint until its answer is there, those in a Reply for ever:
    they must not be written to. Tensors that arrive share the memory of their frame.

    Every frame carries a MAC by a key of its connection: who holds no token can neither join nor change what travels,
    but can read it, where options.tls does not encrypt it.
    """

    def __init__(self, credentials: Credentials, options: EndpointOptions | None = None) -> None:
        options = options or EndpointOptions()
        self.me, self._largest_frame_bytes = credentials.me, credentials.largest_frame_bytes
        require(self._largest_frame_bytes > 0, f"largest_frame_bytes is positive, not {self._largest_frame_bytes}")
        if len(credentials.token) != TOKEN_BYTES and not is_loopback(options.address):
            raise ConnectError(
                f"A token of {len(credentials.token)} bytes keeps nobody out, and {options.address} is reached from "
                f"other machines. Give all processes one of secrets.token_bytes({TOKEN_BYTES}), or listen at 127.0.0.1."
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
        """Learn where peers listen; one is dialed once it is asked something. Call it again for a peer that has moved.

        Names are looked up here. Raises ConnectError for an unknown one.
        """
        for peer, address in addresses.items():
            if peer != self.me:
                self._dispatcher.loop.post(partial(self._dispatcher.set_address, peer, resolve_address(address)))

    def answer(self, op: PeerOp) -> Any:
        """Issue an op and wait for its answer. Raises PeerLost where none comes within_seconds, or once closed."""
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
                raise TypeError(f"{self.me} said {op!r}, which is no word of peers that do not move in step")

    def start(self, script: PeerScript) -> PeerThread:
        """Run a script in a thread of its own."""
        handle = PeerThread(script, self, f"gossamer script of {self.me}")
        self._handles = [each for each in self._handles if not each.landed()] + [handle]
        return handle

    def statistics(self) -> dict[Peer, Traffic]:
        """Traffic to and from each peer so far."""
        return self._dispatcher.traffic()

    def close(self, why: GossamerError | None = None) -> None:
        """Say goodbye to all peers and free everything. Pending asks and scripts raise `why`, or else PeerLost."""
        self._dispatcher.loop.post(partial(self._dispatcher.close, why))
        if self._thread is not threading.current_thread():
            self._thread.join()
        for handle in self._handles:
            if handle.thread is not threading.current_thread():
                handle.thread.join(JOIN_SECONDS)

    def abandon(self) -> None:
        """In a forked child: asks raise PeerLost from now on; the parent goes on as before."""
        if self._thread.ident is not None:
            self._dispatcher.abandon()

    def __enter__(self) -> TcpEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, ops: tuple[Ask, ...]) -> list[Answer]:
        """Answers in the order of the ops. The first ask that fails fails all, and the rest is given up."""
        self._mailbox.check_open()
        batch = Batch(len(ops))
        pendings = [self._pending(op, batch) for op in ops]
        try:
            self._dispatcher.loop.run_or_post(partial(self._dispatcher.ask, pendings))
            self._mailbox.check_open()  # closed meanwhile: nothing would serve the asks
            while not batch.wait(_first_due(pendings)):
                overdue = [pending for pending in pendings if pending.until <= time.monotonic() and not pending.settled]
                if overdue:
                    raise self._timed_out(overdue[0])
        except BaseException:
            self._give_up(pendings)
            raise
        return [pending.answer for pending in pendings if pending.answer is not None]

    def _pending(self, op: Ask, batch: Batch) -> Pending:
        request = self._mailbox.next_request()
        until = inf if op.within_seconds is None else time.monotonic() + op.within_seconds
        peer = op.to if isinstance(op, Push) else op.of
        require(peer != self.me, f"{self.me} asks itself, and nobody else would answer: ask another peer.")
        return Pending(peer, request, self._checked_size(encode_ask(op, request)), until, batch)

    def _checked_size(self, message: Message) -> Message:
        require(
            message.frame_bytes <= self._largest_frame_bytes,
            f"{self.me} has a message of {message.frame_bytes} bytes, above the largest frame agreed on: write "
            f"largest_frame_bytes={message.frame_bytes} at both ends, or split it.",
        )
        return message

    def _give_up(self, pendings: list[Pending]) -> None:
        """Cancel asks; returns once none of their tensors is read any more."""
        released = threading.Event()
        self._dispatcher.loop.post(partial(self._dispatcher.give_up, pendings, released))
        while not released.wait(0.05) and self._thread.is_alive():
            pass

    def _timed_out(self, pending: Pending) -> PeerLost:
        return PeerLost(
            f"{pending.peer} did not answer {self.me} within the time it was given, so what was asked may or may not "
            "have been done. Ask again under the same stamp, or ask somebody else."
        )


_open_endpoints: weakref.WeakSet[TcpEndpoint] = weakref.WeakSet()


def _abandon_all() -> None:
    """A forked child sends nothing for its parent, and does not keep its port and its connections open."""
    for endpoint in list(_open_endpoints):
        endpoint.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _first_due(pendings: list[Pending]) -> float:
    return min((pending.until for pending in pendings if not pending.settled), default=inf)
