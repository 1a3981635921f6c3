"""Which collective is the fastest on a network, for a tensor of so many bytes: by price, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from math import inf

from gossamer.collectives import COLLECTIVES, Collective, Direct, Does, HalvingDoubling, Hierarchical, Ring, Tree
from gossamer.errors import require
from gossamer.network.collectives import table_moves
from gossamer.network.link import Host, Network, Path
from gossamer.network.tcp import ETHERNET, Tcp
from gossamer.network.wires import Wires

SUMMED_BYTES = 4  # of an element at least, where sums may be taken on the way; smaller ones are summed by their owner
AS_FAST = 1.001  # times the best price is the same price


def fastest(
    nbytes: int,
    itemsize: int,
    network: Network,
    candidates: Sequence[Collective] | None = None,
    tcp: Tcp = ETHERNET,
) -> Collective:
    """What sums a tensor of `nbytes` bytes soonest; of several, the one that sends the fewest messages.

    Half precision always goes Direct: its owner sums in float32, and rounds once.
    candidates: None for `candidates(network)`. All ranks must use the same collective: it follows from nothing but the
    arguments, so that ranks that have measured their network must agree on one measurement first.
    """
    if itemsize < SUMMED_BYTES or len(network.hosts) == 1:
        return Direct()
    found = None if candidates is None else tuple(candidates)
    return _fastest(nbytes, itemsize, network.hosts, network.default, frozenset(network.paths.items()), found, tcp)


def wished(wish: str, nbytes: int, itemsize: int, network: Network, tcp: Tcp = ETHERNET) -> Collective:
    """What sums a tensor where somebody asked for "auto", or for a collective by its name in COLLECTIVES.

    A ring follows fast links. "hierarchical(4)" has nodes of four neighbouring ranks; without a number nodes are as
    large as the first site.
    """
    name, _, node = wish.partition("(")
    require(
        name in ("auto", *COLLECTIVES),
        f"{wish!r} is no collective that could be priced: write auto, or one of {', '.join(COLLECTIVES)}",
    )
    match name:
        case "auto":
            return fastest(nbytes, itemsize, network, tcp=tcp)
        case Ring.name:
            return Ring(order=order_of(network))
        case Hierarchical.name:
            return Hierarchical(per_node=int(node.removesuffix(")")) if node else _first_site(network))
        case _:
            return COLLECTIVES[name]()


@lru_cache(maxsize=1024)
def _fastest(
    nbytes: int,
    itemsize: int,
    hosts: tuple[Host, ...],
    default: Path,
    paths: frozenset[tuple[frozenset[str], Path]],
    among: tuple[Collective, ...] | None,
    tcp: Tcp,
) -> Collective:
    network = Network(hosts=hosts, default=default, paths=dict(paths))
    prices = {
        each: table_seconds(each, nbytes, itemsize, network, tcp)
        for each in (candidates(network) if among is None else among)
    }
    best = min(prices.values())
    return min((each for each in prices if prices[each] <= AS_FAST * best), key=lambda each: messages(each, len(hosts)))


def table_seconds(collective: Collective, nbytes: int, itemsize: int, network: Network, tcp: Tcp = ETHERNET) -> float:
    """How long a sum takes when all ranks begin at once, over connections that have carried as much before."""
    world = len(network.hosts)
    moves = [table_moves(collective, rank, world, nbytes // itemsize, itemsize) for rank in range(world)]
    return max(Wires(network, tcp, window_bytes=inf).run(moves, [0.0] * world))


def messages(collective: Collective, world: int) -> int:
    """How many all ranks send together, where each is short enough to go in one."""
    tables = (collective.hops(rank, world) for rank in range(world))
    return sum(hop.does is Does.SEND for table in tables for hop in table)


def candidates(network: Network) -> tuple[Collective, ...]:
    """What is worth a price on a network; the simplest first."""
    per_node = sites_of(network)
    nodes = (Hierarchical(per_node=per_node),) if per_node else ()
    return (Direct(), HalvingDoubling(), Ring(order=order_of(network)), *nodes, Tree())


def order_of(network: Network) -> tuple[int, ...] | None:
    """The ranks along a ring of fast links: from each to the nearest that is left. None: by rank."""
    here, left, order = 0, set(range(1, len(network.hosts))), [0]
    while left:
        here = min(left, key=lambda peer: (*_distance(network, here, peer), peer))
        left.remove(here)
        order.append(here)
    return None if order == sorted(order) else tuple(order)


def _distance(network: Network, sender: int, receiver: int) -> tuple[float, float]:
    return network.path(sender, receiver).round_trip_seconds, -network.bits_per_second(sender, receiver)


def sites_of(network: Network) -> int:
    """How many neighbouring ranks each share a site, the last ones perhaps fewer; 0 where that is not so, or no use."""
    first, *others = (len(list(ranks)) for _, ranks in groupby(host.site for host in network.hosts))
    alike = all(size == first for size in others[:-1]) and others[-1:] <= [first]
    return first if alike and others and first > 1 else 0


def _first_site(network: Network) -> int:
    """How many ranks come before the first that is elsewhere than the first one."""
    _, first = next(groupby(host.site for host in network.hosts))
    return len(list(first))
