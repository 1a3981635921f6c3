"""Private fixed point: clipped contributions with a share of noise each, as whole numbers whose sum has all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.federated import CentralPrivacy, DistributedPrivacy, FederatedStrategy, LocalWork
from gossamer.algorithms.strategies.federated.privacy.integer_grid import IntegerGrid
from gossamer.errors import RecipeError
from gossamer.federated.model_state import ModelState
from gossamer.federated.privacy.integer_contribution import integers
from gossamer.federated.privacy.random_bits import RandomBits
from gossamer.federated.secure.fixed_point import CohortTotal, FixedPoint, QuantizedContribution
from gossamer.federated.secure.masking.ring import Integers

FIRST_SAMPLES = 16  # of a device that has the largest weight of the first round


@dataclass(frozen=True)
class PrivateFixedPoint(FixedPoint):
    """Messages under DistributedPrivacy: what the linear code sends, clipped and rounded on a grid, with noise.

    Every device weighs 1, and nothing of its work is told. What does not travel is owed; what is clipped or rounded
    away, and the noise, are not: paid back, they would tell more than the privacy counts.
    """

    privacy: DistributedPrivacy | None = None
    bits_source: RandomBits | None = None  # None: the operating system's

    @property
    def count(self) -> int:
        return self.blocks * self.code.count(self.layout)

    @property
    def first_ranges(self) -> tuple[float, ...]:
        return *(self._privacy.clip,) * self.blocks, 1.0

    def ranges_after(self, ranges: Sequence[float], total: CohortTotal, devices: int) -> tuple[float, ...]:
        return tuple(ranges)

    def encode(
        self,
        blocks: Sequence[Tensor],
        weight: float,
        steps: int,
        ranges: Sequence[float],
        *,
        client: int,
        index: int,
        survivors: int = 1,
        residuals: Sequence[dict[str, Tensor]] = (),
    ) -> QuantizedContribution:
        """Other noise however often it is asked for one round. Raises NotFinite."""
        wanted, at = self._with_owed(blocks, residuals), self._at(index)
        sent = [self.code.project(each, self.layout, at) for each in wanted]
        noisy = integers(sent, self.grid(survivors), self._privacy.mechanism, self.bits_source)
        read = [self.code.expand(values, self.layout, at) for values in sent]
        return QuantizedContribution(noisy.numpy(), self._owed_after(wanted, read))

    def decode(
        self, total: Integers, ranges: Sequence[float], devices: int, index: int, survivors: int = 1
    ) -> CohortTotal:
        values = (torch.from_numpy(total).double() * self.grid(survivors).unit).to(self.dtype)
        parts = values.split(self.code.count(self.layout))
        nobody = (0,) * self.blocks
        return CohortTotal(
            sums=tuple(self.code.expand(part, self.layout, self._at(index)) for part in parts),
            weight=float(devices),
            steps=float(devices),
            too_large=nobody,
            narrow=nobody,
        )

    @property
    def terms(self) -> str:
        """With the privacy: who is told less noise than others agrees with nobody."""
        return f"{super().terms} {self._privacy!r}"

    def grid(self, survivors: int) -> IntegerGrid:
        return self._privacy.grid(self.count, self.secure.bits, survivors)

    @property
    def _privacy(self) -> DistributedPrivacy:
        assert self.privacy is not None
        return self.privacy


def fixed_point_of(strategy: FederatedStrategy, compressor: Compressor, state: ModelState, seed: int) -> FixedPoint:
    """The form of a federation's messages. Raises RecipeError for one without masks, or which they do not suit."""
    secure, privacy = strategy.secure, strategy.privacy
    if secure is None:
        raise RecipeError(f"{strategy!r} has no masks: write {type(strategy).__name__}(secure=SecureAggregation())")
    if isinstance(privacy, CentralPrivacy):
        raise RecipeError(
            f"{privacy!r} has the server clip every contribution, and under {secure!r} it sees none. Write "
            f"privacy=DistributedPrivacy(noise={privacy.noise}), with which devices clip and add noise themselves."
        )
    blocks = strategy.contribution_count
    if isinstance(privacy, DistributedPrivacy):
        return PrivateFixedPoint(secure, compressor, state.layout, state.dtype, blocks, seed, privacy=privacy)
    first_weight = strategy.weight(LocalWork(samples=FIRST_SAMPLES, steps=1), 0)
    return FixedPoint(secure, compressor, state.layout, state.dtype, blocks, seed, first_weight)
