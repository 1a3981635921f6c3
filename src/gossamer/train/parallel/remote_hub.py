"""Remote hub: this process's endpoint for remote modules: sends its calls, and passes received ones to its services."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import WORKER, Arrived, Await, Peer, PeerLeft, PeerScript, Push, Receipt, Reply, Stamp
from gossamer.comm.environment.run_settings import LARGEST_FRAME_BYTES, is_elastic, returns
from gossamer.comm.environment.wait_timeout import timeout_seconds, waiting_for
from gossamer.comm.process_group import ProcessGroupTransport
from gossamer.comm.runtime.peer_thread import PeerEndpoint
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker
from gossamer.errors import GossamerError, LoopError, PeerLost
from gossamer.events import WithoutSession, emit, notice
from gossamer.train import world_state
from gossamer.train.parallel.remote_messages import Describe, Request, Returned, ScriptEnded, decode_request, encode
from gossamer.train.parallel.remote_service import RemoteService, ServedCall
from gossamer.train.synchronizers.peer_endpoints import SLACK_BYTES, connect_workers

JOIN_SECONDS = 10.0  # for a module that computes; one that waits for another rank ends at once
_ENDED = Receipt(version=0, about=encode(Returned()))


@dataclass
class _Answering:
    """A call that is being served, or was served."""

    tokens: list[int]  # of the message and its repetitions
    answer: Receipt | None = None


@dataclass
class _ClientLog:
    """Calls of one client by number, so that a call that is delivered twice is served once."""

    calls: dict[int, _Answering] = field(default_factory=dict)
    settled: int = 0  # the client has the answers of all calls before this one


class RemoteHub:
    """Calls and services of one rank. Its services start with `serve`; earlier calls wait."""

    def __init__(self, endpoint: PeerEndpoint, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.owners: set[int] = set()
        self._layers = count()
        self._endpoint = endpoint
        self._lock = threading.Condition()
        self._services: dict[int, RemoteService] = {}
        self._threads: list[threading.Thread] = []
        self._early: dict[int, list[ServedCall]] = {}
        self._logs: dict[int, _ClientLog] = {}
        self._numbers, self._under_way = count(1), set[int]()
        self._ended, self._left = {rank}, set[int]()
        self._closed = False
        endpoint.start(self._route())

    def next_layer(self, owner: int) -> int:
        """The number of a new remote module, the same on every rank."""
        self.owners.add(owner)
        return next(self._layers)

    def serve(self, layer: int, service: RemoteService) -> None:
        thread = threading.Thread(target=service.run, name=f"gossamer remote module {layer}", daemon=True)
        thread.start()
        with self._lock:
            self._services[layer], self._threads = service, [*self._threads, thread]
            for call in self._early.pop(layer, []):
                service.submit(call)

    # -- calls of this rank ------------------------------------------------------------------------------

    @contextmanager
    def numbered(self) -> Iterator[int]:
        """Context manager for a call in progress; yields its number."""
        with self._lock:
            number = next(self._numbers)
            self._under_way.add(number)
        try:
            yield number
        finally:
            with self._lock:
                self._under_way.discard(number)

    def call(self, owner: int, layer: int, number: int, request: Request, payload: Payload = ()) -> Receipt:
        """The owner's answer. Raises PeerLost if it has left, or does not answer within GOSSAMER_TIMEOUT."""
        if owner == self.rank:
            return self._call_here(layer, number, request, payload)
        seconds = timeout_seconds()
        with self._lock:
            stamp = Stamp(self.rank, number, min(self._under_way, default=number))
        receipt: Receipt = self._endpoint.answer(
            Push(
                to=Peer(WORKER, owner),
                key=str(layer),
                stamp=stamp,
                payload=payload,
                about=encode(request),
                within_seconds=None if seconds == float("inf") else seconds,
            )
        )
        return receipt

    def _call_here(self, layer: int, number: int, request: Request, payload: Payload) -> Receipt:
        answers: SimpleQueue[Receipt] = SimpleQueue()
        self._services[layer].submit(
            ServedCall(self.rank, number, decode_request(encode(request)), payload, answers.put)
        )
        seconds = timeout_seconds()
        try:
            return answers.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except Empty:
            raise PeerLost(f"remote module {layer} of this rank has not answered {waiting_for(seconds)}") from None

    # -- calls of other ranks ------------------------------------------------------------------------------

    def _route(self) -> PeerScript:
        while True:
            match (yield Await()):
                case Arrived(token=token, op=Push() as op):
                    answer = self._admit(token, op)
                    if answer is not None:
                        yield Reply(token=token, answer=answer)
                case PeerLeft(peer=peer):
                    self._client_left(peer.number)

    def _admit(self, token: int, op: Push) -> Receipt | None:
        """The answer to a call that was answered already; None if it is sent later."""
        client, number = op.stamp.worker, op.stamp.step
        with self._lock:
            log = self._logs.setdefault(client, _ClientLog())
            log.settled = max(log.settled, op.stamp.known)
            for old in [each for each in log.calls if each < log.settled]:
                del log.calls[old]
            if number in log.calls:
                log.calls[number].tokens.append(token)
                return log.calls[number].answer
            if number < log.settled:
                return None  # no client waits for it
            answering = log.calls[number] = _Answering([token])
        try:
            request, layer = decode_request(op.about), int(op.key)
        except (GossamerError, ValueError) as error:
            return Receipt(version=0, about=encode(Returned(error=type(error).__name__, message=str(error))))
        if isinstance(request, ScriptEnded):
            with self._lock:
                self._ended.add(client)
                self._lock.notify_all()
            return _ENDED
        self._hand_on(layer, ServedCall(client, number, request, op.payload, partial(self._reply, answering)))
        return None

    def _hand_on(self, layer: int, call: ServedCall) -> None:
        with self._lock:
            service = self._services.get(layer)
            if service is not None:
                service.submit(call)
            elif isinstance(call.request, Describe) and len(self._early) < self.world:
                self._early.setdefault(layer, []).append(call)
            else:
                call.failed(ValueError(f"rank {self.rank} owns no remote module {layer}"))

    def _reply(self, answering: _Answering, answer: Receipt) -> None:
        """Send an answer. Raises ValueError if it is too large."""
        with self._lock:
            tokens, answering.answer = list(answering.tokens), answer
        with suppress(PeerLost):  # closed in the meantime
            for token in tokens:
                self._endpoint.answer(Reply(token=token, answer=answer))

    def _client_left(self, client: int) -> None:
        with self._lock:
            self._logs.pop(client, None)
            self._left.add(client)
            self._lock.notify_all()
            services = list(self._services.values())
        if client not in self._ended:
            for service in services:
                service.client_left(client)

    # -- the end -------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Announce that this rank makes no more calls; an owner then serves until all ranks have done so.

        Raises PeerLost if a rank has left without notice.
        """
        for owner in sorted(self.owners - {self.rank} - self._left):
            with suppress(PeerLost), self.numbered() as number:
                self.call(owner, -1, number, ScriptEnded())
        with self._lock:
            if self.rank in self.owners:
                self._lock.wait_for(lambda: self._closed or len(self._ended | self._left) == self.world)
            lost = sorted(self._left - self._ended)
        if lost and self.rank in self.owners:
            raise PeerLost(
                f"rank {lost[0]} left before its script ended, so the modules of rank {self.rank} may lack its last "
                "steps. See its log."
            )

    def close(self) -> None:
        """Leave at once; calls in progress raise PeerLost."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for service in self._services.values():
            service.stop()
        self._endpoint.close()
        for thread in self._threads:  # torch aborts a process that exits while a thread computes
            thread.join(JOIN_SECONDS)


# -- the hub of this worker --------------------------------------------------------------------------------------------


_hubs: weakref.WeakKeyDictionary[WorkerScope, RemoteHub] = weakref.WeakKeyDictionary()


def current_hub() -> RemoteHub:
    """This worker's hub. The first call is collective. Raises LoopError."""
    worker = current_worker()
    if worker not in _hubs:
        _hubs[worker] = hub = _opened()
        emit(WithoutSession(trains=True))
        atexit.register(_end, hub, os.getpid())
    return _hubs[worker]


def _opened() -> RemoteHub:
    here = world_state.current()
    own = here.own_transport()
    if is_elastic() or returns() or (own is not None and here.size > 1):
        raise LoopError(
            "remote modules exist only as long as their owner, so they need a run with a fixed number of workers: not "
            "elastic, without workers that return alone, and not simulated. Start it by gossamer run --workers N "
            "SCRIPT."
        )
    transport = own or ProcessGroupTransport()
    try:
        endpoint = connect_workers(
            here.rank, LARGEST_FRAME_BYTES - SLACK_BYTES, transport.all_gather_text, asks_end_with_peer=True
        )
    finally:
        transport.close()
    return RemoteHub(endpoint, here.rank, here.size)


def _end(hub: RemoteHub, process: int) -> None:
    """Close the hub at the script's end; after a failure, or in a forked child, without waiting for other ranks."""
    if os.getpid() != process:
        return
    if getattr(sys, "last_value", None) is None:
        try:
            hub.end()
        except PeerLost as lost:
            notice(str(lost))
    hub.close()
