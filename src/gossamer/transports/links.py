"""What the links between workers are like, measured with a few words as the group begins."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.network import Network
from gossamer.network.measured import measured
from gossamer.transports.base import Transport
from gossamer.words import Exchange, Gather

FIRST_BYTES, MOST_BYTES, GROWTH = 2**14, 2**22, 4  # sent to each peer at once
LONG_ENOUGH_SECONDS = 0.02  # beside which what a message itself takes is nothing
WINDOW_ROUND_TRIPS = 2


@dataclass(frozen=True)
class Links:
    """round_trips[i][j]: seconds between ranks i and j; bits_per_second: of each rank's line, both ways.

    The same on all ranks. What sums come out as, to the last bit, follows from them: a run that is resumed takes the
    links of the one that it continues.
    """

    round_trips: tuple[tuple[float, ...], ...]
    bits_per_second: float

    @staticmethod
    def of(text: str) -> Links:
        """What `text` of the same said."""
        round_trips, rate = json.loads(text)
        return Links(tuple(map(tuple, round_trips)), rate)

    @property
    def text(self) -> str:
        return json.dumps([self.round_trips, self.bits_per_second])

    @property
    def network(self) -> Network:
        return measured(self.round_trips, self.bits_per_second)

    def among(self, ranks: Sequence[int]) -> Links:
        """Those between some."""
        return Links(tuple(tuple(self.round_trips[a][b] for b in ranks) for a in ranks), self.bits_per_second)


def measure(transport: Transport, round_trips: list[float]) -> Links:
    """All ranks call it at once, and come to the same answer. round_trips: seconds to each rank, 0 where unknown."""
    rows = [json.loads(text) for text in transport.gather_text(json.dumps(round_trips))]
    seen = tuple(tuple(max(rows[a][b], rows[b][a]) for b in range(len(rows))) for a in range(len(rows)))
    return Links(seen, bits_per_second(transport, max(map(max, seen))))


def bits_per_second(transport: Transport, round_trip_seconds: float) -> float:
    """What the slowest worker sends while all send to all: ever more, until it takes long enough to be measured.

    Beyond the way itself, which is no matter of rate, and long enough for a connection to have grown its window.
    """
    nbytes, enough = FIRST_BYTES, max(LONG_ENOUGH_SECONDS, WINDOW_ROUND_TRIPS * round_trip_seconds)
    while True:
        part = (torch.zeros(nbytes, dtype=torch.uint8, device="cpu"),)
        began = time.perf_counter()
        transport.answer(Exchange((part,) * transport.world))
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device="cpu")
        slowest = max(float(theirs) for (theirs,) in transport.answer(Gather((seconds,))))
        sending = slowest - round_trip_seconds / 2
        if sending >= enough or nbytes >= MOST_BYTES:
            return 8 * nbytes * (transport.world - 1) / max(sending, slowest / 2)
        nbytes *= GROWTH
