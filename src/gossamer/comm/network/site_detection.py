"""Site detection: builds a network from measured round trips and bandwidths; nearby hosts form one site."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations, pairwise
from math import isfinite
from statistics import median

from gossamer.comm.network.model import Host, Network, Path
from gossamer.errors import require

FAR_APART = 4.0  # least ratio between the distance of two sites and the longest link within a site
NOISE_SECONDS = 1e-4  # shorter round trips are dominated by the machine and do not separate sites


def measured(
    round_trips: Sequence[Sequence[float]],
    up: Sequence[float],
    down: Sequence[float],
    losses: Sequence[Sequence[float]] | None = None,
    shared: Sequence[Sequence[float]] | None = None,
    relayed: Collection[frozenset[int]] = (),
) -> Network:
    """Build a network from measurements.

    Both directions of a pair measure the same path, so the shorter round trip is used. A path has the median of its
    pairs, without relayed ones if there are others.

    Args:
        round_trips: [i][j]: seconds between hosts i and j.
        up: Upload bandwidth of each host in bits per second.
        down: Download bandwidth of each host in bits per second.
        losses: [i][j]: fraction of packets lost; None for no loss.
        shared: [i][j]: bandwidth in bits per second of the line between the sites of i and j, 0 if unknown; None or
            empty if all are unknown.
        relayed: Pairs of hosts that a third host connects.
    """
    seconds = _symmetric(round_trips)
    sites = _sites(seconds)
    names = ["" if len(sites) == 1 else f"site {number}" for number in range(len(sites))]
    of = {host: name for name, site in zip(names, sites, strict=True) for host in site}
    found: dict[frozenset[str], list[tuple[int, int]]] = {}
    for a, b in combinations(range(len(seconds)), 2):
        found.setdefault(frozenset((of[a], of[b])), []).append((a, b))
    for pairs in found.values() if relayed else ():
        direct = [pair for pair in pairs if frozenset(pair) not in relayed]
        pairs[:] = direct or pairs
    paths = {
        ends: Path(
            round_trip_seconds=median(seconds[a][b] for a, b in pairs),
            loss=median(losses[a][b] for a, b in pairs) if losses else 0.0,
            bits_per_second=_of_shared_line(ends, [shared[a][b] for a, b in pairs] if shared else ()),
        )
        for ends, pairs in found.items()
    }
    hosts = tuple(
        Host(site=of[host], up_bits_per_second=up[host], down_bits_per_second=down[host])
        for host in range(len(seconds))
    )
    if len(sites) == 1:
        return Network(hosts=hosts, default=paths.get(frozenset(("",)), Path()))
    return Network(hosts=hosts, paths=paths)


def _of_shared_line(ends: frozenset[str], rates: Sequence[float]) -> float | None:
    """Return the bandwidth of the line between two sites; None within a site, where it is not measured."""
    known = [rate for rate in rates if rate > 0]
    return median(known) if known and len(ends) == 2 else None


def sites_of(round_trips: Sequence[Sequence[float]]) -> list[list[int]]:
    """Group hosts by site; hosts ascending, and sites ordered by their first host.

    Hosts are joined to their nearest neighbors, until the next link is more than 4 times as long. The joined groups
    are the sites.
    """
    return _sites(_symmetric(round_trips))


def _symmetric(round_trips: Sequence[Sequence[float]]) -> list[list[float]]:
    world = len(round_trips)
    require(
        world > 0 and all(len(row) == world for row in round_trips),
        f"round_trips must be a square matrix over all hosts, got rows of length {list(map(len, round_trips))}",
    )
    bad = [(a, b) for a in range(world) for b in range(world) if not _sound(round_trips[a][b]) and a != b]
    require(not bad, f"round trips must be finite and at least 0 seconds; invalid between {bad}. Measure them again")
    return [[min(round_trips[a][b], round_trips[b][a]) for b in range(world)] for a in range(world)]


def _sound(seconds: float) -> bool:
    return isfinite(seconds) and seconds >= 0


def _sites(seconds: Sequence[Sequence[float]]) -> list[list[int]]:
    """Single linkage, cut at the largest ratio of consecutive distances.

    source: Gower & Ross 1969, JRSS C (single linkage follows the edges of a minimum spanning tree, by length)
    """
    edges = _spanning_tree(seconds)
    jumps = [(far / near, place) for place, (near, far) in enumerate(pairwise(length for length, _, _ in edges))]
    most, place = max(jumps, default=(1.0, 0))
    near = edges[: place + 1] if most > FAR_APART else edges
    sites = {host: [host] for host in range(len(seconds))}
    for _, a, b in near:
        if sites[a] is not sites[b]:
            sites[a].extend(sites[b])
            for host in sites[b]:
                sites[host] = sites[a]
    return sorted(sorted(site) for host, site in sites.items() if host == min(site))


def _spanning_tree(seconds: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """Return the edges (length, host, host) of a minimum spanning tree, shortest first. Prim 1957."""
    left, edges = set(range(1, len(seconds))), []
    inside = {0}
    while left:
        near = min((max(seconds[a][b], NOISE_SECONDS), a, b) for a in inside for b in left)
        edges.append(near)
        inside.add(near[2])
        left.remove(near[2])
    return sorted(edges)
