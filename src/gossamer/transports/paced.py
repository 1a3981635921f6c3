"""Words answered as slowly as a network would, where no network can be emulated: approximate, and always possible."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gossamer.network import Network
from gossamer.network.cost import DEFAULT, Chosen, Lines, seconds
from gossamer.transports.base import Transport
from gossamer.words import Among, Exchange, Gather, Mean, Mix, Payload, Together, Word


class PacedTransport:
    """Asks another transport, and keeps its answers back until `network` would have brought them.

    Every word is priced as if all workers said it at once over idle connections; what a worker waits for a slower one
    is real. What does not pass through words, such as a script's own collectives, is not slowed.
    """

    def __init__(self, inner: Transport, network: Network, collective: Chosen = DEFAULT) -> None:
        """collective: which tables of hops means are priced by."""
        self._inner = inner
        self._network, self._collective = network, collective
        self._prices: dict[Hashable, float] = {}
        self._due = 0.0  # when what was begun so far will have been brought
        self.rank, self.world = inner.rank, inner.world

    def answer(self, word: Word) -> Any:
        return self.begin(word)()

    def begin(self, word: Word) -> Callable[[], Any]:
        # One line carries all that is under way, so a word's time starts when the one before it is paid for.
        self._due = max(self._due, time.monotonic()) + self._price(word)
        due, answered = self._due, self._inner.begin(word)

        def wait() -> Any:
            answer = answered()
            _sleep_until(due)
            return answer

        return wait

    @property
    def links(self) -> str:
        return self._inner.links

    @links.setter
    def links(self, text: str) -> None:
        self._inner.links = text

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        began = time.monotonic()
        self._inner.broadcast_(tensors, source)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        _sleep_until(began + max(Lines(self._network).broadcast(nbytes, [0.0] * self.world, source)))

    def gather_text(self, text: str) -> list[str]:
        return self._inner.gather_text(text)

    def part(self, size: int) -> PacedTransport:
        inner = self._inner.part(size)
        first = self.rank - inner.rank
        hosts = self._network.hosts[first : first + size]
        return PacedTransport(inner, replace(self._network, hosts=hosts), self._collective)

    def close(self) -> None:
        self._inner.close()

    def _price(self, word: Word) -> float:
        """Seconds; the same words come again step after step."""
        form = _form(word)
        if form not in self._prices:
            self._prices[form] = seconds(word, self._network, collective=self._collective)
        return self._prices[form]


def _form(word: Word) -> Hashable:
    """What of a word its price depends on."""
    match word:
        case Mean(tensor):
            return "mean", tensor.numel(), tensor.element_size()
        case Gather(payload):
            return "gather", _sizes(payload)
        case Exchange(parts):
            return "exchange", tuple(map(_sizes, parts))
        case Mix(payload):
            return "mix", _sizes(payload), word.hears, word.told
        case Among(ranks, inner):
            return "among", ranks, _form(inner)
        case Together(words):
            return "together", tuple(map(_form, words))


def _sizes(payload: Payload) -> Hashable:
    return tuple(tensor.nbytes for tensor in payload)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
