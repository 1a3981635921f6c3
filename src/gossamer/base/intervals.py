"""Means of noisy values, with a confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
BATCHES = 8
FEWEST_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class ConfidenceInterval:
    """An estimate, and the interval that contains the true value with probability `confidence`."""

    value: float
    low: float
    high: float
    confidence: float = 0.95

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class MeanEstimate:
    """A mean, its standard error, and the degrees of freedom of the standard error."""

    value: float
    standard_error: float
    freedom: int

    def interval(self, confidence: float = 0.95) -> ConfidenceInterval:
        half = student_quantile(confidence, self.freedom) * self.standard_error if self.freedom else inf
        return ConfidenceInterval(
            value=self.value, low=self.value - half, high=self.value + half, confidence=confidence
        )


def sample_mean(values: Sequence[float]) -> MeanEstimate:
    """Mean of at least one independent value, and its standard error; without degrees of freedom for one value."""
    table = np.array(values, dtype=np.float64)
    with np.errstate(all="ignore"):
        error = float(table.std(ddof=1)) / sqrt(len(table)) if len(table) > 1 else inf
        return MeanEstimate(value=float(table.mean()), standard_error=error, freedom=len(table) - 1)


def mean_estimate(values: Floats) -> MeanEstimate:
    """Mean of values in order of time, and its standard error by batch means.

    Means of consecutive batches are nearly independent although single values are not. A line through them removes a
    trend, which is not noise:
        b_k = mean of batch k,  r_k = b_k - (line through b)_k,  se^2 = sum r_k^2 / (K - 2) / K
    law:    covers the mean of the trend with the nominal probability if batches are independent and normal
    source: Schmeiser 1982, Operations Research 30(3), "Batch size effects in the analysis of simulation output"
    """
    count = min(BATCHES, len(values) // 2)
    if count < FEWEST_BATCHES:
        value = float(values.mean()) if len(values) else float("nan")
        return MeanEstimate(value=value, standard_error=inf, freedom=0)
    kept = values[len(values) % count :]  # the latest ones, in batches of equal length
    means = kept.reshape(count, -1).mean(1)
    places = np.arange(count) - (count - 1) / 2
    slope = float(places @ means) / float(places @ places)
    left = means - means.mean() - slope * places
    error = sqrt(float(left @ left) / (count - 2) / count)
    return MeanEstimate(value=float(means.mean()), standard_error=error, freedom=count - 2)


def student_quantile(confidence: float, freedom: int) -> float:
    """Half width of the two-sided interval of Student's t in standard errors, within 1 % from 4 degrees on.

    source: Abramowitz & Stegun 1964, 26.7.5 (an expansion about the normal quantile); 1 and 2 degrees are exact.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    if freedom == 1:
        return float(np.tan(np.pi * confidence / 2))
    if freedom == 2:
        return confidence * sqrt(2 / (1 - confidence**2))
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))
