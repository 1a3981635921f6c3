"""Words of peers that do not move in step, answered through TCP: peers come, go and come back."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import Any

from gossamer.core.peer_ops import Answer, Ask, AtOnce, Await, Peer, PeerOp, PeerScript, Pull, Push, Reply
from gossamer.environment.run_token import TOKEN_BYTES
from gossamer.errors import ConnectError, GossamerError, PeerLost, require
from gossamer.runtime.peer_thread import PeerThread as PeerThread
from gossamer.runtime.peer_thread import run_peer_script as run_peer_script
from gossamer.transports.rpc.connection_pool import EndpointOptions
from gossamer.transports.rpc.dispatcher import Dispatcher
from gossamer.transports.rpc.mailbox import Batch, Mailbox, Pending
from gossamer.transports.rpc.peer_state import Traffic
from gossamer.transports.rpc.sockets import Address, Tls, find, is_loopback, listen
from gossamer.transports.wire.authentication import Credentials
from gossamer.transports.wire.frames import Message
from gossamer.transports.wire.messages import answered, asked

QUEUED_FRAMES = 4
JOIN_SECONDS = 10.0  # for a script that computes; one that waits ends at once


class TcpEndpoint:
    """Answers the words of one peer, said by any number of threads.

    token: 32 secret bytes that all processes of a run hold. run, recipe, layout: must be alike everywhere; who differs
    is refused with MismatchError, naming both values. address, port: where to listen; 0 takes any port that is free.
    dead_after_seconds: who is silent for so long, or whose connection broke so long ago, counts as gone (Left).
    heartbeat_seconds: the longest silence towards others; None means a tenth of that. largest_frame_bytes: what is
    larger is refused before any memory is allocated for it. queue_bytes: more than so many wait in their asker's hands
    rather than in the queue to one peer; None means four of the largest frames.

    Words are delivered at least once, with identical bytes: a connection that breaks is dialled again, and what was
    not answered is said again. Tensors in a word belong to the endpoint until its answer is there; those in a Reply
    for ever: nobody may write to them. Tensors that are heard share the memory of their frame.

    Frames are checked against accidents, not signed one by one: the token keeps strangers out, not somebody who can
    change what travels. On a network that is not trusted, pass `tls`, a pair of ssl.SSLContext.
    """

    def __init__(
        self,
        me: Peer,
        *,
        token: bytes,
        run: str,
        recipe: str,
        layout: str,
        largest_frame_bytes: int,
        address: str = "127.0.0.1",
        port: int = 0,
        dead_after_seconds: float = 5.0,
        heartbeat_seconds: float | None = None,
        queue_bytes: int | None = None,
        tls: Tls | None = None,
    ) -> None:
        require(dead_after_seconds > 0, f"dead_after_seconds is positive, not {dead_after_seconds}")
        require(largest_frame_bytes > 0, f"largest_frame_bytes is positive, not {largest_frame_bytes}")
        if len(token) != TOKEN_BYTES and not is_loopback(address):
            raise ConnectError(
                f"A token of {len(token)} bytes keeps nobody out, and {address} is reached from other machines. "
                f"Give all processes one of secrets.token_bytes({TOKEN_BYTES}), or listen at 127.0.0.1."
            )
        self.me, self._largest_frame_bytes = me, largest_frame_bytes
        listening = listen(address, port)
        host, bound = listening.getsockname()[:2]
        self.address: Address = (host, bound)
        self._mailbox = Mailbox()
        self._dispatcher = Dispatcher(
            Credentials(
                me=me, token=token, run=run, recipe=recipe, layout=layout, largest_frame_bytes=largest_frame_bytes
            ),
            listening,
            self._mailbox,
            EndpointOptions(
                dead_after_seconds=dead_after_seconds,
                heartbeat_seconds=dead_after_seconds / 10 if heartbeat_seconds is None else heartbeat_seconds,
                queue_bytes=QUEUED_FRAMES * largest_frame_bytes if queue_bytes is None else queue_bytes,
                tls=tls,
            ),
        )
        self._handles: list[PeerThread] = []
        self._thread = threading.Thread(target=self._dispatcher.run, name=f"gossamer {me}", daemon=True)
        self._thread.start()
        _open_endpoints.add(self)

    def meet(self, addresses: Mapping[Peer, Address]) -> None:
        """Say where others are: whoever is asked something is dialled. To be said again of who has moved.

        Names are looked up here; ConnectError where nobody knows one.
        """
        for peer, address in addresses.items():
            if peer != self.me:
                self._dispatcher.loop.post(partial(self._dispatcher.meet, peer, find(address)))

    def answer(self, op: PeerOp) -> Any:
        """Say one word and wait for its answer. Raises PeerLost where nobody answers within_seconds, or once closed."""
        match op:
            case Push() | Pull():
                return self._ask((op,))[0]
            case AtOnce(ops):
                return self._ask(ops)
            case Await(until=until):
                return self._mailbox.hear(until)
            case Reply(token=token, answer=answer):
                asker = self._mailbox.asker(token)
                if asker is not None:
                    self._dispatcher.loop.act(
                        partial(self._dispatcher.reply, asker, self._fits(answered(answer, asker.request)))
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
        """What went to and came from everyone so far."""
        return self._dispatcher.traffic()

    def close(self, why: GossamerError | None = None) -> None:
        """Say goodbye and free everything. Whoever waits for an answer, and every script, hears why: else PeerLost."""
        self._dispatcher.loop.post(partial(self._dispatcher.close, why))
        if self._thread is not threading.current_thread():
            self._thread.join()
        for handle in self._handles:
            if handle.thread is not threading.current_thread():
                handle.thread.join(JOIN_SECONDS)

    def abandon(self) -> None:
        """In a forked child: whatever is asked here raises PeerLost, and the parent goes on as before."""
        if self._thread.ident is not None:
            self._dispatcher.abandon()

    def __enter__(self) -> TcpEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, ops: tuple[Ask, ...]) -> list[Answer]:
        """Answers in the words' order. The first that fails fails all, and the rest is not asked again."""
        self._mailbox.check_open()
        batch = Batch(len(ops))
        pendings = [self._pending(op, batch) for op in ops]
        try:
            self._dispatcher.loop.act(partial(self._dispatcher.ask, pendings))
            self._mailbox.check_open()  # or nobody grants any wish
            while not batch.wait(_first_due(pendings)):
                late = [pending for pending in pendings if pending.until <= time.monotonic() and not pending.settled]
                if late:
                    raise self._nobody_answered(late[0])
        except BaseException:
            self._give_up(pendings)
            raise
        return [pending.answer for pending in pendings if pending.answer is not None]

    def _pending(self, op: Ask, batch: Batch) -> Pending:
        request = self._mailbox.next_request()
        until = inf if op.within_seconds is None else time.monotonic() + op.within_seconds
        peer = op.to if isinstance(op, Push) else op.of
        require(peer != self.me, f"{self.me} asks itself, and nobody else would answer: ask another peer.")
        return Pending(peer, request, self._fits(asked(op, request)), until, batch)

    def _fits(self, message: Message) -> Message:
        require(
            message.frame_bytes <= self._largest_frame_bytes,
            f"A word of {message.frame_bytes} bytes is larger than the largest frame agreed on: write "
            f"largest_frame_bytes={message.frame_bytes} at both ends, or split it.",
        )
        return message

    def _give_up(self, pendings: list[Pending]) -> None:
        """Returns once no tensor of theirs is read any more."""
        released = threading.Event()
        self._dispatcher.loop.post(partial(self._dispatcher.give_up, pendings, released))
        while not released.wait(0.05) and self._thread.is_alive():
            pass

    def _nobody_answered(self, pending: Pending) -> PeerLost:
        return PeerLost(
            f"{pending.peer} did not answer {self.me} within the time it was given, so what was asked may or may not "
            "have been done. Ask again under the same stamp, or ask somebody else."
        )


_open_endpoints: weakref.WeakSet[TcpEndpoint] = weakref.WeakSet()


def _abandon_all() -> None:
    """A forked child says nothing for its parent, and does not keep its port and its connections open."""
    for endpoint in list(_open_endpoints):
        endpoint.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _first_due(pendings: list[Pending]) -> float:
    return min((pending.until for pending in pendings if not pending.settled), default=inf)
