"""Fixed point: a device's weighted contribution as integers with one scale for all, and the mean of their sum.

A linear code maps a vector to numbers that can be summed entry by entry. Projection and expansion are linear and equal
on all devices of a round, so the expansion of a sum of projections is the sum of the expansions.

A round has a range R for the entries of each block, and a range W for weights. A device of weight w sends its entries,
clipped to R, times w' / W, and w' / W itself, where w' = min(w, W). Numerator and denominator of the mean have the same
w', and an entry times w' / W always fits.

The numbers of a message, all at most 2^(bits-1) - 1 in magnitude:
1. the projection of each block,
2. the weight, and the weight times the steps, in digits,
3. two flags per block: an entry exceeds the range; all entries would fit into a sixteenth of the range,
4. flags of the weight: above W, W / 64, W / 512.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, Rotated, Route
from gossamer.algorithms.compressors.random_subspace import RandomSubspace
from gossamer.algorithms.strategies.federated_rules import (
    CentralPrivacy,
    DistributedPrivacy,
    FederatedStrategy,
    LocalWork,
)
from gossamer.algorithms.strategies.federated_rules.privacy.integer_grid import IntegerGrid
from gossamer.algorithms.strategies.federated_rules.secure_aggregation import SecureAggregation
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import all_finite
from gossamer.base.kernels.reference.counter_rng import uniform
from gossamer.base.layout import Layout, LayoutPart
from gossamer.errors import MalformedError, NotFinite, RecipeError
from gossamer.federated.model_state import ModelState
from gossamer.federated.privacy.clipping_and_noise import integers
from gossamer.federated.privacy.noise_sampling import RandomBits
from gossamer.federated.secure_aggregation.masking import Integers


class LinearCode(ABC):
    """A linear map from (n,) to (m,), drawn again at each step, and one back."""

    @abstractmethod
    def count(self, layout: Layout) -> int:
        """m, the number of entries, which depends only on the layout."""

    @abstractmethod
    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        """Map (n,) to (m,), which may be a view."""

    @abstractmethod
    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        """Map (m,) back to (n,), which may be a view."""


@dataclass(frozen=True)
class EveryEntry(LinearCode):
    """All n entries."""

    def count(self, layout: Layout) -> int:
        return layout.numel

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return flat

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return values


@dataclass(frozen=True)
class DrawnSubspace(LinearCode):
    """Coefficients in shared random directions; scaled to be unbiased if there is no error feedback."""

    drawn: RandomSubspace
    scaled: bool

    def count(self, layout: Layout) -> int:
        return sum(self.drawn.coefficient_counts(layout))

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        values = self.drawn.project(flat, layout, at)
        return values * self.drawn.scales(layout, values) if self.scaled else values

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return self.drawn.expand(values, layout, at)


@dataclass(frozen=True)
class Turned(LinearCode):
    """Another code, applied to the coefficients in a rotated basis."""

    rotation: Rotated
    inner: LinearCode

    def count(self, layout: Layout) -> int:
        return self.inner.count(layout)

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return self.inner.project(self.rotation.turned(flat, layout, torch.empty_like(flat)), layout, at)

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        coefficients = self.inner.expand(values, layout, at)
        return self.rotation.turned(coefficients, layout, torch.empty_like(coefficients), inverse=True)


@dataclass(frozen=True)
class Divided(LinearCode):
    """Two codes, each for its own tensors."""

    route: Route
    codes: Sequence[LinearCode]

    def count(self, layout: Layout) -> int:
        return sum(code.count(part.layout) for code, part in self._parts(layout))

    def project(self, flat: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        return torch.cat([code.project(part.gather(flat).flat, part.layout, at) for code, part in self._parts(layout)])

    def expand(self, values: Tensor, layout: Layout, at: AggregationContext) -> Tensor:
        whole = values.new_zeros(layout.numel)
        start = 0
        for code, part in self._parts(layout):
            count = code.count(part.layout)
            part.scatter(code.expand(values[start : start + count], part.layout, at), whole)
            start += count
        return whole

    def _parts(self, layout: Layout) -> list[tuple[LinearCode, LayoutPart]]:
        return [(self.codes[way], part) for way, part in self.route.parts(layout)]


def linear_code(compressor: Compressor, secure: SecureAggregation, scaled: bool = True) -> LinearCode:
    """The linear code of a compressor. Raises RecipeError with the reason if the compressor is not linear."""
    why = secure.refuses(compressor)
    if why is not None:
        raise RecipeError(why)
    match compressor:
        case Feedback(inner=inner):
            return linear_code(inner, secure, scaled=False)
        case Rotated(inner=inner):
            return Turned(compressor, linear_code(inner, secure, scaled))
        case Route(inner=inner, rest=rest):
            return Divided(compressor, [linear_code(each, secure, scaled) for each in (inner, rest)])
        case RandomSubspace(feedback=feedback):
            return DrawnSubspace(compressor, scaled and not feedback)
    assert isinstance(compressor, Dense)
    return EveryEntry()


def has_feedback(compressor: Compressor) -> bool:
    """Whether compression error is kept as a residual for the next round."""
    return any(isinstance(term, Feedback) for term in compressor.held())


UNITS = 2**29  # of the largest weight, W
WEIGHT_BITS, STEP_BITS = 30, 20  # of a weight in units, and of steps
FIRST_RANGE = 1.0
NARROW = 16  # if all entries fit into this fraction of the range, it can shrink
CHANGE = 8.0  # factor of a change of the range
FLAGS = 2  # per block
WEIGHT_LEVELS = (1, 64, 512)  # flags of the weight: above W over each of these
LEAST_RANGE, MOST_RANGE = 1e-30, 1e30
RESIDUAL = "residual"


@dataclass(frozen=True)
class QuantizedContribution:
    """A contribution as integers."""

    integers: Integers  # (d,)
    residuals: tuple[dict[str, Tensor], ...]  # of the device once it is counted, by block


@dataclass(frozen=True)
class CohortTotal:
    """The decoded sum of quantized contributions."""

    sums: tuple[Tensor, ...]  # of contributions times weights: (n,) each
    weight: float
    steps: float  # times weights
    too_large: tuple[int, ...]  # devices with an entry out of range, by block
    narrow: tuple[int, ...]  # devices that could use a smaller range, by block
    heavy: tuple[int, ...] = (0, 0, 0)  # devices with a weight above W over each of WEIGHT_LEVELS


@dataclass(frozen=True)
class FixedPoint:
    """The message format of a federation with secure aggregation. `ranges` (blocks + 1,) are the ranges of the entries
    of each block, then the range of weights."""

    secure: SecureAggregation
    compressor: Compressor
    layout: Layout
    dtype: torch.dtype
    blocks: int
    seed: int = 0
    first_weight: float = 1.0  # W of the first round

    @cached_property
    def code(self) -> LinearCode:
        return linear_code(self.compressor, self.secure)

    @property
    def terms(self) -> str:
        """Fingerprint of the encoding, which all devices of a sum must share."""
        return repr(self.compressor)

    @property
    def count(self) -> int:
        """d, the number of integers in a message."""
        return self.blocks * (self.code.count(self.layout) + FLAGS) + sum(self._digits) + len(WEIGHT_LEVELS)

    @property
    def first_ranges(self) -> tuple[float, ...]:
        return *(self.secure.clip or FIRST_RANGE,) * self.blocks, self.first_weight

    def ranges_after(self, ranges: Sequence[float], total: CohortTotal, devices: int) -> tuple[float, ...]:
        """Ranges of the next round.

        Entries: wider if entries of more than a quarter of the devices did not fit, narrower if all had room.
        Weights: wider if any weight was clipped, but at most 512 times the weight that more than a quarter of the
        devices have, so that a claim of one device cannot take the precision of all others; narrower above that.
        """
        *limits, heaviest = ranges
        if self.secure.clip is None:
            limits = [
                _changed(limit, wider=_are_many(large, devices), narrower=narrow == devices)
                for limit, large, narrow in zip(limits, total.too_large, total.narrow, strict=True)
            ]
        cut, above_64th, above_512th = total.heavy
        wider = bool(cut) and _are_many(above_64th, devices)
        return *limits, _changed(heaviest, wider=wider, narrower=not _are_many(above_512th, devices))

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
        """Quantize a contribution, with the same result for the same round.

        Args:
            blocks: (n,) each, read-only.
            weight: of the contribution; clipped to the range of weights.
            steps: local steps.
            ranges: of this round.
            client: number of the device.
            index: of the round.
            survivors: smallest number of devices in the sum.
            residuals: of the device, by block.

        Raises:
            NotFinite: an entry is not finite.
        """
        *limits, heaviest = ranges
        units = max(round(min(weight / heaviest, 1.0) * UNITS), 1)
        share = units / UNITS
        parts: list[Integers] = []
        flags: list[int] = []
        read: list[Tensor] = []
        wanted = self._with_residuals(blocks, residuals)
        for place, (block, limit) in enumerate(zip(wanted, limits, strict=True)):
            if not all_finite(block):
                raise NotFinite("a number is not finite, or too large to be added to the residual")
            values = self.code.project(block, self.layout, self._at(index)).double()
            key = rng.address(self.seed, "fixed point", client, index, place)
            numbers = self._rounded(values.clamp(-limit, limit) * share, limit, key)
            parts.append(numbers.numpy())
            most = float(values.abs().max()) if len(values) else 0.0
            flags += [most > limit, most < limit / NARROW]
            read.append(self._read(numbers, limit / share, index))
        flags += [weight > heaviest / each for each in WEIGHT_LEVELS]
        digits = self._written(units, 0) + self._written(units * min(steps, 2**STEP_BITS - 1), 1)
        integers = np.concatenate([*parts, np.array([*digits, *flags], np.int64)])
        return QuantizedContribution(integers, self._residuals_after(wanted, read))

    def decode(
        self, total: Integers, ranges: Sequence[float], devices: int, index: int, survivors: int = 1
    ) -> CohortTotal:
        """Decode total, (d,), the sum over `devices`. Raises MalformedError for impossible sums."""
        each = self.code.count(self.layout)
        places = [block * each for block in range(self.blocks)]
        tail = total[self.blocks * each :].tolist()
        units, stepped = self._value_of(tail, 0), self._value_of(tail[self._digits[0] :], 1)
        flags = tail[sum(self._digits) :]
        *limits, heaviest = ranges
        if not devices <= units <= devices * UNITS or not 0 <= stepped <= units * 2**STEP_BITS:
            raise MalformedError(
                f"the weights of {devices} devices add up to {units / UNITS * heaviest:.6g}, but each is above 0 and "
                f"at most {heaviest:g}: one of the devices sent invalid values"
            )
        if not all(0 <= each <= devices for each in flags):
            raise MalformedError(
                f"the flags of {devices} devices add up to {flags[:10]}: one of the devices sent invalid values"
            )
        sums = [
            self._read(torch.from_numpy(total[place : place + each].copy()), limit * heaviest, index)
            for place, limit in zip(places, limits, strict=True)
        ]
        of_blocks = flags[: FLAGS * self.blocks]
        return CohortTotal(
            sums=tuple(sums),
            weight=units / UNITS * heaviest,
            steps=stepped / UNITS * heaviest,
            too_large=tuple(of_blocks[::FLAGS]),
            narrow=tuple(of_blocks[1::FLAGS]),
            heavy=tuple(flags[FLAGS * self.blocks :]),
        )

    def _with_residuals(self, blocks: Sequence[Tensor], residuals: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        """Blocks plus residuals; the blocks alone without error feedback or without a residual yet."""
        if not has_feedback(self.compressor) or len(residuals) != len(blocks):
            return [*blocks]
        unsent = zip(blocks, residuals, strict=True)
        return [block + own[RESIDUAL] if RESIDUAL in own else block for block, own in unsent]

    def _residuals_after(self, wanted: Sequence[Tensor], read: Sequence[Tensor]) -> tuple[dict[str, Tensor], ...]:
        """Residuals: the input minus the decoded message, if there is error feedback."""
        if not has_feedback(self.compressor):
            return ()
        return tuple({RESIDUAL: block - each} for block, each in zip(wanted, read, strict=True))

    def _at(self, index: int) -> AggregationContext:
        """Context that all devices of a round share."""
        return AggregationContext(step=index, seed=rng.address(self.seed, "secure"))

    @property
    def _levels(self) -> int:
        return (1 << (self.secure.bits - 1)) - 1

    def _rounded(self, values: Tensor, limit: float, key: int) -> Tensor:
        """Stochastic rounding, floor(levels v / limit + u): (m,) int64; unbiased within the range."""
        scaled = (values * (self._levels / limit)).clamp_(-self._levels, self._levels)
        return scaled.add_(uniform(key, len(values))).floor_().clamp_(-self._levels, self._levels).long()

    def _read(self, numbers: Tensor, limit: float, index: int) -> Tensor:
        values = (numbers.double() * (limit / self._levels)).to(self.dtype)
        return self.code.expand(values, self.layout, self._at(index))

    @property
    def _digits(self) -> tuple[int, int]:
        """Number of digits of the weight, and of the weight times the steps."""
        room = self.secure.bits - 1
        return -(-WEIGHT_BITS // room), -(-(WEIGHT_BITS + STEP_BITS) // room)

    def _written(self, number: int, which: int) -> list[int]:
        room = self.secure.bits - 1
        return [number >> (room * place) & self._levels for place in range(self._digits[which])]

    def _value_of(self, digits: Sequence[int], which: int) -> int:
        room = self.secure.bits - 1
        return sum(digit << (room * place) for place, digit in enumerate(digits[: self._digits[which]]))


def _are_many(count: int, devices: int) -> bool:
    """More than a quarter and more than one, so that one of three or four devices cannot decide for all."""
    return count > max(devices / 4, 1)


def _changed(limit: float, *, wider: bool, narrower: bool) -> float:
    if wider and limit < MOST_RANGE:
        return limit * CHANGE
    return limit / CHANGE if narrower and not wider and limit > LEAST_RANGE else limit


FIRST_SAMPLES = 16  # of a device with the largest weight of the first round


@dataclass(frozen=True)
class PrivateFixedPoint(FixedPoint):
    """Messages under DistributedPrivacy: the projection, clipped and rounded on a grid, with noise.

    Every device has weight 1 and reports nothing about its work. The residual keeps the part outside the projection. It
    does not keep the clipping and rounding errors or the noise, since sending them later would exceed the accounted
    privacy loss.
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
        """Quantize with new noise at every call. Raises NotFinite."""
        wanted, at = self._with_residuals(blocks, residuals), self._at(index)
        sent = [self.code.project(each, self.layout, at) for each in wanted]
        noisy = integers(sent, self.grid(survivors), self._privacy.mechanism, self.bits_source)
        read = [self.code.expand(values, self.layout, at) for values in sent]
        return QuantizedContribution(noisy.numpy(), self._residuals_after(wanted, read))

    def decode(
        self, total: Integers, ranges: Sequence[float], devices: int, index: int, survivors: int = 1
    ) -> CohortTotal:
        values = (torch.from_numpy(total).double() * self.grid(survivors).unit).to(self.dtype)
        parts = values.split(self.code.count(self.layout))
        no_device = (0,) * self.blocks
        return CohortTotal(
            sums=tuple(self.code.expand(part, self.layout, self._at(index)) for part in parts),
            weight=float(devices),
            steps=float(devices),
            too_large=no_device,
            narrow=no_device,
        )

    @property
    def terms(self) -> str:
        """With the privacy, so that devices with different noise do not agree on keys."""
        return f"{super().terms} {self._privacy!r}"

    def grid(self, survivors: int) -> IntegerGrid:
        return self._privacy.grid(self.count, self.secure.bits, survivors)

    @property
    def _privacy(self) -> DistributedPrivacy:
        assert self.privacy is not None
        return self.privacy


def fixed_point_of(strategy: FederatedStrategy, compressor: Compressor, state: ModelState, seed: int) -> FixedPoint:
    """The message format of a federation. Raises RecipeError if the recipe has no masks, or does not support them."""
    secure, privacy = strategy.secure, strategy.privacy
    if secure is None:
        raise RecipeError(f"{strategy!r} has no masks: write {type(strategy).__name__}(secure=SecureAggregation())")
    if isinstance(privacy, CentralPrivacy):
        raise RecipeError(
            f"{privacy!r} has the server clip contributions, but under {secure!r} the server sees only sums. Write "
            f"privacy=DistributedPrivacy(noise={privacy.noise}), so that devices clip and add noise themselves."
        )
    blocks = strategy.contribution_count
    if isinstance(privacy, DistributedPrivacy):
        return PrivateFixedPoint(secure, compressor, state.layout, state.dtype, blocks, seed, privacy=privacy)
    first_weight = strategy.weight(LocalWork(samples=FIRST_SAMPLES, steps=1), 0)
    return FixedPoint(secure, compressor, state.layout, state.dtype, blocks, seed, first_weight)
