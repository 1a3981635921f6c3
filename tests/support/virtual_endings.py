"""Ends of pairwise gossip in virtual time: threads that block are scripts, and what they wait for is simulated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from support.pairwise_partners import start_of
from torch import Tensor

from gossamer.algorithms.gossip.partner import Partner, initiate
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import WORKER, Await, Elapsed, Peer, PeerScript
from gossamer.comm.simulation import compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Cut, Fault, VirtualNetwork
from gossamer.errors import GossamerError, PeerLost
from gossamer.train.synchronizers.termination import Claim, TerminationProtocol

LOOK_SECONDS = 0.02
CALLERS = 12  # scripts that a worker has under way at once
TRAINER = "trainer"
KINDS = (WORKER, TRAINER, *(f"caller{'x' * number}" for number in range(CALLERS)))  # all on one machine


class Blocking:
    """A function in a thread of its own that stands still whenever its script does: one of all threads runs at a time.

    pause() in the thread lets so much virtual time pass.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._pauses = work, deque[float]()
        self._thread_may, self._script_may = threading.Semaphore(0), threading.Semaphore(0)
        self._result: Any = None
        self._failure: BaseException | None = None
        self._over = self._abandoned = False

    def pause(self, seconds: float) -> None:
        self._pauses.append(seconds)
        self._script_may.release()
        self._thread_may.acquire()
        if self._abandoned:
            raise SystemExit

    def script(self) -> PeerScript:
        threading.Thread(target=self._run, daemon=True).start()
        try:
            while True:
                self._thread_may.release()
                self._script_may.acquire()
                if self._over:
                    break
                yield from compute(self._pauses.popleft())
        finally:
            if not self._over:
                self._abandoned = True
                self._thread_may.release()
        if self._failure is not None:
            raise self._failure
        return self._result

    def _run(self) -> None:
        self._thread_may.acquire()
        try:
            self._result = self._work()
        except BaseException as failure:
            self._failure = failure
        self._over = True
        self._script_may.release()


@dataclass
class Handle:
    """A script under way, as PeerThread."""

    script: PeerScript
    pause: Callable[[float], None]
    outcome: Any = None
    failure: BaseException | None = None
    over: bool = False

    def wait(self, seconds: float) -> Any:
        for _ in range(max(1, round(seconds / LOOK_SECONDS))):
            if self.over:
                break
            self.pause(LOOK_SECONDS)
        if not self.over:
            raise TimeoutError
        if self.failure is not None:
            raise self.failure
        return self.outcome


class Changes:
    """The condition variable of a thread that blocks in virtual time."""

    def __init__(self, pause: Callable[[float], None]) -> None:
        self._pause = pause

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait_for(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._pause(LOOK_SECONDS)


@dataclass
class Ending:
    """A worker that averages for a while and then ends, and its endpoint."""

    rank: int
    world: int
    steps: int
    claim: Claim
    rule: type[TerminationProtocol]
    open: deque[Handle] = field(default_factory=deque)
    over: bool = False

    def __post_init__(self) -> None:
        self.me = Peer(WORKER, self.rank)
        self.blocking = Blocking(lambda: self.termination.end(self, ()))  # type: ignore[arg-type]
        self.partner = Partner(FlatTensors.pack({"weight": start_of(self.rank)}), self.rank)
        self.termination = self.rule(self.partner, self.world, self.claim)
        self.termination._changed = Changes(self.blocking.pause)  # type: ignore[assignment]

    def start(self, script: PeerScript) -> Any:
        self.open.append(Handle(script, self.blocking.pause))
        return self.open[-1]

    def listen(self) -> PeerScript:
        """Answers until the process ends."""
        script, moment = self.termination.listen(), 0.0
        op = next(script)
        while not self.over:
            if not isinstance(op, Await):
                op = script.send((yield op))
                continue
            event = yield Await(until=moment + LOOK_SECONDS)
            moment = event.moment
            if not isinstance(event, Elapsed):
                op = script.send(event)

    def caller(self) -> PeerScript:
        while True:
            if not self.open:
                yield from compute(LOOK_SECONDS)
                continue
            handle = self.open.popleft()
            try:
                handle.outcome = yield from handle.script
            except GossamerError as failure:
                handle.failure = failure
            handle.over = True

    def trainer(self) -> PeerScript:
        """Returns the parameters with which it ends, or the error."""
        for step in range(self.steps):
            yield from compute(0.1 + 0.01 * self.rank)
            peer = (self.rank + 1 + step % (self.world - 1)) % self.world
            if not self.partner.is_gone(peer):
                self.start(initiate(self.partner, peer, step, 0.5))
            self.partner.drain(self.partner.shown.clone())
        while self.open:
            yield from compute(LOOK_SECONDS)
        try:
            mean = yield from self.blocking.script()
        except PeerLost as lost:
            return lost
        finally:
            self.over = True
        return mean.payload[0]


def of_machines(faults: tuple[Fault, ...]) -> Iterator[Fault]:
    """The same, of all that runs on a worker's machine."""
    for fault in faults:
        if isinstance(fault, Cut):
            a, b = (
                tuple(Peer(kind, peer.number) for peer in side for kind in KINDS)
                for side in (fault.peers_a, fault.peers_b)
            )
            yield replace(fault, peers_a=a, peers_b=b)
        else:
            yield from (replace(fault, peer=Peer(kind, fault.peer.number)) for kind in KINDS)


def ends_of(
    net: VirtualNetwork,
    seed: int,
    rule: type[TerminationProtocol],
    claim: Claim,
    world: int = 3,
    steps: int = 6,
) -> list[Tensor | PeerLost]:
    """With what each worker ends: parameters, or an error."""
    workers = [Ending(rank, world, steps, claim, rule) for rank in range(world)]
    scripts: dict[Peer, Callable[[], PeerScript]] = {}
    for each in workers:
        roles = [each.listen, each.trainer, *[each.caller] * CALLERS]
        scripts |= {Peer(kind, each.rank): role for kind, role in zip(KINDS, roles, strict=True)}
    answering = [peer for peer in scripts if peer.kind != TRAINER]
    net = replace(net, faults=tuple(of_machines(net.faults)))
    trace = simulate_peers(scripts, net, seed, servers=answering, most_seconds=300.0)
    return [trace.result(Peer(TRAINER, rank)) for rank in range(world)]
