"""Average with one neighbour at a time, while training goes on: what a worker remembers, and both halves of a talk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.compressors import Compressor, Dense, point_to_point
from gossamer.compressors.distortion import has_memory, relative_error
from gossamer.core import rng
from gossamer.core.aggregation import AggregationContext
from gossamer.core.layout import FlatTensors, accumulation_dtype
from gossamer.core.ops import Payload
from gossamer.core.peer_ops import WORKER, Peer, Pulled, Push, Receipt, Stamp
from gossamer.errors import MalformedError, NotFinite, RecipeError
from gossamer.gossip.incarnation import decode_incarnation, encode_incarnation, incarnation_of, with_incarnation
from gossamer.kernels import all_finite, scratch_like
from gossamer.topologies import Topology

AVERAGE = "average"
NO_EXCHANGE = Receipt(version=-1)
MOST_LOST = 0.01  # of the parameters' square, by one letter


class PairRequest(NamedTuple):
    """An exchange that this worker began and has not heard the end of. sent: what its letter stands for, (n,)."""

    push: Push
    sent: Callable[[], Tensor]


class PairAnswer(NamedTuple):
    """The last exchange that a worker began here, and what it was told: the same, however often it asks."""

    stamp: Stamp
    receipt: Receipt


class Partner:
    """What a worker's conversations own. It averages with neighbours, one at a time, and waits for none of them.

    shown <- shown + (theirs - sent) / 2, on both sides; parameters <- parameters + owed at the next step boundary
    law:    the sum over workers of `shown` changes by what the optimizers did and by nothing else, under any
            interleaving, loss, repetition and pause; one exchange at a time among n, drawn evenly, multiplies the
            expected squared distance from the mean by 1 - 1/(n-1)
    bytes:  one letter each way; memory: 2 N, N for each exchange under way, N for each neighbour that ever asked
    source: Lian et al. 2018, ICML (AD-PSGD)

    shown: (n,), what partners are answered from: the parameters at the last step boundary, and what is owed since.
    owed: (n,), the sum of exchanges that the training thread has not applied yet. Both are at least float32, on the
    CPU, where messages leave from. gone: whom to ask no more until they are here again.

    `sent` is exactly what the other side read, so what one side gains the other loses, whatever was rounded, and
    whatever gradients or third parties did to either side meanwhile. A tensor that was shown is never written again.

    Only the training thread drains; any thread may call the rest. An exchange whose end was not heard (the partner
    moved, this worker did not) stays open, comes first as soon as the partner is back, and is asked for in identical
    bytes. A partner that never comes back is given up with `abandon`: then at most half of the
    distance between the two is missing from the sum, once for each of `abandoned`.

    Two workers that ask each other at the same moment would trade places, and a pair in step would never agree. So the
    lower rank declines then, and one of the two exchanges takes place. What longer circles trade, chance undoes.

    A worker that was lost and came back is in its next `life`, and remembers nothing of the one before. So its stamps
    are beyond those of all its lives before, words say which life they are meant for, and whoever hears of a new life
    abandons what it had begun with the old one: no exchange is begun with one life and ended with another. What two
    lives had in common is lost with the first; so is the sum, since who comes back begins from somebody's parameters.
    beside: what goes to who begins from these parameters, with them.
    """

    def __init__(
        self, parameters: FlatTensors, rank: int, compressor: Compressor | None = None, seed: int = 0, life: int = 0
    ) -> None:
        self.rank, self.life, self._seed, self._layout = rank, life, seed, parameters.layout
        self.beside: Callable[[], Payload] = tuple
        self.shown = parameters.flat.to("cpu", accumulation_dtype(parameters.flat.dtype), copy=True)
        self.owed = torch.zeros_like(self.shown)
        self._owes = False  # whether anything of that is not zero
        self._compressor = Dense() if compressor is None else compressor
        refuse_loss(self._compressor)
        self.version = self.declined = self.abandoned = 0
        self.gone: set[int] = set()
        self._asked: dict[int, PairRequest] = {}
        self._answered: dict[int, PairAnswer] = {}
        self._lives: dict[int, int] = {}
        self._lock = threading.Lock()

    def drain(self, parameters: Tensor) -> None:
        """Apply what is owed to `parameters`: (n,), between steps, and show that; what rounding swallows stays owed."""
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
        """What parameters that were overwritten by `shown` could not hold: nothing, where they have its dtype."""
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
        """Whom to ask next: who still owes an answer, or a neighbour drawn from those that are here; None if nobody."""
        with self._lock:
            waiting = sorted(self._asked.keys() - self.gone)
            here = waiting[:1] or [peer for peer in topology.peers(self.rank, world) if peer not in self.gone]
        return here[rng.address(self._seed, "neighbour", self.rank, step) % len(here)] if here else None

    def ask(self, peer: int, step: int, within_seconds: float | None = None) -> Push:
        """The word that begins an exchange, or, where one with this peer has not ended, that word again.

        step: ascends within a life, also when a worker starts again from older parameters. Raises NotFinite.
        """
        with self._lock:
            if peer not in self._asked:
                number = with_incarnation(self.life, step)
                letter = self._write(number)
                push = Push(
                    to=Peer(WORKER, peer),
                    key=AVERAGE,
                    stamp=Stamp(self.rank, number, self.version),
                    payload=letter.payload,
                    about=encode_incarnation(self._lives.get(peer, 0)),
                    within_seconds=within_seconds,
                )
                self._asked[peer] = PairRequest(push, letter.own)
            return self._asked[peer].push

    def land(self, push: Push, receipt: Receipt) -> bool:
        """End the exchange that `push` began; whether it moved anything. Raises MalformedError, and counts that."""
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
        if not self._met(peer, decode_incarnation(receipt.about)):
            del self._asked[peer]
            self.declined += 1

    def hear(self, push: Push) -> Receipt:
        """Answer a word that begins an exchange; one that was meant for another life is told which this is."""
        if decode_incarnation(push.about) != self.life:
            return Receipt(version=-1, about=encode_incarnation(self.life))
        return self.answer(push.stamp, push.payload)

    def answer(self, stamp: Stamp, payload: Payload) -> Receipt:
        """Have one's part in an exchange that another worker began; version -1 where none takes place."""
        with self._lock:
            self._met(stamp.worker, incarnation_of(stamp.step))
            if incarnation_of(stamp.step) < self._lives.get(stamp.worker, 0):
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
            letter = self._write(stamp.step)
        except (MalformedError, NotFinite):
            return NO_EXCHANGE
        self._move(theirs, letter.own())
        return Receipt(version=self.version, payload=letter.payload)

    def snapshot(self, known: int) -> Pulled:
        """The parameters as others see them, for who joins; nothing where version `known` is what they are."""
        with self._lock:
            return Pulled(version=self.version, payload=() if known == self.version else (self.shown,))

    def meet(self, peer: int, life: int) -> None:
        """Hear that a worker is in this life: with the one before, nothing that was begun will end."""
        with self._lock:
            self._met(peer, life)

    def life_of(self, peer: int) -> int:
        """The newest that was heard of."""
        with self._lock:
            return self._lives.get(peer, 0)

    def _met(self, peer: int, life: int) -> bool:
        """Whether that is news."""
        if life <= self._lives.get(peer, 0):
            return False
        self._lives[peer] = life
        self._answered.pop(peer, None)
        self._abandon(peer)
        return True

    def abandon(self, peer: int) -> bool:
        """Give up an exchange whose end will never be heard; whether there was one."""
        with self._lock:
            return self._abandon(peer)

    def _abandon(self, peer: int) -> bool:
        found = self._asked.pop(peer, None) is not None
        self.abandoned += found
        return found

    @property
    def open(self) -> tuple[int, ...]:
        """Whose answers are still due, ascending."""
        with self._lock:
            return tuple(sorted(self._asked))

    def _move(self, theirs: Tensor, sent: Tensor) -> None:
        """theirs: (n,), written over. sent: only read."""
        difference = theirs.sub_(sent)
        shown = scratch_like(self.shown)  # not in place: the old one may be under way
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
        if not all_finite(theirs):  # averaging would spread it to everyone
            raise MalformedError(f"worker {writer} showed parameters that are not finite; no worker sends such ones")
        return theirs

    def _at(self, writer: int, step: int) -> AggregationContext:
        return AggregationContext(step=step, seed=self._seed, rank=writer)


@lru_cache(maxsize=64)
def refuse_loss(compressor: Compressor) -> None:
    """What travels are whole parameters, so what letters lose of them, workers that agree would lose as well: those of
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
