"""Clipping and noise: clip contributions and add noise, on the device or in the server's sum."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules import CentralPrivacy, CohortSummary, LocalPrivacy, Privacy
from gossamer.algorithms.strategies.federated_rules.privacy.integer_grid import IntegerGrid
from gossamer.errors import MismatchError, NotFinite
from gossamer.federated.messages import Report
from gossamer.federated.privacy.accountant import PrivacyAccountant
from gossamer.federated.privacy.noise_sampling import RandomBits, SystemBits, gaussian, integer_noise, uniforms
from gossamer.federated.server.aggregation import ContributionSum, WeightedSum

ROUNDING = 1e-12  # margin, so that norms stay within the bound after rounding


def common_norm(blocks: Sequence[Tensor]) -> float:
    """The joint Euclidean norm of all blocks, in float64 and without overflow. Raises NotFinite."""
    sizes = [float(block.abs().max()) for block in blocks if block.numel()]
    if not all(map(isfinite, sizes)):  # before max(), which can ignore NaN
        raise NotFinite("a contribution holds numbers that are not finite, so it has no norm to clip")
    largest = max(sizes, default=0.0)
    if largest == 0:
        return 0.0
    return largest * sqrt(sum(float((block.double() / largest).square().sum()) for block in blocks))


def clip_factor(norm: float, bound: float) -> float:
    """min(1, bound / norm), minus a rounding margin below 1; 1 for a norm of 0, 0 for an infinite norm."""
    return 1.0 if norm <= bound else bound / norm * (1 - ROUNDING)


def clipped(blocks: Sequence[Tensor], bound: float) -> tuple[Tensor, ...]:
    """New float64 tensors with a joint norm of at most `bound`. Raises NotFinite."""
    factor = clip_factor(common_norm(blocks), bound)
    return tuple(torch.mul(block.double(), factor) for block in blocks)


def integers(blocks: Sequence[Tensor], grid: IntegerGrid, mechanism: str, bits: RandomBits | None = None) -> Tensor:
    """A device's clipped contribution as integers with its share of the noise, for a secure sum.

    Args:
        blocks: tensors of a linear code's message, encoded after error feedback, `grid.entries` numbers in total. They
            must contain no other data of the device, such as a weight or a number of samples.
        grid: `DistributedPrivacy.grid(entries, secure.bits, survivors)`, with `survivors` from the cohort's size, which
            each device determines from the roster of its masks.

    Returns:
        (entries,) int64, each within `grid.largest`. The secure sum adds at least `survivors` of them, exactly or
        modulo a range that holds the sum; `mean_of` converts the total. Raises NotFinite.
    """
    bits = bits or SystemBits()
    scaled = torch.cat([block.reshape(-1) for block in clipped(blocks, grid.clip)]) / grid.unit
    rounded = _rounded(scaled, grid.norm, bits)
    noise = integer_noise(rounded.numel(), grid.local_variance, mechanism, bits)
    return (rounded + noise).clamp_(-grid.largest, grid.largest)  # clamps with a probability of 1e-20


def mean_of(total: Tensor, devices: int, grid: IntegerGrid, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The mean contribution from a sum (entries,) over `devices`, in blocks like `like`."""
    parts = (total.double() * (grid.unit / devices)).split([block.numel() for block in like])
    return tuple(part.to(block.dtype).view_as(block) for part, block in zip(parts, like, strict=True))


def _rounded(scaled: Tensor, norm: float, bits: RandomBits) -> Tensor:
    """Stochastic rounding to integers, repeated until the norm is at most `norm`: three attempts at most on average."""
    below = scaled.floor()
    rest = scaled - below
    while True:
        coins = torch.from_numpy(uniforms(bits, scaled.numel()))
        found = below + (coins <= rest)
        if float(found.norm()) <= norm:
            return found.long()


def noised(blocks: Sequence[Tensor], privacy: LocalPrivacy, bits: RandomBits | None = None) -> tuple[Tensor, ...]:
    """Clip blocks (n,) jointly and add Gaussian noise, each in its dtype. Raises NotFinite."""
    bits = bits or SystemBits()
    deviation = privacy.noise * privacy.clip
    return tuple(
        (part + gaussian(part.numel(), deviation, bits)).to(block.dtype)
        for part, block in zip(clipped(blocks, privacy.clip), blocks, strict=True)
    )


def check_budget(privacy: LocalPrivacy, count: int) -> None:
    """Raise MismatchError if this number of contributions of one device exceeds its budget."""
    epsilon = privacy.epsilon_after(count, 1, 1)
    if privacy.budget is not None and epsilon > privacy.budget:
        raise MismatchError(
            f"The server requests contribution {count} of this device, after which epsilon is {epsilon:.4g}, above the "
            f"budget of {privacy.budget:g}: the server lost its journal, or is another one. Nothing was sent. Start "
            "the server with its earlier journal. The device counts for all servers, in its folder --state."
        )


def private_report(report: Report, privacy: Privacy) -> Report:
    """The report of a device, without data about its work if the server is not trusted."""
    if not privacy.on_device:
        return report
    return Report(samples=1, steps=1, counts=report.counts, layout=report.layout)


class EqualMean(WeightedSum):
    """The unweighted mean of contributions with local noise: weights would reveal the number of samples."""

    def add(self, blocks: Sequence[Tensor], weight: float, steps: int) -> None:
        super().add(blocks, 1.0, 1)


class PrivateSum(ContributionSum):
    """The sum of equally weighted contributions, clipped to one norm, plus Gaussian noise, divided by the expected
    cohort.

    The noise is drawn once and cached, since several draws for one sum would average out.
    """

    def __init__(self, accountant: PrivacyAccountant, privacy: CentralPrivacy) -> None:
        super().__init__()
        assert accountant.clip is not None
        self._clip, self._cohort, self._bits = accountant.clip, accountant.cohort, accountant.bits
        self._deviation = privacy.sum_noise_of(accountant.cohort) * accountant.clip
        self._count_deviation = privacy.count_noise_of(accountant.cohort)
        self._halves = 0.0
        self._blank = accountant.blank
        self._sums = tuple(torch.zeros(each.shape, dtype=torch.float64) for each in accountant.blank)
        self._means: tuple[Tensor, ...] = ()
        self._share: float | None = None

    def add(self, blocks: Sequence[Tensor], weight: float, steps: int) -> None:
        """Add a contribution with weight 1, regardless of its report. blocks: (n,) each, finite. Raises NotFinite."""
        super().add(blocks, 1.0, 1)

    def _add(self, blocks: Sequence[Tensor], weight: float) -> None:
        norm = common_norm(blocks)
        for into, block in zip(self._sums, blocks, strict=True):
            into.add_(block.double(), alpha=clip_factor(norm, self._clip))
        self._halves += 0.5 if norm <= self._clip else -0.5

    def means(self) -> tuple[Tensor, ...]:
        if not self._means:
            self._means = tuple(
                ((each + gaussian(each.numel(), self._deviation, self._bits)) / self._cohort).to(like.dtype)
                for each, like in zip(self._sums, self._blank, strict=True)
            )
        return self._means

    def share_below(self) -> float:
        """With noise, so it can be below 0 or above 1."""
        if self._share is None:
            noise = float(gaussian(1, self._count_deviation, self._bits))
            self._share = (self._halves + noise) / self._cohort + 0.5
        return self._share

    def summary(self, clients: int) -> CohortSummary:
        """Expected values only, since the actual cohort and its work must stay secret."""
        return CohortSummary(contributions=self._cohort, clients=clients, steps=1.0)


def private_sum(accountant: PrivacyAccountant) -> ContributionSum:
    """The sum for an accountant's privacy: with the server's noise, or unweighted."""
    privacy = accountant.privacy
    return PrivateSum(accountant, privacy) if isinstance(privacy, CentralPrivacy) else EqualMean()
