"""Privacy loss: bounds what versions tell of any one device, as (epsilon, delta), by Renyi's divergence or exactly.

Two federations are neighbors where one device contributes what it learned in one, and zeros in the other.
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
# of sampled rounds, whose divergence at orders below 1.75 is a series that may not converge
SAMPLED_ORDERS: list[float] = [1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, *range(5, 65), 80, 96, 128, 192, 256, 512]
LEAST_NOISE = 0.2  # below it a coin hides nothing worth counting, and PLD's losses are too many to add up
GRID = 1e-3  # of the losses that PLD adds up, rounded so that epsilon is never too small


@lru_cache(maxsize=4096)
def gaussian_epsilon(noise: float, rounds: int, delta: float) -> float:
    """Epsilon where a device takes part in so many rounds, each with Gaussian noise of standard deviation
    `noise` times the most that the device can move what noise is added to.

    The rounds together are one Gaussian mechanism with mu = sqrt(T) / z, so this is exact: the epsilon at which
    Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu) is delta, rounded up.
    source: Balle & Wang 2018, ICML, Theorem 8; Dong, Roth & Su 2022, JRSS B, Corollary 3.3 (composition)
    """
    if rounds == 0:
        return 0.0
    mu = sqrt(rounds) / noise
    low, high = 0.0, mu * mu / 2 + mu * sqrt(2 * log(1 / delta))  # a bound by Renyi's divergence: Mironov 2017, CSF
    if _gaussian_delta(mu, low) <= delta:
        return low
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _gaussian_delta(mu, middle) > delta else (low, middle)
    return high


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """exp(epsilon) Phi(-a) is exp(-b^2 / 2) erfcx(a / sqrt(2)) / 2, in which nothing overflows; a - b = mu."""
    a, b = epsilon / mu + mu / 2, epsilon / mu - mu / 2
    scaled = float(torch.special.erfcx(torch.tensor(a / sqrt(2), dtype=torch.float64)))
    return (erfc(b / sqrt(2)) - exp(-b * b / 2) * scaled) / 2


@lru_cache(maxsize=4096)
def sampled_gaussian_epsilon(noise: float, rate: float, rounds: int, delta: float, accountant: str = PLD) -> float:
    """Epsilon where a device takes part in each of so many rounds with probability `rate`, by a coin of its own that
    nobody sees. accountant: "pld" or "rdp", the looser one. Raises AttachError without dp-accounting.

    source: Mironov et al. 2019 (RDP of the sampled Gaussian mechanism); Koskela et al. 2020, AISTATS, and Doroshenko
            et al. 2022, PoPETs (PLD)
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
            "What versions tell of a device that was drawn by a coin is counted by dp-accounting, which is not "
            "installed. Install it: pip install 'gossamer[dp]'; or write sampling=\"fixed\", whose bound needs nothing "
            "and is larger."
        ) from error


def renyi_epsilon(
    divergence: Callable[[float], float], delta: float, orders: Sequence[float] = ORDERS, distance: float = 0.0
) -> float:
    """The least epsilon that follows from a divergence at each order.

    distance: total variation between what is drawn and what the divergence is of, on either side: it costs
    (1 + exp(epsilon)) times itself of delta. source: Canonne, Kamath & Steinke 2020, NeurIPS, Proposition 12; Balle et
    al. 2020, AISTATS
    """
    divergences = [divergence(order) for order in orders]
    epsilon = 0.0
    while True:  # it only grows, up to the least that pays for the distance, too
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
    """Of a sum of integers plus Skellam noise of such a variance, of which a device moves at most `norm` (Euclidean)
    and `norm1` (sum of absolute values). source: Agarwal et al. 2021, NeurIPS, Corollary 4.1"""
    beyond = ((2 * order - 1) * norm**2 + 6 * norm1) / (4 * variance**2)
    return order * norm**2 / (2 * variance) + min(beyond, 3 * norm1 / (2 * variance))


def discrete_gaussian_divergence(
    order: float, norm: float, norm1: float, variance: float, devices: int, entries: int
) -> float:
    """Of a sum of integers to which each of so many devices added its share of discrete Gaussian noise, `variance` in
    all. A sum of these is not quite one itself: `gap` bounds by how much. source: Kairouz et al. 2021, ICML, Prop. 14
    """
    share = variance / devices
    gap = 10 * sum(exp(-2 * pi**2 * share * count / (count + 1)) for count in range(1, devices))
    moved, moved1 = norm / sqrt(variance), norm1 / sqrt(variance)
    return min(
        order / 2 * moved**2 + gap * entries,
        order / 2 * (moved**2 + 2 * moved1 * gap + gap**2 * entries),
        order / 2 * (moved + sqrt(entries) * gap) ** 2,
    )
