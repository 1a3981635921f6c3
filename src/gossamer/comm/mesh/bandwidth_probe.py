"""Bandwidth probe: measures the upload and download bandwidth of each host with a few pairwise exchanges.

A pair measures the slower of two lines. Each host therefore meets two other hosts, and a host that still appears slow
meets one that is known to be faster, so that its own line is the bottleneck. A line that sites share is measured by all
of their hosts sending at once, and so is a relay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from gossamer.comm.network.tcp_model import ETHERNET

Flow = tuple[int, int]  # sender, receiver
Pair = tuple[int, int]
Meet = Callable[[Sequence[Flow], int], Mapping[Flow, float]]
"""Runs all flows at once, two messages of the given size each; returns the seconds between the arrivals of the two."""

FIRST_BYTES, MOST_BYTES, GROWTH = 2**14, 2**22, 3
LATER_BYTES = 2**17  # the most with which later pairs begin; they may be much slower than two workers of one machine
LONG_ENOUGH_SECONDS = 0.02  # the overhead of a message is negligible in a measurement of this length
TOO_LONG_SECONDS = 1.0  # concurrent flows that one of them would hold up for longer are long enough
LONG_ENOUGH_ROUND_TRIPS = 1.5  # a shorter transfer may measure the TCP window instead of the line
MORE_MEETINGS = 1  # for hosts that are unclear after the first two
MOST_APART = 8  # groups of pairs that share lines
ALIKE = 1.5  # rates within this factor count as equal
NOTHING_SECONDS = 1e-6


@dataclass
class Rates:
    """Bits per second that pairs measured, IP headers included."""

    world: int
    seen: dict[Flow, float] = field(default_factory=dict)

    def up(self, rank: int) -> float:
        """Highest upload rate measured from this rank; 0 if unknown."""
        return max((rate for (sender, _), rate in self.seen.items() if sender == rank), default=0.0)

    def down(self, rank: int) -> float:
        return max((rate for (_, receiver), rate in self.seen.items() if receiver == rank), default=0.0)

    def slowest(self, rank: int) -> float:
        return min(self.up(rank), self.down(rank))

    def is_clear(self, rank: int) -> bool:
        """Whether each of its lines is as fast as the fastest, or was measured against a faster line."""
        most = max(self.seen.values(), default=0.0)
        own = [(flow, rate) for flow, rate in self.seen.items() if rank in flow]
        up = any(rate * ALIKE < self.down(receiver) for (sender, receiver), rate in own if sender == rank)
        down = any(rate * ALIKE < self.up(sender) for (sender, receiver), rate in own if receiver == rank)
        return bool(own) and (up or self.up(rank) * ALIKE >= most) and (down or self.down(rank) * ALIKE >= most)


def find(
    sites: Sequence[Sequence[int]],
    round_trips: Sequence[Sequence[float]],
    meet: Meet,
    lines: Callable[[int, int], set[int]] | None = None,
    spokes: Sequence[Pair] = (),
) -> Rates:
    """Measure the upload and download rate of every host, as far as a single peer can saturate its line.

    Nearby hosts meet before distant ones. The number of meetings does not depend on the number of hosts, and each
    takes as long as its slowest pair.

    Args:
        sites: Hosts grouped by site.
        round_trips: Seconds between every two hosts.
        meet: Runs flows and times them.
        lines: Returns the hosts whose lines a pair loads, if pairs share relays. Pairs that share a line meet one after
            the other, unless they are too many.
        spokes: Hosts that relay, each with a host that it relays. They meet in the end if that host is still unclear.

    Returns:
        The measured rates.
    """
    rates, nbytes = Rates(len(round_trips)), FIRST_BYTES
    for meeting in range(2 + MORE_MEETINGS):
        pairs = first_pairs(sites, meeting) if meeting < 2 else next_pairs(rates, sites)
        for some in apart(pairs, lines) if lines is not None else [pairs]:
            if flows := [flow for a, b in some for flow in ((a, b), (b, a))]:
                seen, enough_bytes = see(flows, round_trips, meet, nbytes)
                rates.seen |= seen
                nbytes = min(enough_bytes, LATER_BYTES)
    unmet = [pair for pair in spokes if pair not in rates.seen and not rates.is_clear(pair[1])]
    for a, b in unmet[:MOST_APART]:
        rates.seen |= see([(a, b), (b, a)], round_trips, meet, nbytes)[0]
    return rates


def apart(pairs: Sequence[Pair], lines: Callable[[int, int], set[int]]) -> list[list[Pair]]:
    """Distribute pairs to at most MOST_APART groups, so that the pairs of a group share no line if possible."""
    groups: list[list[Pair]] = []
    for pair in pairs:
        loads = [sum(len(lines(*pair) & lines(*other)) for other in group) for group in groups]
        if len(groups) < MOST_APART and 0 not in loads:
            groups.append([pair])
        else:
            groups[loads.index(min(loads))].append(pair)
    return groups


def first_pairs(sites: Sequence[Sequence[int]], meeting: int) -> list[Pair]:
    """Pairs within sites: neighbors in meeting 0, next neighbors in meeting 1. Single hosts are paired."""
    groups = [*(site for site in sites if len(site) > 1), [host for site in sites if len(site) == 1 for host in site]]
    step = meeting + 1
    firsts = [(group, at) for group in groups for at in range(len(group) - step) if at % (2 * step) < step]
    return [(group[at], group[at + step]) for group, at in firsts]


def next_pairs(rates: Rates, sites: Sequence[Sequence[int]]) -> list[Pair]:
    """Pair each host with unclear lines with one that it has not met.

    Preferred are hosts that are clear and fast, then hosts in the same site. Hosts without any measurement, such as
    the last of five, choose first.
    """
    site_of = {host: number for number, site in enumerate(sites) for host in site}
    clear = {host for host in range(rates.world) if rates.is_clear(host)}
    left = sorted(range(rates.world), key=lambda host: (host not in clear, -rates.slowest(host)))
    pairs = []
    unclear = (host for host in range(rates.world) if host not in clear)
    for host in sorted(unclear, key=lambda host: rates.slowest(host) > 0):
        others = [other for other in left if other != host and (host, other) not in rates.seen]
        if host in left and others:
            other = min(others, key=lambda other: (other not in clear, site_of[other] != site_of[host]))
            left.remove(other)
            left.remove(host)
            pairs.append((host, other))
    return pairs


def see(
    flows: Sequence[Flow], round_trips: Sequence[Sequence[float]], meet: Meet, first_bytes: int
) -> tuple[dict[Flow, float], int]:
    """Measure concurrent flows with growing messages, each until it takes long enough.

    Returns:
        Bits per second by flow, and the message size that was sufficient for the first of them.
    """
    left, nbytes, found, enough_bytes = list(flows), first_bytes, dict[Flow, float](), MOST_BYTES
    while left:
        seconds = meet(left, nbytes)
        for flow in left:
            found[flow] = 8 * ETHERNET.wire_bytes(nbytes) / max(seconds[flow], NOTHING_SECONDS)
        more = [
            flow
            for flow in left
            if nbytes * GROWTH <= MOST_BYTES and seconds[flow] < _enough_seconds(flow, round_trips)
        ]
        if len(more) < len(left):
            enough_bytes = min(enough_bytes, nbytes)
        left, nbytes = more, nbytes * GROWTH
    return found, enough_bytes


def find_shared(
    sites: Sequence[Sequence[int]], round_trips: Sequence[Sequence[float]], meet: Meet
) -> dict[tuple[int, int], float]:
    """Measure lines that the hosts of two sites share.

    All hosts of both sites exchange data at once, then one pair alone. If the aggregate rate is much lower than the
    pair's rate times the number of pairs, a shared line is saturated. Each site meets one other site at a time.

    Returns:
        Bits per second by pair of site indices, the slower of the two directions. Pairs of sites without a detectable
        shared line are omitted.
    """
    found: dict[tuple[int, int], float] = {}
    for meeting in site_meetings([len(site) for site in sites]):
        parties = {pair: [*zip(sites[pair[0]], sites[pair[1]], strict=False)] for pair in meeting}
        flows = {pair: [flow for a, b in both for flow in ((a, b), (b, a))] for pair, both in parties.items()}
        everyone = [flow for some in flows.values() for flow in some]
        nbytes = _fill(everyone, round_trips, meet)
        alone = meet([flow for some in flows.values() for flow in some[:2]], nbytes)
        again = meet(everyone, nbytes)  # the TCP windows are now at least as open as in the measurement of one pair
        for pair, some in flows.items():
            rates = [rate for way in (some[::2], some[1::2]) if (rate := _shared_rate(way, alone, again, nbytes))]
            if rates:
                found[pair] = two_digits(min(rates))
    return found


def find_total(flows: Sequence[Flow], round_trips: Sequence[Sequence[float]], meet: Meet) -> float:
    """Measure the bits per second of concurrent flows together: if they share a line, its rate, or else a lower bound.

    The bound suffices for a relay: if it is not the relay's own limit, it is that of the hosts, which cannot load it
    more, if they are equal.

    Args:
        flows: Each host receives at most one of them.
        round_trips: Seconds between every two hosts.
        meet: Runs flows and times them.
    """
    nbytes = _fill(flows, round_trips, meet)
    seconds = meet(flows, nbytes)  # the TCP windows are now open
    bits = len(flows) * 8 * ETHERNET.wire_bytes(nbytes)
    return two_digits(bits / max(NOTHING_SECONDS, *seconds.values()))


def _fill(flows: Sequence[Flow], round_trips: Sequence[Sequence[float]], meet: Meet) -> int:
    """Find a message size for which all concurrent flows take long enough; this also opens their TCP windows.

    A slow flow bounds the size, since its next message would take too long; it limits what the flows reach together.
    """
    nbytes = FIRST_BYTES
    while True:
        seconds = meet(flows, nbytes)
        enough = all(seconds[flow] >= _enough_seconds(flow, round_trips) for flow in flows)
        if enough or nbytes * GROWTH > MOST_BYTES or max(seconds.values()) * GROWTH > TOO_LONG_SECONDS:
            return nbytes
        nbytes *= GROWTH


def _shared_rate(
    flows: Sequence[Flow], alone: Mapping[Flow, float], together: Mapping[Flow, float], nbytes: int
) -> float | None:
    """Return the aggregate rate of flows in one direction if it is much lower than that of independent flows."""
    bits = 8 * ETHERNET.wire_bytes(nbytes)
    all_rate = len(flows) * bits / max(NOTHING_SECONDS, *(together[flow] for flow in flows))
    one_rate = bits / max(NOTHING_SECONDS, alone[flows[0]])
    return max(all_rate, one_rate) if all_rate * ALIKE < len(flows) * one_rate else None


def site_meetings(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Schedule the pairs of sites with several hosts each, greedily, so that a site meets one other per meeting."""
    left = [pair for pair in combinations(range(len(sizes)), 2) if min(sizes[place] for place in pair) > 1]
    meetings = []
    while left:
        busy, meeting = set[int](), []
        for pair in left:
            if busy.isdisjoint(pair):
                busy.update(pair)
                meeting.append(pair)
        left = [pair for pair in left if pair not in meeting]
        meetings.append(meeting)
    return meetings


def _enough_seconds(flow: Flow, round_trips: Sequence[Sequence[float]]) -> float:
    sender, receiver = flow
    return max(LONG_ENOUGH_SECONDS, LONG_ENOUGH_ROUND_TRIPS * round_trips[sender][receiver])


def alike(rates: Sequence[float]) -> tuple[float, ...]:
    """Cluster rates: those within a factor of ALIKE of the next lower one get the cluster's median, in two digits.

    Small differences between two measurements then do not change the choice of algorithm.
    """
    groups: list[list[int]] = []
    for place in sorted(range(len(rates)), key=lambda place: rates[place]):
        if groups and rates[place] <= ALIKE * rates[groups[-1][-1]]:
            groups[-1].append(place)
        else:
            groups.append([place])
    middle = {place: two_digits(median(rates[each] for each in group)) for group in groups for place in group}
    return tuple(middle[place] for place in range(len(rates)))


def all_alike(rates: Sequence[float]) -> tuple[float, ...]:
    """Give all hosts the median rate, for networks where differences only reflect the load of the machine."""
    return (two_digits(median(rates)),) * len(rates)


def two_digits(number: float) -> float:
    return float(f"{number:.1e}")
