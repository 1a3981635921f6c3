"""Peer network: scripts of workers and servers that are not in lock step, and their messages, in virtual time.

Sessions run the same scripts over these endpoints as over sockets. A message takes the time of its frame on the lines
of the network; scripts take none. All scripts run in the thread that runs the clock, one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from typing import Any

from gossamer.base.ops import Payload, payload_bytes
from gossamer.base.peer_ops import (
    Answer,
    Arrived,
    Ask,
    AtOnce,
    Await,
    Elapsed,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    PeerOp,
    PeerScript,
    Pull,
    Push,
    Reply,
)
from gossamer.base.virtual_clock import VirtualClock
from gossamer.comm.network import Network
from gossamer.comm.network.cost.message_simulator import Wires
from gossamer.comm.rpc.mailbox import endpoint_closed
from gossamer.comm.rpc_protocol.messages import GOODBYE, encode_answer, encode_ask
from gossamer.errors import GossamerError, PeerLost

Block = Callable[[Callable[[], bool], float], None]  # (condition, latest moment): waits in the caller's thread


def _nothing() -> None:
    """Do nothing."""


class PeerNetwork:
    """The endpoints of one job, and the lines between their hosts.

    Args:
        clock: of all messages and scripts.
        lines: returns the network at the current moment; a change applies to later messages.
        host_of: the number of a peer's host in it.
    """

    def __init__(self, clock: VirtualClock, lines: Callable[[], Network], host_of: Callable[[Peer], int]) -> None:
        self.clock, self.tokens = clock, count()
        self._lines, self._host_of = lines, host_of
        self._wires: dict[str, Wires] = {}  # by network
        self._endpoints: dict[Peer, VirtualEndpoint] = {}
        self._early: dict[Peer, list[Callable[[VirtualEndpoint], None]]] = {}  # for endpoints that are not open yet

    def endpoint(self, me: Peer, block: Block) -> VirtualEndpoint:
        """Open the endpoint of `me`. block: waits in the thread of its process."""
        found = self._endpoints[me] = VirtualEndpoint(me, self, block)
        for deliver in self._early.pop(me, ()):
            deliver(found)
        return found

    def post(self, sender: Peer, to: Peer, nbytes: int, deliver: Callable[[VirtualEndpoint], None]) -> None:
        """Call `deliver` with the endpoint of `to` once it has received the message. A closed one receives nothing."""
        here, there = self._host_of(sender), self._host_of(to)
        arrived = partial(self._arrive, to, deliver)
        if here == there:
            self.clock.after(0.0, arrived)
            return
        lines = self._lines()
        wires = self._wires.setdefault(lines.text, Wires(lines))
        wires.post(self.clock, here, there, nbytes, _nothing, arrived)

    def _arrive(self, to: Peer, deliver: Callable[[VirtualEndpoint], None]) -> None:
        endpoint = self._endpoints.get(to)
        if endpoint is None:
            self._early.setdefault(to, []).append(deliver)
        elif endpoint.failure is None:
            deliver(endpoint)


# -- endpoints ---------------------------------------------------------------------------------------------------------


@dataclass
class VirtualTraffic:
    """Traffic of an endpoint to one peer."""

    payload_bytes_sent: int = 0


class VirtualEndpoint:
    """One peer's endpoint: a PeerEndpoint without sockets. Used by one thread at a time."""

    def __init__(self, me: Peer, network: PeerNetwork, block: Block) -> None:
        self.me, self.address = me, (me.kind, me.number)
        self.block, self.clock = block, network.clock
        self.failure: GossamerError | None = None  # raised in its scripts after it was closed
        self._network = network
        self._inbox = deque[PeerEvent]()
        self._scripts: list[VirtualScript] = []  # that have not ended
        self._traffic: dict[Peer, VirtualTraffic] = {}
        self._joined: dict[Peer, VirtualEndpoint] = {}
        self._askers: dict[int, tuple[Peer, Callable[[Answer], None]]] = {}  # by token

    # -- the interface of PeerEndpoint

    def meet(self, addresses: Mapping[Peer, tuple[str, int]]) -> None:
        """Peers are found by their names."""

    def start(self, script: PeerScript) -> VirtualScript:
        """Run a script from this moment on."""
        self._scripts = [each for each in self._scripts if not each.landed()]
        self._scripts.append(VirtualScript(script, self))
        return self._scripts[-1]

    def answer(self, op: PeerOp) -> Any:
        """Perform one operation and wait for its answer."""

        def alone() -> PeerScript:
            return (yield op)

        return self.start(alone()).wait()

    def statistics(self) -> Mapping[Peer, VirtualTraffic]:
        """Return the traffic to each peer so far."""
        return self._traffic

    def close(self, why: GossamerError | None = None) -> None:
        """Inform all connected peers, and raise `why`, else PeerLost, in the own scripts."""
        if self.failure is not None:
            return
        self.failure = why or endpoint_closed(self.me)
        for peer in self._joined:
            self._network.post(self.me, peer, GOODBYE.frame_bytes, partial(_part, self))
        for script in self._scripts:
            script.fail(self.failure)

    # -- messages

    def ask(self, op: Ask, answered: Callable[[Answer], None]) -> None:
        """Send a request."""
        if isinstance(op, Push):  # its tensors may change after the receipt, and the receiver keeps them
            op = replace(op, payload=tuple(tensor.clone() for tensor in op.payload))
        to = op.to if isinstance(op, Push) else op.of
        self._count(to, op.payload if isinstance(op, Push) else ())
        self._network.post(self.me, to, encode_ask(op, 0).frame_bytes, partial(self._deliver, op, answered))

    def _deliver(self, op: Ask, answered: Callable[[Answer], None], receiver: VirtualEndpoint) -> None:
        if self.failure is None:
            receiver.join(self)
            self.join(receiver)
            token = next(self._network.tokens)
            receiver._askers[token] = self.me, answered
            receiver.receive(Arrived(moment=self.clock.now, token=token, sender=self.me, op=op))

    def reply(self, token: int, answer: Answer) -> None:
        """Answer a request, once."""
        asker, answered = self._askers.pop(token)
        self._count(asker, answer.payload)
        nbytes = encode_answer(answer, 0).frame_bytes
        self._network.post(self.me, asker, nbytes, lambda endpoint: answered(answer))

    def _count(self, to: Peer, payload: Payload) -> None:
        self._traffic.setdefault(to, VirtualTraffic()).payload_bytes_sent += payload_bytes(payload)

    # -- events

    def join(self, other: VirtualEndpoint) -> None:
        """A connection to another endpoint exists, now or before."""
        if self._joined.get(other.me) is not other:
            self._joined[other.me] = other
            self.receive(PeerJoined(moment=self.clock.now, peer=other.me))

    def leave(self, other: VirtualEndpoint) -> None:
        if self._joined.get(other.me) is other:
            del self._joined[other.me]
            self.receive(PeerLeft(moment=self.clock.now, peer=other.me))

    def receive(self, event: PeerEvent) -> None:
        """Queue an event for the first script that waits for one, now or later."""
        self._inbox.append(event)
        listener = next((each for each in self._scripts if each.listens), None)
        if listener is not None:
            listener.take(self._inbox.popleft())

    def next_event(self, until: float) -> PeerEvent | None:
        """The oldest event, or Elapsed at `until` or later; None if a script must wait."""
        if self._inbox:
            return self._inbox.popleft()
        return Elapsed(moment=self.clock.now) if until <= self.clock.now else None


def _part(left: VirtualEndpoint, endpoint: VirtualEndpoint) -> None:
    endpoint.leave(left)


# -- scripts -----------------------------------------------------------------------------------------------------------


class VirtualScript:
    """A script that runs in virtual time: a RunningScript."""

    def __init__(self, script: PeerScript, endpoint: VirtualEndpoint) -> None:
        self._script, self._endpoint, self._clock = script, endpoint, endpoint.clock
        self._context = copy_context()  # the worker that started it
        self._landed, self._result = False, None
        self._failure: BaseException | None = None
        self._waits = 0  # number of its current wait
        self.listens = False  # whether it waits for an event
        self._resume(0.0, script.send, None)

    def landed(self) -> bool:
        return self._landed

    def wait(self, seconds: float | None = None) -> Any:
        self._endpoint.block(self.landed, inf if seconds is None else self._clock.now + seconds)
        if not self._landed:
            raise TimeoutError(f"the script has not ended within {seconds} s")
        if self._failure is not None:
            raise self._failure
        return self._result

    def fail(self, failure: GossamerError) -> None:
        """Raise an error at its current operation."""
        self._resume(0.0, self._script.throw, failure)

    def take(self, event: PeerEvent) -> None:
        """Continue with the event for which it waits."""
        self._advance(self._waits, self._script.send, event)

    def _resume(self, seconds: float, resume: Callable[[Any], PeerOp], value: object) -> None:
        """Continue after so many seconds, unless something else has continued it by then."""
        self._clock.after(seconds, self._advance, self._waits, resume, value)

    def _advance(self, wait: int, resume: Callable[[Any], PeerOp], value: object) -> None:
        """Run up to the next wait."""
        if wait != self._waits or self._landed:
            return
        self._waits, self.listens = self._waits + 1, False
        try:
            while (found := self._issue(self._context.run(resume, value))) is not None:
                resume, value = found
        except StopIteration as stop:
            self._landed, self._result = True, stop.value
        except BaseException as failure:  # raised by wait()
            self._landed, self._failure = True, failure

    def _issue(self, op: PeerOp) -> tuple[Callable[[Any], PeerOp], object] | None:
        """Perform an operation. Return how the script continues at once; None if it waits."""
        if self._endpoint.failure is not None:
            return self._script.throw, self._endpoint.failure
        match op:
            case Push() | Pull():
                self._ask((op,), single=True)
            case AtOnce(ops):
                self._ask(ops, single=False)
            case Await(until=until):
                event = self._endpoint.next_event(inf if until is None else until)
                if event is not None:
                    return self._script.send, event
                self.listens = True
                if until is not None:
                    self._clock.at(until, self._elapse, self._waits)
            case Reply(token=token, answer=answer):
                self._endpoint.reply(token, answer)
                return self._script.send, None
        return None

    def _elapse(self, wait: int) -> None:
        self._advance(wait, self._script.send, Elapsed(moment=self._clock.now))

    def _ask(self, ops: tuple[Ask, ...], *, single: bool) -> None:
        wait, answers = self._waits, dict[int, Answer]()

        def answered(place: int, answer: Answer) -> None:
            answers[place] = answer
            if len(answers) == len(ops):
                found = [answers[each] for each in range(len(ops))]
                self._advance(wait, self._script.send, found[0] if single else found)

        for place, op in enumerate(ops):
            self._endpoint.ask(op, partial(answered, place))
            if op.within_seconds is not None:
                late = PeerLost(f"{op.to if isinstance(op, Push) else op.of} did not answer in time")
                self._resume(op.within_seconds, self._script.throw, late)
        if not ops:
            self._resume(0.0, self._script.send, [])
