"""Wait-for graph: from who waits for whom, who is waited for in the end.

0 -> 2 -> 3        3 waits for nobody: the root, whatever the others wait for
1 -> 2
0 -> 1 -> 0        a cycle that nobody leads out of: all of its ranks
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WaitRoots:
    """ranks: who is waited for in the end; in_cycle: they wait for each other, and for nobody else."""

    ranks: tuple[int, ...]
    in_cycle: bool


def roots(waits_for: Mapping[int, Collection[int]]) -> WaitRoots:
    """waits_for: by rank that waits, whom. A rank that is no key, or waits for nobody, goes on by itself.

    law:    every rank that waits leads to a root, or the roots are a cycle; and with no root that goes on by itself,
            the smallest set of ranks that wait for none but each other is named
    """
    free = {peer for peers in waits_for.values() for peer in peers if not waits_for.get(peer)}
    if free:
        return WaitRoots(tuple(sorted(free)), in_cycle=False)
    closures = [_reached(rank, waits_for) for rank in waits_for if waits_for[rank]]
    least = min(closures, key=lambda closure: (len(closure), sorted(closure)), default=frozenset[int]())
    return WaitRoots(tuple(sorted(least)), in_cycle=bool(least))


def _reached(rank: int, waits_for: Mapping[int, Collection[int]]) -> frozenset[int]:
    """All whom a rank waits for, directly or by others."""
    seen: set[int] = set()
    following = list(waits_for[rank])
    while following:
        peer = following.pop()
        if peer not in seen:
            seen.add(peer)
            following.extend(waits_for.get(peer, ()))
    return frozenset(seen)
