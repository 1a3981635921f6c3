"""Thresholds: rates and round trips of a network at which another recipe would be first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import sqrt

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.network import Network
from gossamer.comm.network.model import Host, Path
from gossamer.plan.advise.prices import Prediction, StepPricer

FACTORS = tuple(10 ** (exponent / 2) for exponent in range(-4, 5))  # 0.01 to 100, two per power of ten
ROUND_TRIPS = tuple(10 ** (exponent / 2) for exponent in range(-8, 1))  # 0.1 ms to 1 s
AS_NEAR = 1.1  # ratio of the two values around a threshold


@dataclass(frozen=True, kw_only=True)
class LeadRange:
    """A range of one property of the network, and the recipe expected to be first in it."""

    of: str  # "rate" or "round trip"
    recipe: str
    above: float  # bits per second of the slowest link, or seconds of the longest path; 0 for no lower end
    below: float | None  # None for no upper end


def thresholds(
    finalists: Sequence[Prediction],
    pricer: StepPricer,
    network: Network,
    *,
    expected_steps: Sequence[float] | None = None,
) -> list[LeadRange]:
    """Ranges of the rate (0.01 to 100 times that of all links) and of the round trip, each in ascending order, with the
    recipe expected to reach a loss first. Other properties of the network are constant.

    expected_steps: steps of each finalist to a loss, relative to Dense()'s, as measured by a race; None for priors.
    """
    steps = [each.expected_steps for each in finalists] if expected_steps is None else expected_steps
    there = network.among(range(pricer.workers))

    @cache
    def first(changed: Callable[[Network, float], Network], value: float) -> str:
        """The best recipe for this value of the property."""
        at = changed(there, value)
        seconds = [
            pricer.seconds(resolve(each.recipe, pricer.workers), at) * needed
            for each, needed in zip(finalists, steps, strict=True)
        ]
        return finalists[seconds.index(min(seconds))].recipe

    slowest = slowest_bits_per_second(there)
    rates = ranges([factor * slowest for factor in FACTORS], lambda value: first(with_rate, value))
    trips = ranges(ROUND_TRIPS, lambda value: first(with_round_trip, value))
    return [
        LeadRange(of=of, recipe=recipe, above=above, below=below)
        for of, found in (("rate", rates), ("round trip", trips))
        for recipe, above, below in found
    ]


def ranges(values: Sequence[float], first: Callable[[float], str]) -> list[tuple[str, float, float | None]]:
    """(recipe, from, to) along ascending positive values, with bisection between values with different answers.

    A recipe that is first only between two neighboring values may be missed.
    """
    answers = [first(value) for value in values]
    found: list[tuple[str, float, float | None]] = []
    above = 0.0
    for (low, high), (before, after) in zip(pairwise(values), pairwise(answers), strict=True):
        for who, edge in _edges(low, high, before, after, first):
            found.append((who, above, edge))
            above = edge
    return [*found, (answers[-1], above, None)]


def _edges(low: float, high: float, before: str, after: str, first: Callable[[float], str]) -> list[tuple[str, float]]:
    """(recipe below the edge, edge) of every change between two values."""
    if before == after:
        return []
    middle = sqrt(low * high)
    if high / low <= AS_NEAR:
        return [(before, middle)]
    between = first(middle)
    return [*_edges(low, middle, before, between, first), *_edges(middle, high, between, after, first)]


# -- networks that differ in one property ------------------------------------------------------------------------------


def slowest_bits_per_second(network: Network) -> float:
    """Minimum of all links, of hosts, relays and shared ones."""
    machines = (*network.hosts, *network.relays)
    lines = [rate for host in machines for rate in (host.up_bits_per_second, host.down_bits_per_second)]
    return min([*lines, *(path.bits_per_second for path in network.paths.values() if path.bits_per_second)])


def longest_round_trip_seconds(network: Network) -> float:
    """Maximum of all paths, of which those by a relay have two legs."""
    relayed = [network.path(*pair) for pair in network.relayed]
    return max(path.round_trip_seconds for path in (network.default, *network.paths.values(), *relayed))


def with_rate(network: Network, bits_per_second: float) -> Network:
    """The network with all links scaled so that the slowest has this rate."""
    factor = bits_per_second / slowest_bits_per_second(network)

    def faster(machines: tuple[Host, ...]) -> tuple[Host, ...]:
        return tuple(
            replace(
                each,
                up_bits_per_second=factor * each.up_bits_per_second,
                down_bits_per_second=factor * each.down_bits_per_second,
            )
            for each in machines
        )

    def scaled(path: Path) -> Path:
        return replace(path, bits_per_second=factor * path.bits_per_second) if path.bits_per_second else path

    paths = {ends: scaled(path) for ends, path in network.paths.items()}
    return replace(network, hosts=faster(network.hosts), relays=faster(network.relays), paths=paths)


def with_round_trip(network: Network, seconds: float) -> Network:
    """The network with all round trips scaled so that the longest is `seconds`; if all are 0, with this one."""
    longest = longest_round_trip_seconds(network)

    def scaled(path: Path) -> Path:
        return replace(path, round_trip_seconds=path.round_trip_seconds * seconds / longest if longest else seconds)

    paths = {ends: scaled(path) for ends, path in network.paths.items()}
    return replace(network, default=scaled(network.default), paths=paths)
