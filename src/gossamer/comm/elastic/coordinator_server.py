"""Coordinator server: serves an elastic run's coordinator to its workers over authenticated connections."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gossamer.base.host_port import Address, is_loopback
from gossamer.base.peer_ops import Answer, Arrived, Ask, Peer, PeerEvent, PeerScript, Push, Reply
from gossamer.comm.elastic.agent import BEATS, LARGEST_FRAME_BYTES, RUN
from gossamer.comm.elastic.relay import RELAY, Relay
from gossamer.comm.membership.coordinator import Coordinator, coordinate
from gossamer.comm.membership.invitations import GUEST, INVITE, REVOKE, InvitationBook, Welcome
from gossamer.comm.membership.journal import MemoryJournal, ViewLog
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.comm.membership.next_view import CoordinatorOptions, ViewPolicy
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import GossamerError, require

NO_ENTRY = secrets.token_bytes(32)  # no guest can prove this key


class CoordinatorServer:
    """Creates the views of one run, in threads of its own, until it is closed.

    Args:
        options: Settings of the run.
        token: The run's token; 32 bytes if other machines can reach `address`.
        address: Address to listen on.
        port: Port to listen on; 0 for any.
        journal: File from which a restarted server recovers; None to keep no journal.
        note: Called with messages for the user; must not call the server.
        tls: TLS contexts, if the run encrypts. Not where workers seal their connections.
        `more_handlers`: Answers requests of other launchers, by key. They return at once, because workers wait.
        welcome: Answer to machines with an invitation; its addresses are those in addition to this server's own. None:
            the run has no invitations.

    Raises:
        ConnectError: The address or the journal is in use.
        CheckpointError: The journal is damaged.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        token: bytes,
        address: str,
        port: int = 0,
        journal: Path | None,
        note: Callable[[str], None],
        tls: Tls | None = None,
        more_handlers: Mapping[str, Callable[[Ask], Answer]] | None = None,
        welcome: Welcome | None = None,
    ) -> None:
        self._note, self._lock, self._handlers = note, threading.Lock(), more_handlers or {}
        self._log = None if journal is None else ViewLog(journal, note)
        kept = self._log or MemoryJournal()
        self.invitations: InvitationBook | None = None
        sealed = options.sealed
        require(not sealed or tls is None, "workers seal their connections, or use those of --tls: omit one of them")
        self._relay = Relay(note) if options.relays else None
        try:
            self._coordinator = Coordinator(
                ViewPolicy(options, kept, note), address_of=lambda peer: self._endpoint.address_of(peer)
            )
            self._endpoint = TcpEndpoint(
                Credentials(
                    me=COORDINATOR,
                    token=token,
                    run=RUN,
                    largest_frame_bytes=LARGEST_FRAME_BYTES,
                    token_of=self._token_of,
                ),
                EndpointOptions(
                    address=address,
                    port=port,
                    dead_after_seconds=options.dead_after_seconds,
                    heartbeat_seconds=options.dead_after_seconds / BEATS,
                    gone_when_closed=True,
                    tls=tls,
                    hand_over={} if self._relay is None else {RELAY: self._relay.take},
                ),
            )
        except BaseException:
            self._close_log()
            self._close_relay()
            raise
        self.address: tuple[str, int] = self._endpoint.address
        if welcome is not None:
            addresses = _addresses(welcome.addresses, self.address)
            welcome = replace(welcome, addresses=addresses, relays=options.relays)
            self.invitations = InvitationBook(token, self._coordinator.rule.run, kept, welcome)
        self._endpoint.start(self._serving())

    @property
    def run(self) -> str:
        """Identity of the run."""
        return self._coordinator.rule.run

    @property
    def ended(self) -> str:
        """Why the run has ended; empty if it has not."""
        return self._coordinator.rule.ended

    @property
    def finishing(self) -> bool:
        """Whether a member has left because its training is complete."""
        return self._coordinator.rule.finishing

    @property
    def world(self) -> int:
        """Number of members of the newest view; 0 before the first."""
        view = self._coordinator.rule.view
        return 0 if view is None else view.world

    @property
    def members(self) -> frozenset[int]:
        """Numbers of the newest view's members, without those known to be lost."""
        with self._lock:
            return self._coordinator.rule.living

    @property
    def most(self) -> int:
        """Maximum number of workers of the run."""
        return self._coordinator.rule.most

    @property
    def resizes(self) -> int:
        """Number of resize requests."""
        return self._coordinator.rule.resizes

    @property
    def survivors(self) -> int:
        """Number of members of the newest view that are not known to have ended."""
        with self._lock:
            return len(self._coordinator.rule.survivors)

    @property
    def answering_survivors(self) -> int:
        """Number of survivors that are connected."""
        with self._lock:
            return sum(each.connected for each in self._coordinator.rule.survivors)

    def launched(self, number: int) -> None:
        """Record that this server's launcher has started this worker, so both end together."""
        with self._lock:
            self._coordinator.rule.launched(number)

    def end(self, why: str) -> None:
        """End the run, and notify all of its workers."""
        with self._lock:
            replies = self._coordinator.end(why, time.monotonic())
        self._send(replies)

    def resize(self, most: int) -> str:
        """Set the maximum number of workers; the newest are evicted. Returns a description of the effect."""
        with self._lock:
            message, replies = self._coordinator.resize(most, time.monotonic())
        self._send(replies)
        return message

    def gone(self, number: int) -> None:
        """Record that a launcher saw the process of this worker end."""
        with self._lock:
            replies = self._coordinator.gone(number, time.monotonic())
        self._send(replies)

    def expect(self, workers: int) -> None:
        """Lower the size of the first view to `workers`, because some workers died before they connected."""
        with self._lock:
            replies = self._coordinator.expect(workers, time.monotonic())
        self._send(replies)

    def number_at(self, place: int) -> int | None:
        """Return the number of the newest worker that reported this launch slot, or None."""
        with self._lock:
            return self._coordinator.number_at(place)

    def close(self) -> None:
        """Stop. Training continues; changes of membership wait for a server with the same journal and address."""
        self._endpoint.close()
        self._close_relay()
        self._close_log()

    def __enter__(self) -> CoordinatorServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serving(self) -> PeerScript:
        try:
            yield from coordinate(self._coordinator, self._react)
        except (GossamerError, GeneratorExit):
            raise
        except BaseException as error:
            self._note(f"The coordinator failed: {error!r}. Training continues until a worker joins or is lost.")
            raise

    def _react(self, event: PeerEvent) -> list[Reply]:
        if isinstance(event, Arrived):
            answer = self._answer_apart(event.sender, event.op)
            if answer is not None:
                return [Reply(token=event.token, answer=answer)]
        with self._lock:
            return self._coordinator.react(event)

    def _answer_apart(self, sender: Peer, op: Ask) -> Answer | None:
        """Answer a request that does not concern the views; None for any other. Guests have no other requests."""
        if sender.kind == GUEST:
            assert self.invitations is not None  # otherwise no guest is authenticated
            view, status = self._coordinator.rule.view, self._coordinator.status()
            members = () if view is None else tuple(each.addresses for each in view.members)
            relays = tuple((each.host, each.port) for each in self._coordinator.relays)
            seen_as = self._endpoint.address_of(sender)
            return self.invitations.answer_guest(sender, op, members, status, seen_as, relays)
        if isinstance(op, Push) and op.key in (INVITE, REVOKE) and self.invitations is not None:
            return self.invitations.answer_member(op)
        return self._handlers[op.key](op) if op.key in self._handlers else None

    def _token_of(self, peer: Peer) -> bytes | None:
        if peer.kind != GUEST:
            return None
        return NO_ENTRY if self.invitations is None else self.invitations.secret(peer) or NO_ENTRY

    def _send(self, replies: list[Reply]) -> None:
        with suppress(GossamerError):  # the endpoint is closing
            for reply in replies:
                self._endpoint.answer(reply)

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()


def _addresses(public: tuple[Address, ...], own: Address) -> tuple[Address, ...]:
    """Addresses of a link: those that the user named, and the server's own unless other machines cannot reach it."""
    return public if public and is_loopback(own[0]) else (*public, own)
