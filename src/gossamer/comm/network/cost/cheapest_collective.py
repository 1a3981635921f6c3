"""Collective selection by price: which collective is the fastest for a tensor of so many bytes on a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, groupby
from math import inf

from gossamer.algorithms.collectives import (
    COLLECTIVES,
    Collective,
    DirectAllReduce,
    Does,
    HalvingDoubling,
    HierarchicalAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.comm.network.cost.message_schedule import Moves, table_moves
from gossamer.comm.network.cost.message_simulator import Wires
from gossamer.comm.network.cost.representative_cost import (
    AS_FAST,
    MOST_MEANS,
    REST_SECONDS,
    UniformNetwork,
    table_seconds_alike,
)
from gossamer.comm.network.model import Host, Network, Path
from gossamer.comm.network.tcp_model import ETHERNET, Tcp
from gossamer.errors import require

SUMMED_BYTES = 4  # of an element at least, where sums may be taken on the way; smaller ones are summed by their owner
LONG_SECONDS = 0.005  # of a round trip, beyond which loss and jitter may hold a stream below what its line carries
SECOND_MESSAGE_BYTES = 256  # more than a second message adds to a line
MOST_PLAYED = 32  # ranks of which every one's messages are played where all do alike; of more, one's

Wish = Collective | str  # a table, "auto", or a name in COLLECTIVES


def wished_alike(wish: Wish, nbytes: int, itemsize: int, network: UniformNetwork, tcp: Tcp = ETHERNET) -> Collective:
    """The collective of a wish where all hosts are alike, whatever their number."""
    if wish == "auto" and itemsize >= SUMMED_BYTES:
        return fastest_alike(nbytes, itemsize, network, tcp)
    pair = Network(hosts=(network.host,) * min(2, network.world), default=network.path)
    return wished(wish, nbytes, itemsize, pair, tcp)


def wished(wish: Wish, nbytes: int, itemsize: int, network: Network, tcp: Tcp = ETHERNET) -> Collective:
    """The collective of a wish: "auto", the name of a collective in COLLECTIVES, or a table.

    Half precision goes Direct whatever is asked for: its owner sums in float32, and rounds once.
    A ring follows fast links. "hierarchical(4)" has nodes of four consecutive ranks; without a number nodes are as
    large as the first site.
    """
    if itemsize < SUMMED_BYTES:
        return DirectAllReduce()
    if isinstance(wish, Collective):
        return wish
    name, _, node = wish.partition("(")
    require(
        name in ("auto", *COLLECTIVES),
        f"{wish!r} is no collective that could be priced: write auto, or one of {', '.join(COLLECTIVES)}",
    )
    match name:
        case "auto" if is_alike(network):
            return fastest_alike(nbytes, itemsize, UniformNetwork.of(network), tcp)
        case "auto":
            return fastest(nbytes, itemsize, network, tcp=tcp)
        case RingAllReduce.name:
            return RingAllReduce(order=order_of(network))
        case HierarchicalAllReduce.name:
            return HierarchicalAllReduce(per_node=int(node.removesuffix(")")) if node else _first_site(network))
        case _:
            return COLLECTIVES[name]()


def fastest(
    nbytes: int,
    itemsize: int,
    network: Network,
    among: Sequence[Collective] | None = None,
    tcp: Tcp = ETHERNET,
) -> Collective:
    """The collective that sums a tensor of `nbytes` bytes soonest.

    Of several, the one in which a rank sends to the fewest others: steady streams from one to one leave a switch
    nothing to queue. Where round trips are long it is the one in which a rank sends to the most: while one of many
    streams recovers from a loss, the others keep the line busy.
    among: None for `candidates(network)`. All ranks must use the same collective: it follows from nothing but the
    arguments, so that ranks that have measured their network must agree on one measurement first.
    """
    if len(network.hosts) == 1:
        return DirectAllReduce()
    if among is None and is_alike(network):
        return fastest_alike(nbytes, itemsize, UniformNetwork.of(network), tcp)
    if among is None and _is_direct_pair(nbytes, network):
        return DirectAllReduce()
    found = candidates(network) if among is None else tuple(among)
    return _fastest(nbytes, itemsize, network.hosts, network.default, frozenset(network.paths.items()), found, tcp)


def _is_direct_pair(nbytes: int, network: Network) -> bool:
    """Whether there are two ranks, between which `direct` is the fastest without a simulation.

    `halving` and `ring` are the same table there. `tree` sends all bytes in one direction and then in the other, while
    `direct` sends half of them in both directions at once, twice. So `direct` loses only what its second message adds
    on the slower line: headers of about 100 bytes. Where all bytes take longer on the faster line, it wins.
    """
    if len(network.hosts) != 2:
        return False
    slower, faster = sorted((network.bits_per_second(0, 1), network.bits_per_second(1, 0)))
    return slower == faster or nbytes * slower >= SECOND_MESSAGE_BYTES * faster


@lru_cache(maxsize=1024)
def _fastest(
    nbytes: int,
    itemsize: int,
    hosts: tuple[Host, ...],
    default: Path,
    paths: frozenset[tuple[frozenset[str], Path]],
    among: tuple[Collective, ...],
    tcp: Tcp,
) -> Collective:
    network = Network(hosts=hosts, default=default, paths=dict(paths))
    prices = {each: table_seconds(each, nbytes, itemsize, network, tcp) for each in among}
    return _of_equals(prices, len(hosts), _is_long(network))


def _of_equals(prices: Mapping[Collective, float], world: int, long: bool) -> Collective:
    best, sign = min(prices.values()), -1 if long else 1
    equals = (each for each in prices if prices[each] <= AS_FAST * best)
    return min(equals, key=lambda each: sign * most_others(each, world))


def is_alike(network: Network) -> bool:
    """Whether one rank's messages tell what a collective takes here, and there are too many to play all of them."""
    return len(network.hosts) > MOST_PLAYED and network.is_uniform


@lru_cache(maxsize=1024)
def fastest_alike(nbytes: int, itemsize: int, network: UniformNetwork, tcp: Tcp = ETHERNET) -> Collective:
    """The collective that sums a tensor soonest where all hosts are alike, whatever their number."""
    if network.world == 1:
        return DirectAllReduce()
    tables: tuple[Collective, ...] = (DirectAllReduce(), HalvingDoubling(), RingAllReduce(), TreeAllReduce())
    prices = {each: table_seconds_alike(each, nbytes, itemsize, network, tcp) for each in tables}
    return _of_equals(prices, network.world, network.path.round_trip_seconds > LONG_SECONDS)


def _is_long(network: Network) -> bool:
    pairs = combinations(range(len(network.hosts)), 2)
    return any(network.path(a, b).round_trip_seconds > LONG_SECONDS for a, b in pairs)


def table_seconds(
    collective: Collective,
    nbytes: int,
    itemsize: int,
    network: Network,
    tcp: Tcp = ETHERNET,
    rest_seconds: float = REST_SECONDS,
) -> float:
    """How long a sum takes when all ranks begin at once, as they have done before, each time after a rest."""
    world = len(network.hosts)

    def moves() -> list[list[Moves]]:
        return [table_moves(collective, rank, world, nbytes // itemsize, itemsize) for rank in range(world)]

    return rested_seconds(moves, network, tcp, rest_seconds)


def rested_seconds(
    moves: Callable[[], list[list[Moves]]], network: Network, tcp: Tcp = ETHERNET, rest_seconds: float = REST_SECONDS
) -> float:
    """What the same moves take in the end, all ranks beginning at once, again and again with a rest in between."""
    wires, begin, before = Wires(network, tcp), 0.0, inf
    for _ in range(MOST_MEANS):
        end = max(wires.run(moves(), [begin] * wires.world))
        seconds, begin = end - begin, end + rest_seconds
        if before / AS_FAST <= seconds <= before * AS_FAST:
            break
        before = seconds
    return seconds


def most_others(collective: Collective, world: int) -> int:
    """To how many others a rank sends, at most."""
    tables = (collective.hops(rank, world) for rank in collective.unlike(world))
    return max(len({hop.peer for hop in table if hop.does is Does.SEND}) for table in tables)


def candidates(network: Network) -> tuple[Collective, ...]:
    """The collectives worth a price on a network; the simplest first."""
    per_node = ranks_per_site(network)
    nodes = (HierarchicalAllReduce(per_node=per_node),) if per_node else ()
    return (DirectAllReduce(), HalvingDoubling(), RingAllReduce(order=order_of(network)), *nodes, TreeAllReduce())


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


def ranks_per_site(network: Network) -> int:
    """How many consecutive ranks each share a site, the last ones perhaps fewer; 0 where that is not so, or no use."""
    first, *others = (len(list(ranks)) for _, ranks in groupby(host.site for host in network.hosts))
    alike = all(size == first for size in others[:-1]) and others[-1:] <= [first]
    return first if alike and others and first > 1 else 0


def _first_site(network: Network) -> int:
    """How many ranks come before the first that is elsewhere than the first one."""
    _, first = next(groupby(host.site for host in network.hosts))
    return len(list(first))
