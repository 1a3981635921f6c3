"""Mechanisms: clip contributions and add noise, on the device or in the server's sum."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated import CentralPrivacy, CohortSummary, LocalPrivacy, Privacy
from gossamer.algorithms.strategies.federated.privacy.integer_grid import IntegerGrid
from gossamer.errors import MismatchError, NotFinite
from gossamer.federated.messages import Report
from gossamer.federated.privacy.accountant import PrivacyAccountant
from gossamer.federated.privacy.noise import RandomBits, SystemBits, gaussian, integer_noise, uniforms
from gossamer.federated.server.aggregation import ContributionSum, WeightedSum

ROUNDING = 1e-12  # below the bound, so that rounded numbers stay within it, too


def common_norm(blocks: Sequence[Tensor]) -> float:
    """The Euclidean norm of all of them together, in float64 and without overflow. Raises NotFinite."""
    sizes = [float(block.abs().max()) for block in blocks if block.numel()]
    if not all(map(isfinite, sizes)):  # before max() and min(), which make a number of NaN
        raise NotFinite("a contribution holds numbers that are not finite, so it has no norm to clip")
    largest = max(sizes, default=0.0)
    if largest == 0:
        return 0.0
    return largest * sqrt(sum(float((block.double() / largest).square().sum()) for block in blocks))


def clip_factor(norm: float, bound: float) -> float:
    """min(1, bound / norm), a hair less where it is below 1; 1 for a norm of 0, 0 for one too large for a float."""
    return 1.0 if norm <= bound else bound / norm * (1 - ROUNDING)


def clipped(blocks: Sequence[Tensor], bound: float) -> tuple[Tensor, ...]:
    """Fresh tensors in float64 of a common norm of at most `bound`. Raises NotFinite."""
    factor = clip_factor(common_norm(blocks), bound)
    return tuple(torch.mul(block.double(), factor) for block in blocks)


def integers(blocks: Sequence[Tensor], grid: IntegerGrid, mechanism: str, bits: RandomBits | None = None) -> Tensor:
    """A device's clipped contribution on a grid of integers, with its share of the noise, for a secure sum.

    Args:
        blocks: tensors of a message of a linear code, encoded after feedback, `grid.entries` numbers together. Nothing
            else of a device may be in them: no weight, no number of samples.
        grid: `DistributedPrivacy.grid(entries, secure.bits, survivors)`, with `survivors` of the cohort's size, which
            each device counts on the roster that it agreed on masks with.

    Returns:
        (entries,) in int64, each within `grid.largest`. The secure sum adds `survivors` of them or more, exactly or
        modulo anything that holds the sum; `mean_of` makes the mean message of the total. Raises NotFinite.
    """
    bits = bits or SystemBits()
    scaled = torch.cat([block.reshape(-1) for block in clipped(blocks, grid.clip)]) / grid.unit
    rounded = _rounded(scaled, grid.norm, bits)
    noise = integer_noise(rounded.numel(), grid.local_variance, mechanism, bits)
    return (rounded + noise).clamp_(-grid.largest, grid.largest)  # which happens once in 1e20


def mean_of(total: Tensor, devices: int, grid: IntegerGrid, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The mean over so many devices, in blocks like these, of the sum of their integers: (entries,)."""
    parts = (total.double() * (grid.unit / devices)).split([block.numel() for block in like])
    return tuple(part.to(block.dtype).view_as(block) for part, block in zip(parts, like, strict=True))


def _rounded(scaled: Tensor, norm: float, bits: RandomBits) -> Tensor:
    """Each number to one of its two neighbors, the nearer the likelier; anew until all have at most such a norm, which
    takes three attempts at most on the average."""
    below = scaled.floor()
    rest = scaled - below
    while True:
        coins = torch.from_numpy(uniforms(bits, scaled.numel()))
        found = below + (coins <= rest)
        if float(found.norm()) <= norm:
            return found.long()


def noised(blocks: Sequence[Tensor], privacy: LocalPrivacy, bits: RandomBits | None = None) -> tuple[Tensor, ...]:
    """Clipped together and with Gaussian noise, each in its dtype. blocks: (n,) each, only read. Raises NotFinite."""
    bits = bits or SystemBits()
    deviation = privacy.noise * privacy.clip
    return tuple(
        (part + gaussian(part.numel(), deviation, bits)).to(block.dtype)
        for part, block in zip(clipped(blocks, privacy.clip), blocks, strict=True)
    )


def check_budget(privacy: LocalPrivacy, told: int) -> None:
    """Raise MismatchError where so many contributions of one device tell more than the budget."""
    epsilon = privacy.epsilon_after(told, 1, 1)
    if privacy.budget is not None and epsilon > privacy.budget:
        raise MismatchError(
            f"The server asks this device for contribution {told}, after which epsilon is {epsilon:.4g}, above the "
            f"budget of {privacy.budget:g}: it has forgotten what it was told. Nothing was sent. Start the server with "
            "the journal that it had."
        )


def private_report(report: Report, privacy: Privacy) -> Report:
    """What a device tells of its work: nothing of its own where the server is not trusted."""
    if not privacy.on_device:
        return report
    return Report(samples=1, steps=1, counts=report.counts, layout=report.layout)


class EqualMean(WeightedSum):
    """The mean of contributions that carry their own noise: weights would tell how much data a device has."""

    def add(self, blocks: Sequence[Tensor], weight: float, steps: int) -> None:
        super().add(blocks, 1.0, 1)


class PrivateSum(ContributionSum):
    """Contributions clipped to one norm, weighted alike, summed with Gaussian noise, over the expected cohort.

    What it gives is the same however often it is asked: noise that is drawn twice for one sum averages out.
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
        """Every device weighs 1, whatever it says of its data. blocks: (n,) each, finite. Raises NotFinite."""
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
        """Perhaps below 0 or above 1."""
        if self._share is None:
            noise = float(gaussian(1, self._count_deviation, self._bits))
            self._share = (self._halves + noise) / self._cohort + 0.5
        return self._share

    def summary(self, clients: int) -> CohortSummary:
        """As expected: who came, and what they did, is not told."""
        return CohortSummary(contributions=self._cohort, clients=clients, steps=1.0)


def private_sum(accountant: PrivacyAccountant) -> ContributionSum:
    """The sum of contributions under an accountant's privacy: with the server's noise, or equally weighted."""
    privacy = accountant.privacy
    return PrivateSum(accountant, privacy) if isinstance(privacy, CentralPrivacy) else EqualMean()
