"""Poisson selection: draws each device by a coin of its own, so that being drawn tells nothing of the others."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.errors import require
from gossamer.federated.privacy.random_bits import RandomBits, SystemBits, uniforms
from gossamer.federated.server.selection import SelectionPolicy


class PoissonSelection(SelectionPolicy):
    """Each device that is there is chosen with probability `rate`: some rounds have more of them, some fewer, or none.

    The coins are the operating system's, not a seed's: sampling hides a device only from who cannot guess them.
    """

    def __init__(self, rate: float, bits: RandomBits | None = None) -> None:
        require(0 < rate <= 1, f"rate is the chance of a device in a round, above 0 and at most 1, not {rate}")
        self.rate = rate
        self._bits = bits or SystemBits()

    @property
    def draws_each(self) -> bool:
        return True

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        """Of `available`; how many are wanted does not matter."""
        coins = uniforms(self._bits, len(available))
        return [client for client, coin in zip(available, coins, strict=True) if coin <= self.rate]
