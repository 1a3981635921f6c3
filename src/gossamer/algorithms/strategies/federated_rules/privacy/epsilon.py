"""Privacy loss: (epsilon, delta) bounds on the information about a device, by Renyi divergence or exact.

Two federations are neighbors if one device contributes its update in one of them, and zeros in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from math import erfc, exp, inf, log, log1p, pi, sqrt
from typing import Any

import torch

from gossamer.errors import AttachError

PLD, RDP = "pld", "rdp"
ORDERS: list[float] = [
    *(1 + step / 100 for step in range(1, 100)),
    *(2 + step / 10 for step in range(80)),
    *range(10, 2049),
]
INTEGER_ORDERS = [order for order in ORDERS if order == int(order)]
# for sampled rounds; the divergence at orders below 1.75 is a series that may not converge
SAMPLED_ORDERS: list[float] = [1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, *range(5, 65), 80, 96, 128, 192, 256, 512]
LEAST_NOISE = 0.2  # below it, sampling adds little privacy, and PLD has too many losses to add up
GRID = 1e-3  # discretization of the losses that PLD adds up, rounded so that epsilon is never underestimated


@lru_cache(maxsize=4096)
def gaussian_epsilon(noise: float, rounds: int, delta: float) -> float:
    """Return epsilon for a device in `rounds` rounds, each with Gaussian noise.

    The rounds together are one Gaussian mechanism with mu = sqrt(T) / z, so this is exact: the epsilon at which
    Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu) is delta, rounded up.
    source: Balle & Wang 2018, ICML, Theorem 8; Dong, Roth & Su 2022, JRSS B, Corollary 3.3 (composition)

    Args:
        noise: z, standard deviation relative to the largest change by one device.
        rounds: T.
        delta: probability that epsilon does not hold.
    """
    if rounds == 0:
        return 0.0
    mu = sqrt(rounds) / noise
    low, high = 0.0, mu * mu / 2 + mu * sqrt(2 * log(1 / delta))  # a bound by Renyi divergence: Mironov 2017, CSF
    if _gaussian_delta(mu, low) <= delta:
        return low
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _gaussian_delta(mu, middle) > delta else (low, middle)
    return high


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """exp(epsilon) Phi(-a) is exp(-b^2 / 2) erfcx(a / sqrt(2)) / 2, which does not overflow; a - b = mu."""
    a, b = epsilon / mu + mu / 2, epsilon / mu - mu / 2
    scaled = float(torch.special.erfcx(torch.tensor(a / sqrt(2), dtype=torch.float64)))
    return (erfc(b / sqrt(2)) - exp(-b * b / 2) * scaled) / 2


@lru_cache(maxsize=4096)
def sampled_gaussian_epsilon(noise: float, rate: float, rounds: int, delta: float, accountant: str = PLD) -> float:
    """Return epsilon for a device that is sampled independently with probability `rate` in each of `rounds` rounds.

    Observers do not know the samples.
    source: Mironov et al. 2019 (RDP of the sampled Gaussian mechanism); Koskela et al. 2020, AISTATS, and Doroshenko
            et al. 2022, PoPETs (PLD)

    Args:
        noise: z, standard deviation relative to the largest change by one device.
        rate: sampling probability.
        rounds: number of rounds.
        delta: probability that epsilon does not hold.
        accountant: "pld" or "rdp", which is looser.

    Raises:
        AttachError: dp-accounting is not installed.
    """
    if rounds == 0:
        return 0.0
    if noise < LEAST_NOISE:
        return gaussian_epsilon(noise, rounds, delta)
    events = _dp_accounting("dp_accounting")
    if accountant == PLD:
        ledger = _dp_accounting("dp_accounting.pld").PLDAccountant(value_discretization_interval=GRID)
    else:
        ledger = _dp_accounting("dp_accounting.rdp").RdpAccountant(SAMPLED_ORDERS)
    ledger.compose(events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(noise)), rounds)
    return float(ledger.get_epsilon(delta))


def _dp_accounting(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise AttachError(
            "The privacy loss of Poisson sampling is computed by dp-accounting, which is not "
            "installed. Install it: pip install 'gossamer[dp]'; or write sampling=\"fixed\", which needs no package "
            "and has a larger bound."
        ) from error


def renyi_epsilon(
    divergence: Callable[[float], float], delta: float, orders: Sequence[float] = ORDERS, distance: float = 0.0
) -> float:
    """Return the least epsilon that follows from a Renyi divergence at each order.

    distance: total variation distance between the sampled distribution and that of the divergence, for either neighbor;
    it costs (1 + exp(epsilon)) times itself of delta. source: Canonne, Kamath & Steinke 2020, NeurIPS, Proposition 12;
    Balle et al. 2020, AISTATS
    """
    divergences = [divergence(order) for order in orders]
    epsilon = 0.0
    while True:  # epsilon increases to the fixed point that also covers the distance
        left = delta - (1 + exp(min(epsilon, 700.0))) * distance
        if left <= 0:
            return inf
        before = epsilon
        found = min(
            each + log1p(-1 / order) - log(left * order) / (order - 1)
            for order, each in zip(orders, divergences, strict=True)
        )
        epsilon = max(found, 0.0)
        if epsilon <= before * (1 + 1e-12):
            return epsilon


def skellam_divergence(order: float, norm: float, norm1: float, variance: float) -> float:
    """Return the divergence of a sum of integers plus Skellam noise of a variance.

    A device changes the sum by at most `norm` (Euclidean) and `norm1` (sum of absolute values).
    source: Agarwal et al. 2021, NeurIPS, Corollary 4.1
    """
    beyond = ((2 * order - 1) * norm**2 + 6 * norm1) / (4 * variance**2)
    return order * norm**2 / (2 * variance) + min(beyond, 3 * norm1 / (2 * variance))


def discrete_gaussian_divergence(
    order: float, norm: float, norm1: float, variance: float, devices: int, entries: int
) -> float:
    """Return the divergence of a sum of integers to which each device added its part of discrete Gaussian noise.

    variance: of all parts together. A sum of discrete Gaussians is not exactly one; `gap` bounds the difference.
    source: Kairouz et al. 2021, ICML, Prop. 14
    """
    share = variance / devices
    gap = 10 * sum(exp(-2 * pi**2 * share * count / (count + 1)) for count in range(1, devices))
    moved, moved1 = norm / sqrt(variance), norm1 / sqrt(variance)
    return min(
        order / 2 * moved**2 + gap * entries,
        order / 2 * (moved**2 + 2 * moved1 * gap + gap**2 * entries),
        order / 2 * (moved + sqrt(entries) * gap) ** 2,
    )
