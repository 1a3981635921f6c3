from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from gossamer.network import read_network
from gossamer.network.cost import seconds
from gossamer.transports import paced
from gossamer.transports.paced import PacedTransport
from gossamer.transports.simulated import SimulatedGroup
from gossamer.words import Exchange, Gather, Mean, Mix, Together, Word

ONE = torch.ones(2000)
SLOW = read_network("10mbit,20ms", 1)


def took(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


class Instant:
    """Answers each word with itself."""

    rank, world = 1, 4

    def answer(self, word: Word) -> Word:
        return word

    def begin(self, word: Word) -> Callable[[], Word]:
        return lambda: word

    def broadcast_(self, tensors: object, source: int = 0) -> None:
        self.source = source

    def gather_text(self, text: str) -> list[str]:
        return [text]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "word",
    [
        Mean(ONE),
        Mean(ONE.half()),
        Gather((ONE,)),
        Exchange((((ONE),),) * 4),
        Mix((ONE,), ((0, 0.5), (2, 0.5))),
        Together((Mean(ONE), Gather((ONE[:10],)))),
    ],
    ids=lambda word: type(word).__name__,
)
def test_an_answer_takes_as_long_as_on_the_network(word: Word, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still, so the second word waits for the first to leave the line."""
    slept: list[float] = []
    monkeypatch.setattr(paced, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(paced, "_sleep_until", lambda moment: slept.append(moment - 100.0))
    network = read_network("10mbit,20ms", 4)
    transport = PacedTransport(Instant(), network)
    assert transport.answer(word) is word
    assert transport.answer(word) is word
    expected = seconds(word, network)
    assert expected > 0.01  # half a round trip
    assert slept == pytest.approx([expected, 2 * expected])


def test_it_does_sleep() -> None:
    transport = PacedTransport(Instant(), read_network("10mbit,20ms", 4))
    assert took(lambda: transport.answer(Gather((ONE[:1],)))) >= seconds(Gather((ONE[:1],)), transport._network)


def test_prices_of_unlike_words_are_not_mixed_up() -> None:
    transport = PacedTransport(Instant(), read_network("10mbit,20ms", 4))
    small, large = Mean(ONE[:4]), Mean(ONE)
    assert transport._price(small) < transport._price(large)
    assert transport._price(Mean(ONE)) == transport._price(large)


def test_the_rest_is_handed_on() -> None:
    inner = Instant()
    transport = PacedTransport(inner, read_network("1gbit", 4))
    assert (transport.rank, transport.world) == (1, 4)
    assert transport.gather_text("a") == ["a"]
    transport.broadcast_([ONE], 2)
    transport.close()
    assert (inner.source, inner.closed) == (2, True)


def test_alone_nothing_is_slowed() -> None:
    transport = PacedTransport(SimulatedGroup(1).transports[0], SLOW)
    assert took(lambda: transport.answer(Mean(ONE))) < 0.5 * SLOW.default.round_trip_seconds
