"""Partners of pairwise gossip, exchanges between two of them, and rules that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.gossip.partner import Partner
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import Push, Receipt, Stamp

UNIT = 2**20  # whole multiples of it may be halved dozens of times, and their sums stay exact


def partner(rank: int, values: Sequence[float] | Tensor, rule: type[Partner] = Partner, **options: Any) -> Partner:
    flat = torch.as_tensor(values, dtype=torch.float64)
    return rule(FlatTensors.pack({"weight": flat}), rank, **options)


def exchange(asks: Partner, answers: Partner, step: int) -> bool:
    push = asks.ask(answers.rank, step)
    return asks.land(push, answers.answer(push.stamp, push.payload))


def start_of(rank: int) -> Tensor:
    """What worker `rank` begins a run with."""
    return UNIT * torch.tensor([16.0 * rank + 8.0, -5.0 * rank], dtype=torch.float64)


def distance(partners: Sequence[Partner]) -> float:
    """The squared distance of all from their mean."""
    every = torch.stack([each.shown for each in partners])
    return float((every - every.mean(0)).square().sum())


# -- rules that are wrong --------------------------------------------------------------------------


class Halves(Partner):
    """x = (x + received) / 2, as it is usually printed."""

    def _move(self, theirs: Tensor, sent: Tensor) -> None:
        super()._move(theirs, self.shown)


class Forgets(Partner):
    """Takes a message that comes twice for two."""

    def answer(self, stamp: Stamp, payload: tuple[Tensor, ...]) -> Receipt:
        self._answered.clear()
        return super().answer(stamp, payload)


class Drops(Partner):
    """Publishes its progress over what has landed while it was asking."""

    def drain(self, parameters: Tensor) -> None:
        if self.open:
            self.unapplied.zero_()
        super().drain(parameters)


class AsksAnew(Partner):
    """Asks for another exchange where it has not heard the end of one."""

    def ask(self, peer: int, step: int, within_seconds: float | None = None) -> Push:
        self._asked.pop(peer, None)
        return super().ask(peer, step, within_seconds)


class Trades(Partner):
    """Takes part in both exchanges where two workers ask each other at once."""

    def answer(self, stamp: Stamp, payload: tuple[Tensor, ...]) -> Receipt:
        asked = self._asked.pop(stamp.worker, None)
        receipt = super().answer(stamp, payload)
        if asked is not None:
            self._asked[stamp.worker] = asked
        return receipt
