"""Peer threads: each runs the script of a peer that does not move in step, over any endpoint."""

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
        """Perform one operation and wait for its answer. May be called by any thread."""


class PeerTraffic(Protocol):
    """What went from an endpoint to one peer."""

    @property
    def payload_bytes_sent(self) -> int: ...


class PeerEndpoint(PeerAnswers, Protocol):
    """One peer's place on the network: it runs scripts, and knows where other peers listen."""

    me: Peer
    address: tuple[str, int]  # (host, port) at which it listens

    def meet(self, addresses: Mapping[Peer, tuple[str, int]]) -> None:
        """Learn where peers listen; connections are made with the first message to them."""

    def start(self, script: PeerScript) -> PeerThread:
        """Run a script in a thread of its own."""

    def statistics(self) -> Mapping[Peer, PeerTraffic]:
        """What went to each peer so far."""

    def close(self, why: GossamerError | None = None) -> None:
        """Leave; pending operations raise `why`."""


class PeerThread:
    """A script that runs in a thread of its own."""

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
        """What the script returned; raises what it raised, and TimeoutError where it has not ended in time."""
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
    """Answers as the endpoint does; what the script does next keeps to the caller's intra-op threads."""

    endpoint: PeerAnswers
    thread_count: ThreadCount

    def answer(self, op: PeerOp) -> Any:
        try:
            return self.endpoint.answer(op)
        finally:
            self.thread_count.adopt()


def run_peer_script(script: PeerScript, endpoint: PeerAnswers) -> Any:
    """Run a script in the calling thread and return its result. A failing operation raises at its yield."""
    try:
        op = next(script)
        while True:
            try:
                heard = endpoint.answer(op)
            except GossamerError as failure:
                op = script.throw(failure)
            else:
                op, heard = script.send(heard), None  # the answer is the script's alone
    except StopIteration as done:
        return done.value
