"""Mask graph: with whom each device of a cohort shares masks, and how many shares give a secret back."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from random import Random

from gossamer.base import rng

Neighbors = dict[int, tuple[int, ...]]  # by device, ascending


def mask_graph(members: Sequence[int], neighbors: int | None, key: int) -> Neighbors:
    """All others, or `neighbors` of them (one more where that is odd): the nearest on a ring in random order.

    members: ascending. The same for the same key, so that devices can see that the server follows it.
    source: Bell et al. 2020, CCS (a Harary graph over a random order)
    """
    reach = len(members) if neighbors is None else ceil(neighbors / 2)
    if 2 * reach >= len(members) - 1:
        return {each: tuple(other for other in members if other != each) for each in members}
    ring = list(members)
    Random(rng.address("secure graph", key)).shuffle(ring)
    count = len(ring)
    return {
        each: tuple(sorted(ring[(place + step) % count] for step in range(-reach, reach + 1) if step))
        for place, each in enumerate(ring)
    }


def shares_needed(threshold: float, holders: int) -> int:
    """How many of so many holders give a secret back: above a half, so that no two disjoint groups can."""
    return max(2, holders // 2 + 1, ceil(threshold * holders - 1e-9))
