"""Peer threads: each runs the script of an asynchronous peer over an endpoint."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gossamer.base.kernels.threads import ThreadCount, count_of_caller
from gossamer.base.peer_ops import Peer, PeerOp, PeerScript
from gossamer.errors import GossamerError


class PeerAnswers(Protocol):
    def answer(self, op: PeerOp) -> Any:
        """Perform one operation and wait for its answer. Thread-safe."""


class RunningScript(Protocol):
    """A script that an endpoint runs."""

    def landed(self) -> bool:
        """Return whether the script has ended."""

    def wait(self, seconds: float | None = None) -> Any:
        """Return the script's result or raise its error. Raises TimeoutError if it has not ended in time."""


class PeerTraffic(Protocol):
    """Traffic from an endpoint to one peer."""

    @property
    def payload_bytes_sent(self) -> int: ...


class PeerEndpoint(PeerAnswers, Protocol):
    """One peer's endpoint: it runs scripts, and has the addresses of other peers."""

    me: Peer
    address: tuple[str, int]  # (host, port) on which it listens

    def meet(self, addresses: Mapping[Peer, tuple[str, int]]) -> None:
        """Set the addresses of peers; each is dialed at the first message to it."""

    def start(self, script: PeerScript) -> RunningScript:
        """Run a script concurrently with the caller."""

    def statistics(self) -> Mapping[Peer, PeerTraffic]:
        """Return the traffic to each peer so far."""

    def close(self, why: GossamerError | None = None) -> None:
        """Close; pending operations raise `why`."""


class PeerThread:
    """A script that runs in a separate thread."""

    def __init__(self, script: PeerScript, endpoint: PeerAnswers, name: str = "gossamer script") -> None:
        self._result: Any = None
        self._failure: BaseException | None = None
        self._landed = threading.Event()
        self._thread_count = count_of_caller()
        self.thread = threading.Thread(target=self._run, args=(script, endpoint), name=name, daemon=True)
        self.thread.start()

    def landed(self) -> bool:
        """Whether the script has ended."""
        return self._landed.is_set()

    def wait(self, seconds: float | None = None) -> Any:
        """Return the script's result or raise its error. Raises TimeoutError if it has not ended in time."""
        if not self._landed.wait(seconds):
            raise TimeoutError(f"the script has not ended within {seconds} s")
        if self._failure is not None:
            raise self._failure
        return self._result

    def _run(self, script: PeerScript, endpoint: PeerAnswers) -> None:
        self._thread_count.adopt()
        try:
            self._result = run_peer_script(script, _Following(endpoint, self._thread_count))
        except BaseException as failure:
            self._failure = failure
        finally:
            self._landed.set()


@dataclass(frozen=True)
class _Following:
    """Forwards operations to the endpoint, and keeps the script's intra-op thread count equal to the caller's."""

    endpoint: PeerAnswers
    thread_count: ThreadCount

    def answer(self, op: PeerOp) -> Any:
        try:
            return self.endpoint.answer(op)
        finally:
            self.thread_count.adopt()


def run_peer_script(script: PeerScript, endpoint: PeerAnswers) -> Any:
    """Run a script in the calling thread and return its result. A failed operation raises at its yield."""
    try:
        op = next(script)
        while True:
            try:
                received = endpoint.answer(op)
            except GossamerError as failure:
                op = script.throw(failure)
            else:
                op, received = script.send(received), None  # drops the last reference outside of the script
    except StopIteration as done:
        return done.value
