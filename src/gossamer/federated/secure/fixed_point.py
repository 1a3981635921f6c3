"""Fixed point: a device's weighted contribution as whole numbers under one scale for all, and the mean of their sum.

The numbers of a message, all at most 2^(bits-1) - 1 in size: what the linear code sends of each block, then in digits
the weight and the weight times the steps, then two flags a block: whether an entry did not fit into the range, and
whether all of them would fit into a sixteenth of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gossamer.compressors import Compressor
from gossamer.core import rng
from gossamer.core.aggregation import AggregationContext
from gossamer.core.layout import Layout
from gossamer.errors import LoopError, MalformedError, NotFinite
from gossamer.federated.secure.linear_code import LinearCode, has_feedback, linear_code
from gossamer.federated.secure.masking.ring import Integers
from gossamer.kernels import all_finite
from gossamer.kernels.reference.counter_rng import uniform
from gossamer.strategies.federated.secure_aggregation import SecureAggregation

UNITS = 1024  # of a weight of 1
WEIGHT_BITS, STEP_BITS = 40, 20
FIRST_RANGE = 1.0
NARROW = 16  # entries that fit into such a part of the range have bits to spare
CHANGE = 8.0  # of a range that does not fit
FLAGS = 2  # a block
RESIDUAL = "residual"


@dataclass(frozen=True)
class QuantizedContribution:
    """A contribution as whole numbers."""

    integers: Integers  # (d,)
    residuals: tuple[dict[str, Tensor], ...]  # of the device's feedback once it counts, by block


@dataclass(frozen=True)
class CohortTotal:
    """What a sum of quantized contributions stands for."""

    sums: tuple[Tensor, ...]  # of contributions times weights: (n,) each
    weight: float
    steps: float  # times weights
    too_large: tuple[int, ...]  # devices with an entry out of range, by block
    narrow: tuple[int, ...]  # devices with bits to spare, by block


@dataclass(frozen=True)
class FixedPoint:
    """The form of all messages of a federation under masks."""

    secure: SecureAggregation
    compressor: Compressor
    layout: Layout
    dtype: torch.dtype
    blocks: int
    seed: int = 0

    @cached_property
    def code(self) -> LinearCode:
        return linear_code(self.compressor, self.secure)

    @property
    def terms(self) -> str:
        """Of how contributions become whole numbers: devices of one sum have them alike."""
        return repr(self.compressor)

    @property
    def count(self) -> int:
        """d."""
        return self.blocks * (self.code.count(self.layout) + FLAGS) + sum(self._digits)

    @property
    def first_ranges(self) -> tuple[float, ...]:
        return (self.secure.clip or FIRST_RANGE,) * self.blocks

    def ranges_after(self, ranges: Sequence[float], total: CohortTotal, devices: int) -> tuple[float, ...]:
        """Wider where an entry of more than a quarter of the devices did not fit, narrower where all had room."""
        if self.secure.clip is not None:
            return tuple(ranges)
        found = []
        for each, large, narrow in zip(ranges, total.too_large, total.narrow, strict=True):
            wider, narrower = 4 * large > devices and each < 1e30, narrow == devices and each > 1e-30
            found.append(each * CHANGE if wider else each / CHANGE if narrower else each)
        return tuple(found)

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
        """blocks: (n,) each, only read. survivors: devices that the sum has at least.

        The same numbers for the same round, however often. Raises NotFinite, and LoopError for a weight that no message
        can tell.
        """
        units = max(round(weight * UNITS), 1)
        if units >= 2**WEIGHT_BITS:
            raise LoopError(
                f"Client {client} weighs {weight:.3g}, and masked messages have room for weights below "
                f"{2**WEIGHT_BITS // UNITS}. Return gossamer.federated.Update(samples=...) with fewer samples."
            )
        parts: list[Integers] = []
        flags: list[int] = []
        read: list[Tensor] = []
        wanted = self._with_owed(blocks, residuals)
        for place, (block, limit) in enumerate(zip(wanted, ranges, strict=True)):
            if not all_finite(block):
                raise NotFinite("a number is not finite, or too large to be added to what is still owed")
            values = self.code.project(block, self.layout, self._at(index)).double() * (units / UNITS)
            key = rng.address(self.seed, "fixed point", client, index, place)
            numbers = self._rounded(values, limit, key)
            parts.append(numbers.numpy())
            most = float(values.abs().max()) if len(values) else 0.0
            flags += [most > limit, most < limit / NARROW]
            read.append(self._read(numbers, limit * UNITS / units, index))
        digits = self._written(units, 0) + self._written(units * min(steps, 2**STEP_BITS - 1), 1)
        integers = np.concatenate([*parts, np.array([*digits, *flags], np.int64)])
        return QuantizedContribution(integers, self._owed_after(wanted, read))

    def decode(
        self, total: Integers, ranges: Sequence[float], devices: int, index: int, survivors: int = 1
    ) -> CohortTotal:
        """total: (d,) the sum over so many devices. Raises MalformedError for one that honest ones cannot have."""
        each = self.code.count(self.layout)
        places = [block * each for block in range(self.blocks)]
        tail = total[self.blocks * each :].tolist()
        units, stepped = self._told(tail, 0), self._told(tail[self._digits[0] :], 1)
        flags = tail[sum(self._digits) :]
        if not devices <= units < devices * 2**WEIGHT_BITS or not 0 <= stepped <= units * 2**STEP_BITS:
            raise MalformedError(f"the weights of {devices} devices add up to {units / UNITS}: one of them lies")
        sums = [
            self._read(torch.from_numpy(total[place : place + each].copy()), limit, index)
            for place, limit in zip(places, ranges, strict=True)
        ]
        return CohortTotal(
            sums=tuple(sums),
            weight=units / UNITS,
            steps=stepped / UNITS,
            too_large=tuple(flags[::FLAGS]),
            narrow=tuple(flags[1::FLAGS]),
        )

    def _with_owed(self, blocks: Sequence[Tensor], residuals: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        """Blocks and what the device still owes of them; blocks alone, where nothing is kept or nothing was yet."""
        if not has_feedback(self.compressor) or len(residuals) != len(blocks):
            return [*blocks]
        owed = zip(blocks, residuals, strict=True)
        return [block + own[RESIDUAL] if RESIDUAL in own else block for block, own in owed]

    def _owed_after(self, wanted: Sequence[Tensor], read: Sequence[Tensor]) -> tuple[dict[str, Tensor], ...]:
        """What of the wanted is not in what is read of a message, where that is kept."""
        if not has_feedback(self.compressor):
            return ()
        return tuple({RESIDUAL: block - each} for block, each in zip(wanted, read, strict=True))

    def _at(self, index: int) -> AggregationContext:
        """Alike for all devices of a round."""
        return AggregationContext(step=index, seed=rng.address(self.seed, "secure"))

    @property
    def _levels(self) -> int:
        return (1 << (self.secure.bits - 1)) - 1

    def _rounded(self, values: Tensor, limit: float, key: int) -> Tensor:
        """floor(levels v / limit + u): (m,) int64; on average levels v / limit where that is in range."""
        scaled = (values * (self._levels / limit)).clamp_(-self._levels, self._levels)
        return scaled.add_(uniform(key, len(values))).floor_().clamp_(-self._levels, self._levels).long()

    def _read(self, numbers: Tensor, limit: float, index: int) -> Tensor:
        values = (numbers.double() * (limit / self._levels)).to(self.dtype)
        return self.code.expand(values, self.layout, self._at(index))

    @property
    def _digits(self) -> tuple[int, int]:
        """How many the weight has, and the weight times the steps."""
        room = self.secure.bits - 1
        return -(-WEIGHT_BITS // room), -(-(WEIGHT_BITS + STEP_BITS) // room)

    def _written(self, number: int, which: int) -> list[int]:
        room = self.secure.bits - 1
        return [number >> (room * place) & self._levels for place in range(self._digits[which])]

    def _told(self, digits: Sequence[int], which: int) -> int:
        room = self.secure.bits - 1
        return sum(digit << (room * place) for place, digit in enumerate(digits[: self._digits[which]]))
