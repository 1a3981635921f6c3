"""Pairwise gossip: averages with one neighbor at a time while training goes on; a worker's part in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Dense, point_to_point
from gossamer.algorithms.compressors.distortion import has_memory, relative_error
from gossamer.algorithms.gossip.incarnation import (
    decode_incarnation,
    encode_incarnation,
    incarnation_of,
    with_incarnation,
)
from gossamer.algorithms.topologies import Topology
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import all_finite, scratch_like
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import WORKER, Peer, Pulled, Push, Receipt, Stamp
from gossamer.errors import MalformedError, NotFinite, RecipeError

AVERAGE = "average"
NO_EXCHANGE = Receipt(version=-1)
MOST_LOST = 0.01  # of the parameters' square, by one message


class PairRequest(NamedTuple):
    """An exchange that this worker began and whose reply has not come."""

    push: Push
    sent: Callable[[], Tensor]  # (n,), as the receiver decodes the message


class PairAnswer(NamedTuple):
    """The last exchange that a worker began here, and its reply: the same, however often it asks."""

    stamp: Stamp
    receipt: Receipt


class Partner:
    """A worker's state in pairwise gossip: it averages with neighbors, one at a time, and waits for none of them.

    shown <- shown + (theirs - sent) / 2, on both sides; parameters <- parameters + owed at the next step boundary
    law:    the sum over workers of `shown` changes by what the optimizers did and by nothing else, under any
            interleaving, loss, repetition and pause; one exchange at a time among n, drawn evenly, multiplies the
            expected squared distance from the mean by 1 - 1/(n-1)
    bytes:  one message each way; memory: 2 N, N for each exchange in flight, N for each neighbor that ever asked
    source: Lian et al. 2018, ICML (AD-PSGD)

    `sent` is exactly what the other side read, so what one side gains the other loses, whatever was rounded, and
    whatever gradients or third parties did to either side meanwhile. A tensor that was shown is never written again.

    Only the training thread drains; any thread may call the rest. An exchange whose reply was lost (the partner moved,
    this worker did not) stays open, comes first as soon as the partner is back, and is retried in identical bytes,
    which is idempotent. A partner that never comes back is given up with `abandon`: then at most half of the distance
    between the two is missing from the sum, once for each of `abandoned`.

    Two workers that ask each other at the same moment would trade places, and a pair in step would never agree. So the
    lower rank declines then, and one of the two exchanges takes place. What longer circles trade, chance undoes.

    A worker that was lost and came back is in its next `incarnation`, and remembers nothing of the one before. So its
    stamps are beyond those of all its incarnations before, pushes say which incarnation they are meant for, and a peer
    that hears of a new one abandons what it had begun with the old: no exchange is begun with one and ended with
    another. Whatever two had in common is lost with the first; so is the sum, since the new one begins from another
    worker's parameters.
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
        self.beside: Callable[[], Payload] = tuple  # sent along to a worker that begins from these parameters
        #: (n,), of which partners are told: the parameters at the last step boundary, and what is owed since; at least
        #: float32, on the CPU, where messages leave from
        self.shown = parameters.flat.to("cpu", accumulation_dtype(parameters.flat.dtype), copy=True)
        self.owed = torch.zeros_like(self.shown)  # (n,), sum of exchanges that the training thread has not applied yet
        self._owes = False  # whether anything of that is not zero
        self._compressor = Dense() if compressor is None else compressor
        refuse_loss(self._compressor)
        self.version = self.declined = self.abandoned = 0
        self._gone: set[int] = set()  # not asked until they are here again
        self._left: set[int] = set()  # those of them that were here
        self._asked: dict[int, PairRequest] = {}
        self._answered: dict[int, PairAnswer] = {}
        self._incarnations: dict[int, int] = {}
        self._lock = threading.Lock()

    def drain(self, parameters: Tensor) -> None:
        """Apply what is owed to `parameters`: (n,), between steps, and show that; what rounding loses stays owed."""
        self.drain_each([slot.view(parameters) for slot in self._layout])

    def drain_each(self, parameters: Sequence[Tensor]) -> None:
        """The same where they lie apart: in the layout's order and shapes, each of any dtype and on any device."""
        mine = self._side_by_side(parameters)
        with self._lock:
            if self._owes:
                mine.add_(self.owed)
                torch._foreach_copy_(list(parameters), [slot.view(mine) for slot in self._layout])
                self._owe_what_is_left(mine, parameters)
            self.shown = mine
            self.version += 1

    def _owe_what_is_left(self, shown: Tensor, parameters: Sequence[Tensor]) -> None:
        """Keep what parameters overwritten by `shown` could not hold: nothing, where they have its dtype."""
        self._owes = any(each.dtype != shown.dtype for each in parameters)
        if self._owes:
            torch.sub(shown, self._side_by_side(parameters), out=self.owed)
        else:
            self.owed.zero_()

    def _side_by_side(self, parameters: Sequence[Tensor]) -> Tensor:
        flat = scratch_like(self.owed)
        torch._foreach_copy_([slot.view(flat) for slot in self._layout], list(parameters))
        return flat

    def neighbor(self, topology: Topology, world: int, step: int) -> int | None:
        """The peer to ask next: one that owes a reply, or a neighbor drawn from those that are here, if any."""
        with self._lock:
            waiting = sorted(self._asked.keys() - self._gone)
            here = waiting[:1] or [peer for peer in topology.peers(self.rank, world) if peer not in self._gone]
        return here[rng.address(self._seed, "neighbour", self.rank, step) % len(here)] if here else None

    def ask(self, peer: int, step: int, within_seconds: float | None = None) -> Push:
        """The push that begins an exchange, or, where one with this peer has not ended, the same push again.

        step: ascends within an incarnation, also when a worker starts again from older parameters. Raises NotFinite.
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
        """Apply the reply to `push`; whether it moved anything. Raises MalformedError, and counts that."""
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
                theirs = self._read(receipt.payload, peer, push.stamp.step)
            except MalformedError:
                self.abandoned += 1
                raise
            self._move(theirs, asked.sent())
            return True

    def _end_declined(self, peer: int, receipt: Receipt) -> None:
        if not self._saw_incarnation(peer, decode_incarnation(receipt.about)):
            del self._asked[peer]
            self.declined += 1

    def hear(self, push: Push) -> Receipt:
        """Answer a push that begins an exchange; one meant for another incarnation is told which this is."""
        if decode_incarnation(push.about) != self.incarnation:
            return Receipt(version=-1, about=encode_incarnation(self.incarnation))
        return self.answer(push.stamp, push.payload)

    def answer(self, stamp: Stamp, payload: Payload) -> Receipt:
        """Take part in an exchange that another worker began; version -1 where none takes place."""
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
            theirs = self._read(payload, stamp.worker, stamp.step)
            message = self._write(stamp.step)
        except (MalformedError, NotFinite):
            return NO_EXCHANGE
        self._move(theirs, message.own())
        return Receipt(version=self.version, payload=message.payload)

    def snapshot(self, known: int) -> Pulled:
        """The parameters as others see them, for a worker that joins; nothing where version `known` is current."""
        with self._lock:
            return Pulled(version=self.version, payload=() if known == self.version else (self.shown,))

    def meet(self, peer: int, incarnation: int) -> None:
        """Hear of a worker's incarnation: with the one before, nothing that was begun will end."""
        with self._lock:
            self._saw_incarnation(peer, incarnation)

    def mark_gone(self, *peers: int) -> None:
        """Ask these workers no more until they are here again."""
        with self._lock:
            self._gone.update(peers)

    def mark_left(self, peer: int) -> None:
        """A worker that was here is not heard any more."""
        with self._lock:
            self._gone.add(peer)
            self._left.add(peer)

    def mark_here(self, peer: int) -> None:
        with self._lock:
            self._gone.discard(peer)
            self._left.discard(peer)

    @property
    def left(self) -> frozenset[int]:
        """The workers that were here and are not heard any more."""
        with self._lock:
            return frozenset(self._left)

    def is_gone(self, peer: int) -> bool:
        return peer in self._gone  # without the lock: an exchange holds it for long

    def newest_incarnation(self, peer: int) -> int:
        with self._lock:
            return self._incarnations.get(peer, 0)

    def _saw_incarnation(self, peer: int, incarnation: int) -> bool:
        """Note a peer's incarnation; whether it is a new one."""
        if incarnation <= self._incarnations.get(peer, 0):
            return False
        self._incarnations[peer] = incarnation
        self._answered.pop(peer, None)
        self._abandon(peer)
        return True

    def abandon(self, peer: int) -> bool:
        """Give up an exchange whose reply will never come; whether there was one."""
        with self._lock:
            return self._abandon(peer)

    def _abandon(self, peer: int) -> bool:
        found = self._asked.pop(peer, None) is not None
        self.abandoned += found
        return found

    @property
    def open(self) -> tuple[int, ...]:
        """The peers whose replies are still due, ascending."""
        with self._lock:
            return tuple(sorted(self._asked))

    def _move(self, theirs: Tensor, sent: Tensor) -> None:
        """theirs: (n,), written over. sent: only read."""
        difference = theirs.sub_(sent)
        shown = scratch_like(self.shown)  # not in place: the old one may be in flight
        self.shown = torch.add(self.shown, difference, alpha=0.5, out=shown)
        self.owed.add_(difference, alpha=0.5)
        self._owes = True
        self.version += 1

    def _write(self, step: int) -> point_to_point.EncodedMessage:
        x, at = FlatTensors(self.shown, self._layout), self._at(self.rank, step)
        return point_to_point.encode(self._compressor, x, point_to_point.begin(self._compressor, x, at), at)

    def _read(self, payload: Payload, writer: int, step: int) -> Tensor:
        theirs = scratch_like(self.shown)
        point_to_point.decode(self._compressor, payload, self._layout, self._at(writer, step), theirs)
        if not all_finite(theirs):  # averaging would spread it to all workers
            raise MalformedError(f"worker {writer} showed parameters that are not finite; no worker sends such ones")
        return theirs

    def _at(self, writer: int, step: int) -> AggregationContext:
        return AggregationContext(step=step, seed=self._seed, rank=writer)


@lru_cache(maxsize=64)
def refuse_loss(compressor: Compressor) -> None:
    """Whole parameters travel, so whatever messages lose of them, workers that agree would lose as well: messages of
    any compressor that it holds, by which it may send other tensors, or begin to later."""
    for term in compressor.held():
        if isinstance(term, Compressor):
            _refuse_loss(term, compressor)


def _refuse_loss(term: Compressor, compressor: Compressor) -> None:
    lost = relative_error(term, "lost by a letter")
    if has_memory(term) or lost > MOST_LOST:
        raise RecipeError(
            f"pairwise gossip sends whole parameters, and {compressor!r} leaves {lost:.2g} of their square out "
            "or to be sent later, so that workers never agree on them. Write Gossip() with it, whose differences to "
            "public copies make up for that, or Gossip('pairwise') + Dense(dtype='bfloat16'), or + Int8()."
        )
