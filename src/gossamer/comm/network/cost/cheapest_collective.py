"""Collective selection by cost: the fastest all-reduce algorithm for a tensor on a network."""

from __future__ import annotations

from collections import defaultdict
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
    HubAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.comm.network.cost.message_schedule import CHUNK_BYTES, Moves, table_moves
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

SUMMED_BYTES = 4  # smallest element size that may be summed at intermediate hops; smaller ones are summed by one owner
LONG_SECONDS = 0.005  # above this round trip, loss and jitter may limit a stream below the bandwidth of its line
SECOND_MESSAGE_BYTES = 256  # upper bound for the overhead of a second message
MOST_PLAYED = 32  # up to this many equal ranks, the messages of all are simulated; above, those of one

RequestedCollective = Collective | str  # an algorithm, "auto", or a name in COLLECTIVES


def chosen_on_uniform_links(
    requested: RequestedCollective, nbytes: int, itemsize: int, network: UniformNetwork, tcp: Tcp = ETHERNET
) -> Collective:
    """Return the requested algorithm on a uniform network of any size."""
    if requested == "auto" and itemsize >= SUMMED_BYTES:
        return fastest_alike(nbytes, itemsize, network, tcp)
    pair = Network(hosts=(network.host,) * min(2, network.world), default=network.path)
    return chosen_collective(requested, nbytes, itemsize, pair, tcp)


def chosen_collective(
    requested: RequestedCollective, nbytes: int, itemsize: int, network: Network, tcp: Tcp = ETHERNET
) -> Collective:
    """Return the requested algorithm: "auto" selects the fastest.

    Half precision uses Direct, or a hub that relays for others: each owner sums in float32 and rounds once, by rank, so
    both have equal bits. A ring follows fast links. "hierarchical(4)" has nodes of four consecutive ranks; without a
    number, nodes are as large as the first site. The hub is the first rank that relays for others, or else the one with
    the fastest line.
    """
    if itemsize < SUMMED_BYTES:
        return _rounded_once(requested, nbytes, itemsize, network, tcp)
    if isinstance(requested, Collective):
        return requested
    name, _, node = requested.partition("(")
    require(
        name in ("auto", *COLLECTIVES),
        f"cannot compute the cost of collective {requested!r}: use auto, or one of {', '.join(COLLECTIVES)}",
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
        case HubAllReduce.name:
            return HubAllReduce(hub=_hub(network))
        case _:
            return COLLECTIVES[name]()


def _rounded_once(requested: RequestedCollective, nbytes: int, itemsize: int, network: Network, tcp: Tcp) -> Collective:
    """Return the algorithm for elements that may be summed by one owner only."""
    if requested == HubAllReduce.name:
        return HubAllReduce(hub=_hub(network))
    if isinstance(requested, HubAllReduce):
        return requested
    hubs = [HubAllReduce(hub=hub) for hub in network.hubs] if requested == "auto" else []
    return fastest(nbytes, itemsize, network, [DirectAllReduce(), *hubs], tcp) if hubs else DirectAllReduce()


def fastest(
    nbytes: int,
    itemsize: int,
    network: Network,
    among: Sequence[Collective] | None = None,
    tcp: Tcp = ETHERNET,
) -> Collective:
    """Return the algorithm with the fastest sum.

    Of several equally fast algorithms, the one in which a rank sends to the fewest peers is chosen: steady streams do
    not queue at a switch. With long round trips it is the one with the most peers: while one of many streams recovers
    from a loss, the others keep the line busy.

    Args:
        nbytes: Size of the tensor.
        itemsize: Bytes of an element.
        network: The network. All ranks must pass the same one, so that they choose the same algorithm.
        among: Algorithms to compare; None for `candidates(network)`.
        tcp: Parameters of TCP.
    """
    if len(network.hosts) == 1:
        return DirectAllReduce()
    if among is None and is_alike(network):
        return fastest_alike(nbytes, itemsize, UniformNetwork.of(network), tcp)
    if among is None and _is_direct_pair(nbytes, network):
        return DirectAllReduce()
    found = candidates(network) if among is None else tuple(among)
    paths, relayed = frozenset(network.paths.items()), frozenset(network.relayed.items())
    return _fastest(nbytes, itemsize, network.hosts, network.default, paths, network.relays, relayed, found, tcp)


def _is_direct_pair(nbytes: int, network: Network) -> bool:
    """Whether there are two ranks for which `direct` is the fastest without a simulation.

    There, `halving` and `ring` are the same table. `tree` sends all bytes in one direction and then in the other, while
    `direct` sends half of them in both directions at once, twice. So `direct` only loses the overhead of its second
    message on the slower line: headers of about 100 bytes. It wins if all bytes take longer than that on the faster
    line.
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
    relays: tuple[Host, ...],
    relayed: frozenset[tuple[frozenset[int], int]],
    among: tuple[Collective, ...],
    tcp: Tcp,
) -> Collective:
    network = Network(hosts=hosts, default=default, paths=dict(paths), relays=relays, relayed=dict(relayed))
    prices = {each: table_seconds(each, nbytes, itemsize, network, tcp) for each in among}
    return _of_equals(prices, len(hosts), _is_long(network))


def _of_equals(prices: Mapping[Collective, float], world: int, long: bool) -> Collective:
    best, sign = min(prices.values()), -1 if long else 1
    equals = (each for each in prices if prices[each] <= AS_FAST * best)
    return min(equals, key=lambda each: sign * most_others(each, world))


def is_alike(network: Network) -> bool:
    """Whether the messages of one rank determine the cost, and there are too many ranks to simulate all."""
    return len(network.hosts) > MOST_PLAYED and network.is_uniform


@lru_cache(maxsize=1024)
def fastest_alike(nbytes: int, itemsize: int, network: UniformNetwork, tcp: Tcp = ETHERNET) -> Collective:
    """Return the fastest algorithm on a uniform network of any size."""
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
    """Return the time of a sum that all ranks begin at once, in steady state with a pause before each."""
    world = len(network.hosts)

    def moves() -> list[list[Moves]]:
        return [table_moves(collective, rank, world, nbytes // itemsize, itemsize) for rank in range(world)]

    return rested_seconds(moves, network, tcp, rest_seconds)


def rested_seconds(
    moves: Callable[[], list[list[Moves]]], network: Network, tcp: Tcp = ETHERNET, rest_seconds: float = REST_SECONDS
) -> float:
    """Return the steady-state time of these moves, which all ranks begin at once, with a pause before each."""
    wires, begin, before = Wires(network, tcp), 0.0, inf
    for _ in range(MOST_MEANS):
        end = max(wires.run(moves(), [begin] * wires.world))
        seconds, begin = end - begin, end + rest_seconds
        if before / AS_FAST <= seconds <= before * AS_FAST:
            break
        before = seconds
    return seconds


def most_others(collective: Collective, world: int) -> int:
    """Return the largest number of peers to which a rank sends."""
    tables = (collective.hops(rank, world) for rank in collective.unlike(world))
    return max(len({hop.peer for hop in table if hop.does is Does.SEND}) for table in tables)


def candidates(network: Network) -> tuple[Collective, ...]:
    """Return the algorithms to compare on a network, the simplest first."""
    per_node = ranks_per_site(network)
    nodes = (HierarchicalAllReduce(per_node=per_node),) if per_node else ()
    hubs = (HubAllReduce(hub=hub) for hub in network.hubs)
    return (
        DirectAllReduce(),
        HalvingDoubling(),
        RingAllReduce(order=order_of(network)),
        *nodes,
        TreeAllReduce(),
        *hubs,
    )


def order_of(network: Network) -> tuple[int, ...] | None:
    """Return a ring order of fast links: each rank is followed by the nearest remaining one. None: ascending ranks."""
    here, left, order = 0, set(range(1, len(network.hosts))), [0]
    while left:
        here = min(left, key=lambda peer: (*_distance(network, here, peer), peer))
        left.remove(here)
        order.append(here)
    return None if order == sorted(order) else tuple(order)


def _distance(network: Network, sender: int, receiver: int) -> tuple[float, float]:
    return network.path(sender, receiver).round_trip_seconds, -network.bits_per_second(sender, receiver)


def ranks_per_site(network: Network) -> int:
    """Return the number of consecutive ranks per site (the last may have fewer); 0 if it varies or is trivial."""
    first, *others = (len(list(ranks)) for _, ranks in groupby(host.site for host in network.hosts))
    alike = all(size == first for size in others[:-1]) and others[-1:] <= [first]
    return first if alike and others and first > 1 else 0


def _first_site(network: Network) -> int:
    """Return the number of leading ranks on the first rank's site."""
    _, first = next(groupby(host.site for host in network.hosts))
    return len(list(first))


def _hub(network: Network) -> int:
    """Return the first rank that relays for others, or else the first one with the fastest line."""
    if network.hubs:
        return network.hubs[0]
    lines = [min(host.up_bits_per_second, host.down_bits_per_second) for host in network.hosts]
    return lines.index(max(lines))


# -- all-gathers and broadcasts by a hub -------------------------------------------------------------------------------

Flows = Mapping[tuple[int, int], float]  # bytes by (sender, receiver)
HUB_PREFERENCE = 1.1  # its round trips are shorter, so TCP's windows open sooner, and it leaves uploads to others


def gathering_hub(sizes: Sequence[int], network: Network, tcp: Tcp = ETHERNET) -> int | None:
    """Return the rank by which an all-gather is about as fast as directly, or faster; None without one.

    sizes: bytes of each rank's payload. Only ranks that relay for others are considered.
    """
    if not network.hubs:
        return None
    ranks, total = range(len(sizes)), sum(sizes)
    direct = _flow_seconds([{(a, b): sizes[a] for a in ranks for b in ranks if a != b}], network, tcp)

    def by_hub(hub: int) -> float:
        to_hub = {(rank, hub): sizes[rank] for rank in ranks if rank != hub}
        from_hub = {(hub, rank): total - sizes[rank] for rank in ranks if rank != hub}
        return _flow_seconds([to_hub, from_hub], network, tcp)

    return _faster_hub(by_hub, direct, network)


def broadcasting_hub(nbytes: int, source: int, network: Network, tcp: Tcp = ETHERNET) -> int | None:
    """Return the rank by which a broadcast is about as fast as by `Broadcast`, or faster; None without one."""
    if not network.hubs:
        return None
    rest = [rank for rank in range(len(network.hosts)) if rank != source]
    part = nbytes / max(1, len(rest))
    scatter, collect = {(source, rank): part for rank in rest}, {(a, b): part for a in rest for b in rest if a != b}
    direct = _flow_seconds([scatter, collect], network, tcp)

    def by_hub(hub: int) -> float:
        first = {(source, hub): nbytes} if hub != source else {}
        return _flow_seconds([first, {(hub, rank): nbytes for rank in rest if rank != hub}], network, tcp)

    return _faster_hub(by_hub, direct, network)


def _faster_hub(by_hub: Callable[[int], float], direct: float, network: Network) -> int | None:
    """Return the hub with the lowest cost; None if it is clearly slower than directly."""
    prices = {hub: by_hub(hub) for hub in network.hubs}
    best = min(prices, key=lambda hub: prices[hub])
    return best if prices[best] <= HUB_PREFERENCE * direct else None


def _flow_seconds(rounds: Sequence[Flows], network: Network, tcp: Tcp) -> float:
    """Return the least time of messages in rounds, of which each piece passes all: that of the busiest line, with all
    rounds at once, and the latency of each round. A rank passes a piece on once it has it."""
    busy, latency = defaultdict[tuple[str, int], float](float), 0.0
    for number, flows in enumerate(rounds):
        for (sender, receiver), nbytes in flows.items():
            bits, relay = 8 * tcp.wire_bytes(nbytes), network.relay(sender, receiver)
            for up in [sender] if relay is None else [sender, relay]:
                busy["up", up] += bits / network.line(up).up_bits_per_second
            for down in [receiver] if relay is None else [relay, receiver]:
                busy["down", down] += bits / network.line(down).down_bits_per_second
        last = number == len(rounds) - 1
        latency += max((_piece_seconds(flow, 0 if last else flows[flow], network, tcp) for flow in flows), default=0.0)
    return max(busy.values(), default=0.0) + latency


def _piece_seconds(flow: tuple[int, int], nbytes: float, network: Network, tcp: Tcp) -> float:
    """Return the latency of a path, and the time of one piece of a message of `nbytes` on it."""
    path = network.path(*flow)
    bits = 8 * tcp.wire_bytes(min(nbytes, CHUNK_BYTES))
    return path.round_trip_seconds / 2 + path.jitter_seconds + bits / network.bits_per_second(*flow)
