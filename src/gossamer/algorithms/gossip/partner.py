"""Pairwise gossip: a worker's state while it averages with one neighbor at a time, and the scripts of both sides.

Exchanges and training run concurrently. A restarted worker has the next incarnation number, so that its peers reject
stale messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Dense, point_to_point
from gossamer.algorithms.compressors.distortion import has_memory, relative_error
from gossamer.algorithms.gossip.state_transfer import STATE, with_checksum
from gossamer.algorithms.topologies import Topology
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import all_finite, scratch_like
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import (
    WORKER,
    Arrived,
    Await,
    Peer,
    PeerJoined,
    PeerLeft,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.errors import MalformedError, NotFinite, RecipeError

AVERAGE = "average"
NO_EXCHANGE = Receipt(version=-1)
MOST_LOST = 0.01  # largest relative squared error of the parameters in one message
STEPS_PER_INCARNATION = 2**32  # more than a worker's steps in one; 2**31 incarnations fit into the other 31 of 63 bits
MOST_DIGITS = 9


def with_incarnation(incarnation: int, step: int) -> int:
    """Return the number of a worker's step in its `incarnation`, from 0: above all steps of earlier incarnations."""
    return incarnation * STEPS_PER_INCARNATION + step


def incarnation_of(number: int) -> int:
    """Return the incarnation of a step number."""
    return number // STEPS_PER_INCARNATION


def encode_incarnation(incarnation: int) -> str:
    """Return the text to send with a push: empty for the first incarnation."""
    return str(incarnation) if incarnation else ""


def decode_incarnation(text: str) -> int:
    """Return the incarnation that `encode_incarnation` wrote; -1, which no worker has, for any other text."""
    if not text:
        return 0
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else -1


class PairRequest(NamedTuple):
    """An exchange that this worker started and that has no reply yet."""

    push: Push
    sent: Callable[[], Tensor]  # (n,), as the receiver decodes the message


class PairAnswer(NamedTuple):
    """The last exchange that a worker started here, and its reply, which is the same for repeated requests."""

    stamp: Stamp
    receipt: Receipt


class Partner:
    """A worker's state in pairwise gossip: it averages with neighbors, one at a time, without waiting for any of them.

    shown <- shown + (received - sent) / 2, on both sides; parameters <- parameters + `unapplied` at the next step
    law:    the sum over workers of `shown` changes by the optimizers' steps only, under any interleaving, loss,
            duplication and pause; one exchange at a time among n, drawn uniformly, multiplies the expected squared
            distance from the mean by 1 - 1/(n-1)
    bytes:  one message each way; memory: 2 N, N for each exchange in flight, N for each neighbor that ever sent a
            request
    source: Lian et al. 2018, ICML (AD-PSGD)

    `sent` is exactly the message that the other side decoded, so one side gains exactly what the other loses, with any
    rounding, and with any gradients or other exchanges of either side in the meantime. A shown tensor is never
    modified.

    Only the training thread calls `drain`; any thread may call the other methods. An exchange with a lost reply (the
    partner has moved, this worker has not) stays open. It is retried first when the partner returns, with identical
    bytes, which is idempotent. `abandon` gives up a partner that does not return: then at most half of the distance
    between the two is missing from the sum, once for each of `abandoned`.

    Two workers that send requests to each other at the same time would swap parameters, and a pair in step would never
    agree. So the lower rank declines, and only one of the two exchanges happens. Swaps along longer cycles are undone
    by the random order of exchanges.

    A restarted worker has its next `incarnation`, and no state of the one before. Its stamps are above those of all
    earlier incarnations, pushes name the incarnation that they are for, and a peer that learns of a new one abandons
    its exchanges with the old: no exchange starts with one incarnation and ends with another. The open exchanges with
    the old one are lost, and so is the sum, since the new one starts from another worker's parameters.

    Args:
        parameters: (n,), copied.
        rank: of this worker.
        compressor: of messages; None: Dense().
        seed: of the run.
        incarnation: number of restarts of this worker.
    """

    def __init__(
        self,
        parameters: FlatTensors,
        rank: int,
        compressor: Compressor | None = None,
        seed: int = 0,
        incarnation: int = 0,
    ) -> None:
        self.rank, self.incarnation, self._seed, self._layout = rank, incarnation, seed, parameters.layout
        #: returns additional state for a worker that starts from these parameters
        self.extra_state: Callable[[], Payload] = tuple
        #: (n,), the parameters at the last step boundary plus pending changes: at least float32, on the CPU, from where
        #: messages are sent
        self.shown = parameters.flat.to("cpu", accumulation_dtype(parameters.flat.dtype), copy=True)
        self.unapplied = torch.zeros_like(self.shown)  # (n,), sum of exchanges before the training thread applies it
        self._pending_exchange = False  # whether pending changes have a nonzero entry
        self._compressor = Dense() if compressor is None else compressor
        refuse_loss(self._compressor)
        self.version = self.declined = self.abandoned = 0
        self._gone: set[int] = set()  # receive no requests until they return
        self._left: set[int] = set()  # those of them that were present before
        self._asked: dict[int, PairRequest] = {}
        self._answered: dict[int, PairAnswer] = {}
        self._incarnations: dict[int, int] = {}
        self._lock = threading.Lock()

    def drain(self, parameters: Tensor) -> None:
        """Apply pending changes to `parameters`: (n,), between steps, and show the result; rounding errors stay
        pending.
        """
        self.drain_each([slot.view(parameters) for slot in self._layout])

    def drain_each(self, parameters: Sequence[Tensor]) -> None:
        """Do the same for separate tensors, in the layout's order and shapes, each of any dtype and on any device."""
        own = self._side_by_side(parameters)
        with self._lock:
            if self._pending_exchange:
                own.add_(self.unapplied)
                torch._foreach_copy_(list(parameters), [slot.view(own) for slot in self._layout])
                self._keep_rounding_errors(own, parameters)
            self.shown = own
            self.version += 1

    def _keep_rounding_errors(self, shown: Tensor, parameters: Sequence[Tensor]) -> None:
        """Keep the rounding errors of parameters overwritten by `shown`: zero if they have its dtype."""
        self._pending_exchange = any(each.dtype != shown.dtype for each in parameters)
        if self._pending_exchange:
            torch.sub(shown, self._side_by_side(parameters), out=self.unapplied)
        else:
            self.unapplied.zero_()

    def _side_by_side(self, parameters: Sequence[Tensor]) -> Tensor:
        flat = scratch_like(self.unapplied)
        torch._foreach_copy_([slot.view(flat) for slot in self._layout], list(parameters))
        return flat

    def neighbor(self, topology: Topology, world: int, step: int) -> int | None:
        """Return the next peer for a request: one with an open exchange, or a random present neighbor; None if there is
        none.
        """
        with self._lock:
            waiting = sorted(self._asked.keys() - self._gone)
            here = waiting[:1] or [peer for peer in topology.peers(self.rank, world) if peer not in self._gone]
        return here[rng.address(self._seed, "neighbour", self.rank, step) % len(here)] if here else None

    def ask(self, peer: int, step: int, within_seconds: float | None = None) -> Push:
        """Return the push that starts an exchange, or the same push again if one with this peer is open.

        Args:
            peer: rank of the other worker.
            step: ascends within an incarnation, also when a worker restarts from older parameters.
            within_seconds: timeout of the reply.

        Raises:
            NotFinite: a parameter is not finite.
        """
        with self._lock:
            if peer not in self._asked:
                number = with_incarnation(self.incarnation, step)
                message = self._write(number)
                push = Push(
                    to=Peer(WORKER, peer),
                    key=AVERAGE,
                    stamp=Stamp(self.rank, number, self.version),
                    payload=message.payload,
                    about=encode_incarnation(self._incarnations.get(peer, 0)),
                    within_seconds=within_seconds,
                )
                self._asked[peer] = PairRequest(push, message.own)
            return self._asked[peer].push

    def land(self, push: Push, receipt: Receipt) -> bool:
        """Apply the reply to `push`; return whether parameters changed. Raises MalformedError, and counts that."""
        peer = push.to.number
        with self._lock:
            asked = self._asked.get(peer)
            if asked is None or asked.push is not push:
                return False
            if receipt.version < 0:
                self._end_declined(peer, receipt)
                return False
            del self._asked[peer]
            try:
                peer_parameters = self._read(receipt.payload, peer, push.stamp.step)
            except MalformedError:
                self.abandoned += 1
                raise
            self._move(peer_parameters, asked.sent())
            return True

    def _end_declined(self, peer: int, receipt: Receipt) -> None:
        if not self._saw_incarnation(peer, decode_incarnation(receipt.about)):
            del self._asked[peer]
            self.declined += 1

    def receive(self, push: Push) -> Receipt:
        """Answer a push that starts an exchange; the reply to one for another incarnation has the current one."""
        if decode_incarnation(push.about) != self.incarnation:
            return Receipt(version=-1, about=encode_incarnation(self.incarnation))
        return self.answer(push.stamp, push.payload)

    def answer(self, stamp: Stamp, payload: Payload) -> Receipt:
        """Answer an exchange that another worker started; version -1 declines it."""
        with self._lock:
            self._saw_incarnation(stamp.worker, incarnation_of(stamp.step))
            if incarnation_of(stamp.step) < self._incarnations.get(stamp.worker, 0):
                return NO_EXCHANGE
            last = self._answered.get(stamp.worker)
            if last is not None and stamp.step <= last.stamp.step:
                return last.receipt if stamp == last.stamp else NO_EXCHANGE
            receipt = self._exchange(stamp, payload)
            self._answered[stamp.worker] = PairAnswer(stamp, receipt)
            return receipt

    def _exchange(self, stamp: Stamp, payload: Payload) -> Receipt:
        if self.rank < stamp.worker and stamp.worker in self._asked:
            return NO_EXCHANGE
        try:
            peer_parameters = self._read(payload, stamp.worker, stamp.step)
            message = self._write(stamp.step)
        except (MalformedError, NotFinite):
            return NO_EXCHANGE
        self._move(peer_parameters, message.own())
        return Receipt(version=self.version, payload=message.payload)

    def snapshot(self, known: int) -> Pulled:
        """Return the parameters as shown to others, for a worker that joins; an empty payload if version `known` is
        current.
        """
        with self._lock:
            return Pulled(version=self.version, payload=() if known == self.version else (self.shown,))

    def meet(self, peer: int, incarnation: int) -> None:
        """Record a worker's incarnation: open exchanges with the one before are abandoned."""
        with self._lock:
            self._saw_incarnation(peer, incarnation)

    def mark_gone(self, *peers: int) -> None:
        """Send these workers no requests until they return."""
        with self._lock:
            self._gone.update(peers)

    def mark_left(self, peer: int) -> None:
        """Record that a worker that was present is unreachable."""
        with self._lock:
            self._gone.add(peer)
            self._left.add(peer)

    def mark_here(self, peer: int) -> None:
        with self._lock:
            self._gone.discard(peer)
            self._left.discard(peer)

    @property
    def left(self) -> frozenset[int]:
        """The workers that were present and are unreachable."""
        with self._lock:
            return frozenset(self._left)

    def is_gone(self, peer: int) -> bool:
        return peer in self._gone  # without the lock, which an exchange holds for long

    def newest_incarnation(self, peer: int) -> int:
        with self._lock:
            return self._incarnations.get(peer, 0)

    def _saw_incarnation(self, peer: int, incarnation: int) -> bool:
        """Record a peer's incarnation; return whether it is new."""
        if incarnation <= self._incarnations.get(peer, 0):
            return False
        self._incarnations[peer] = incarnation
        self._answered.pop(peer, None)
        self._abandon(peer)
        return True

    def abandon(self, peer: int) -> bool:
        """Give up an exchange with a reply that will never arrive; return whether there was one."""
        with self._lock:
            return self._abandon(peer)

    def _abandon(self, peer: int) -> bool:
        found = self._asked.pop(peer, None) is not None
        self.abandoned += found
        return found

    @property
    def open(self) -> tuple[int, ...]:
        """The peers with open exchanges, ascending."""
        with self._lock:
            return tuple(sorted(self._asked))

    def _move(self, peer_parameters: Tensor, sent: Tensor) -> None:
        """Move halfway from `sent` to `peer_parameters`: (n,), which is overwritten."""
        difference = peer_parameters.sub_(sent)
        shown = scratch_like(self.shown)  # a new tensor: the old one may be in flight
        self.shown = torch.add(self.shown, difference, alpha=0.5, out=shown)
        self.unapplied.add_(difference, alpha=0.5)
        self._pending_exchange = True
        self.version += 1

    def _write(self, step: int) -> point_to_point.EncodedMessage:
        x, at = FlatTensors(self.shown, self._layout), self._at(self.rank, step)
        return point_to_point.encode(self._compressor, x, point_to_point.begin(self._compressor, x, at), at)

    def _read(self, payload: Payload, writer: int, step: int) -> Tensor:
        peer_parameters = scratch_like(self.shown)
        point_to_point.decode(self._compressor, payload, self._layout, self._at(writer, step), peer_parameters)
        if not all_finite(peer_parameters):  # averaging would spread them to all workers
            raise MalformedError(f"worker {writer} sent parameters that are not finite, which no correct worker does")
        return peer_parameters

    def _at(self, writer: int, step: int) -> AggregationContext:
        return AggregationContext(step=step, seed=self._seed, rank=writer)


@lru_cache(maxsize=64)
def refuse_loss(compressor: Compressor) -> None:
    """Raise RecipeError for a lossy compressor: messages have whole parameters, so errors would prevent consensus.

    This includes every compressor that it holds, since it may use each of them for some tensors or steps.
    """
    for term in compressor.held():
        if isinstance(term, Compressor):
            _refuse_loss(term, compressor)


def _refuse_loss(term: Compressor, compressor: Compressor) -> None:
    lost = relative_error(term, "lost by a letter")
    if has_memory(term) or lost > MOST_LOST:
        raise RecipeError(
            f"pairwise gossip sends whole parameters, and {compressor!r} has a relative squared error of {lost:.2g} or "
            "a residual, so workers would never reach consensus. Write Gossip() with this compressor, which sends "
            "differences to public copies, or Gossip('pairwise') + Dense(dtype='bfloat16'), or + Int8()."
        )


def initiate(partner: Partner, peer: int, step: int, within_seconds: float | None = None) -> PeerScript:
    """Average with `peer`; return whether the exchange happened. Raises PeerLost, and the exchange stays open.

    One exchange at a time per worker. Parameters that are not finite are not sent. within_seconds: timeout, longer than
    a round trip and both messages; with a shorter one no reply ever arrives in time.
    """
    try:
        push = partner.ask(peer, step, within_seconds)
    except NotFinite:
        return False
    return partner.land(push, (yield push))


def answering(partner: Partner) -> PeerScript:
    """Answer all peers until the script is closed.

    It answers immediately and waits for no peer, not even for the end of this worker's own exchange. So every peer of a
    live worker receives an answer, and workers cannot deadlock.
    """
    while True:
        match (yield Await()):
            case Arrived(token=token, sender=sender, op=Push(key=key, stamp=stamp) as push):
                understood = key == AVERAGE and sender.number == stamp.worker
                yield Reply(token=token, answer=partner.receive(push) if understood else NO_EXCHANGE)
            case Arrived(token=token, op=Pull(key=key)) if key == STATE:
                shown = partner.snapshot(-1)
                yield Reply(
                    token=token, answer=with_checksum(replace(shown, payload=(*shown.payload, *partner.extra_state())))
                )
            case Arrived(token=token, op=Pull(known=known)):
                yield Reply(token=token, answer=partner.snapshot(known))
            case PeerLeft(peer=Peer(kind, number)) if kind == WORKER:
                partner.mark_left(number)
            case PeerJoined(peer=Peer(kind, number)) if kind == WORKER:
                partner.mark_here(number)
