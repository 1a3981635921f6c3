"""Bandwidth probe: finds what each host can send and receive, by a few pairs that send to each other.

A rate that a pair sees is that of the slower of two lines. So each host meets two others, and one that still seems slow
meets a host that is known to be faster: then the slower line is its own. A line that sites share is seen where all of
their hosts send at once.
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
"""All flows at once, two messages of so many bytes each: how many seconds after the first the second one was there."""

FIRST_BYTES, MOST_BYTES, GROWTH = 2**14, 2**22, 3
LONG_ENOUGH_SECONDS = 0.02  # beside which what a message itself takes is nothing
LONG_ENOUGH_ROUND_TRIPS = 1.5  # in less, a window may be what was measured
MORE_MEETINGS = 1  # for hosts that are not clear after the first two
ALIKE = 1.5  # times as fast is the same
NOTHING_SECONDS = 1e-6


@dataclass
class Rates:
    """Bits per second that pairs saw, headers of IP included."""

    world: int
    seen: dict[Flow, float] = field(default_factory=dict)

    def up(self, rank: int) -> float:
        """The most that any host received of it; 0 where nothing is known."""
        return max((rate for (sender, _), rate in self.seen.items() if sender == rank), default=0.0)

    def down(self, rank: int) -> float:
        return max((rate for (_, receiver), rate in self.seen.items() if receiver == rank), default=0.0)

    def slowest(self, rank: int) -> float:
        return min(self.up(rank), self.down(rank))

    def is_clear(self, rank: int) -> bool:
        """Whether its lines are as fast as the fastest, or slower than those of a host that it met."""
        most = max(self.seen.values(), default=0.0)
        mine = [(flow, rate) for flow, rate in self.seen.items() if rank in flow]
        up = any(rate * ALIKE < self.down(receiver) for (sender, receiver), rate in mine if sender == rank)
        down = any(rate * ALIKE < self.up(sender) for (sender, receiver), rate in mine if receiver == rank)
        return bool(mine) and (up or self.up(rank) * ALIKE >= most) and (down or self.down(rank) * ALIKE >= most)


def find(sites: Sequence[Sequence[int]], round_trips: Sequence[Sequence[float]], meet: Meet) -> Rates:
    """What every host sends and receives at most, as far as one other fills its lines. Near ones meet before far ones.

    A few meetings, however many hosts there are; each is as long as its slowest pair takes to see a rate.
    """
    rates, nbytes = Rates(len(round_trips)), FIRST_BYTES
    for meeting in range(2 + MORE_MEETINGS):
        pairs = first_pairs(sites, meeting) if meeting < 2 else next_pairs(rates, sites)
        if flows := [flow for a, b in pairs for flow in ((a, b), (b, a))]:
            seen, nbytes = see(flows, round_trips, meet, nbytes)
            rates.seen |= seen
    return rates


def first_pairs(sites: Sequence[Sequence[int]], meeting: int) -> list[Pair]:
    """Within sites: neighbors in meeting 0, the next but one in meeting 1. Single hosts meet single hosts."""
    groups = [*(site for site in sites if len(site) > 1), [host for site in sites if len(site) == 1 for host in site]]
    step = meeting + 1
    firsts = [(group, at) for group in groups for at in range(len(group) - step) if at % (2 * step) < step]
    return [(group[at], group[at + step]) for group, at in firsts]


def next_pairs(rates: Rates, sites: Sequence[Sequence[int]]) -> list[Pair]:
    """Each host whose lines are not clear yet, with one that it has not met: rather one of the fastest that are clear
    than one that is not, rather a near one than a far one. A host without any meeting, the last of five, comes first:
    nothing is known of its lines."""
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
    """What flows see that go on side by side: ever more bytes, for each until it takes long enough to be measured.

    Also, how many bytes were enough for the first of them.
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
    """Bits per second of the lines that hosts of two sites share, by the places of both in `sites`; the slower of its
    directions. Sites between which nothing is shared, as far as can be seen, are left out.

    All hosts of two sites send to each other at once, then one pair of them alone: where all are together much slower
    than as many times that pair, something between them is full. A site meets one other at a time.
    """
    found: dict[tuple[int, int], float] = {}
    for meeting in site_meetings([len(site) for site in sites]):
        parties = {pair: [*zip(sites[pair[0]], sites[pair[1]], strict=False)] for pair in meeting}
        flows = {pair: [flow for a, b in both for flow in ((a, b), (b, a))] for pair, both in parties.items()}
        everyone = [flow for some in flows.values() for flow in some]
        nbytes = _fill(everyone, round_trips, meet)
        alone = meet([flow for some in flows.values() for flow in some[:2]], nbytes)
        again = meet(everyone, nbytes)  # windows are now at least as open as they were for those that were alone
        for pair, some in flows.items():
            rates = [rate for way in (some[::2], some[1::2]) if (rate := _shared_rate(way, alone, again, nbytes))]
            if rates:
                found[pair] = two_digits(min(rates))
    return found


def _fill(flows: Sequence[Flow], round_trips: Sequence[Sequence[float]], meet: Meet) -> int:
    """Bytes in which all flows take long enough side by side; after that, their windows are open."""
    nbytes = FIRST_BYTES
    while True:
        seconds = meet(flows, nbytes)
        if nbytes * GROWTH > MOST_BYTES or all(seconds[flow] >= _enough_seconds(flow, round_trips) for flow in flows):
            return nbytes
        nbytes *= GROWTH


def _shared_rate(
    flows: Sequence[Flow], alone: Mapping[Flow, float], together: Mapping[Flow, float], nbytes: int
) -> float | None:
    """What flows of one direction have together, where that is much less than as many times the first of them alone."""
    bits = 8 * ETHERNET.wire_bytes(nbytes)
    all_rate = len(flows) * bits / max(NOTHING_SECONDS, *(together[flow] for flow in flows))
    one_rate = bits / max(NOTHING_SECONDS, alone[flows[0]])
    return max(all_rate, one_rate) if all_rate * ALIKE < len(flows) * one_rate else None


def site_meetings(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pairs of sites that may share a line, those of several hosts each, in as few meetings as a greedy choice finds;
    in each of them a site meets one other."""
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
    """Rates of which none is nearly another: those that follow closely take the median of them all, to two digits.

    So what two measurements of like lines differ in changes no choice.
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
    """The median for all: where what differs is how busy the machine was."""
    return (two_digits(median(rates)),) * len(rates)


def two_digits(number: float) -> float:
    return float(f"{number:.1e}")
