"""Pareto front: what nothing else beats for as little."""

from collections.abc import Callable, Iterable
from math import inf
from typing import TypeVar

Item = TypeVar("Item")


def front(items: Iterable[Item], *, cost: Callable[[Item], float], loss: Callable[[Item], float]) -> list[Item]:
    """Those that lose less than all that cost as much or less, from the cheapest on; of equals, the first."""
    found: list[Item] = []
    least = inf
    for each in sorted(items, key=lambda item: (cost(item), loss(item))):
        if loss(each) < least:
            least = loss(each)
            found.append(each)
    return found
