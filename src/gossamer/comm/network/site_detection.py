"""Site detection: a network from measured round trips and rates, in which hosts near each other are one site."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import isfinite
from statistics import median

from gossamer.comm.network.model import Host, Network, Path
from gossamer.errors import require

FAR_APART = 4.0  # times the longest round trip to the nearest neighbor: at least so far apart are sites
NOISE_SECONDS = 1e-4  # round trips below are the machine's own doing, and tell no sites


def measured(
    round_trips: Sequence[Sequence[float]],
    up: Sequence[float],
    down: Sequence[float],
    losses: Sequence[Sequence[float]] | None = None,
    shared: Sequence[Sequence[float]] | None = None,
) -> Network:
    """The network whose hosts see `round_trips[i][j]` seconds between i and j, and `losses[i][j]` of packets lost.

    up, down: bits per second that each host sends and receives. losses: None where nothing is lost. shared: bits per
    second of the line between the sites of i and j, 0 where none is known; none are where it is empty.
    Both directions of a pair are measurements of the same path, of which the shorter counts. A path takes the median
    of its pairs.
    """
    seconds = _symmetric(round_trips)
    sites = _sites(seconds)
    names = ["" if len(sites) == 1 else f"site {number}" for number in range(len(sites))]
    of = {host: name for name, site in zip(names, sites, strict=True) for host in site}
    found: dict[frozenset[str], list[tuple[int, int]]] = {}
    for a, b in combinations(range(len(seconds)), 2):
        found.setdefault(frozenset((of[a], of[b])), []).append((a, b))
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
    """Only two sites share a line: what hosts of one of them share is not known by its rate."""
    known = [rate for rate in rates if rate > 0]
    return median(known) if known and len(ends) == 2 else None


def sites_of(round_trips: Sequence[Sequence[float]]) -> list[list[int]]:
    """Hosts by site, ascending, in the order of their first.

    Hosts are joined to their nearest ones until the next that would join is more than 4 times as far: what is joined
    then is a site.
    """
    return _sites(_symmetric(round_trips))


def _symmetric(round_trips: Sequence[Sequence[float]]) -> list[list[float]]:
    world = len(round_trips)
    require(
        world > 0 and all(len(row) == world for row in round_trips),
        f"round trips are a matrix with a row and a column for every host, not rows of {list(map(len, round_trips))}",
    )
    bad = [(a, b) for a in range(world) for b in range(world) if not _sound(round_trips[a][b]) and a != b]
    require(not bad, f"round trips are seconds, 0 or more; those between {bad} are not. Measure them again")
    return [[min(round_trips[a][b], round_trips[b][a]) for b in range(world)] for a in range(world)]


def _sound(seconds: float) -> bool:
    return isfinite(seconds) and seconds >= 0


def _sites(seconds: Sequence[Sequence[float]]) -> list[list[int]]:
    """Single linkage, cut where distances grow most.

    source: Gower & Ross 1969, JRSS C (what joins is the edges of a minimum spanning tree, by length)
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
    """Its edges (length, host, host), shortest first. Prim 1957."""
    left, edges = set(range(1, len(seconds))), []
    inside = {0}
    while left:
        near = min((max(seconds[a][b], NOISE_SECONDS), a, b) for a in inside for b in left)
        edges.append(near)
        inside.add(near[2])
        left.remove(near[2])
    return sorted(edges)
