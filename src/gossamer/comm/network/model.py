"""Network model: hosts with an upload and a download bandwidth, and paths between them with a round trip.

A pair of hosts may be connected by a relay, a third machine. Its bytes load the lines of four: the sender's upload, the
relay's download and upload, and the receiver's download. All pairs of one relay share its lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import hypot, inf, isfinite

from gossamer.errors import require


@dataclass(frozen=True, kw_only=True)
class Host:
    """The line of one machine."""

    up_bits_per_second: float  # upload bandwidth, IP headers included
    down_bits_per_second: float  # download bandwidth, IP headers included
    site: str = ""  # hosts of one site share the paths that refer to it

    def __post_init__(self) -> None:
        for rate in (self.up_bits_per_second, self.down_bits_per_second):
            require(
                isfinite(rate) and rate > 0,
                f"a host's rate must be a positive number of bits per second, got {rate}. Write 100mbit, or disconnect "
                "the host with --fault.",
            )


@dataclass(frozen=True, kw_only=True)
class Path:
    """The connection between two hosts."""

    round_trip_seconds: float = 0.0  # half of it in each direction
    jitter_seconds: float = 0.0  # standard deviation of the one-way latency
    loss: float = 0.0  # fraction of packets lost
    #: Bandwidth of the line between two sites, shared by all of their hosts, for each direction separately, IP headers
    #: included. None: limited only by the hosts' own lines.
    bits_per_second: float | None = None

    def __post_init__(self) -> None:
        require(self.round_trip_seconds >= 0, f"round_trip_seconds must be at least 0, got {self.round_trip_seconds}")
        require(self.jitter_seconds >= 0, f"jitter_seconds must be at least 0, got {self.jitter_seconds}")
        require(0 <= self.loss < 1, f"loss is a fraction of packets, in [0, 1), got {self.loss}. Write loss=0.1%.")
        require(
            self.bits_per_second is None or (isfinite(self.bits_per_second) and self.bits_per_second > 0),
            "the rate of a path between two sites must be a positive number of bits per second, got "
            f'{self.bits_per_second}. Write rate = "100mbit", or omit it if there is no limit.',
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts by number, and a path for every pair of sites; other pairs use `default`.

    Only the path between two different sites may have a rate. text: the user's description, for records.
    """

    hosts: tuple[Host, ...]
    default: Path = Path()
    paths: Mapping[frozenset[str], Path] = field(default_factory=dict)
    text: str = ""
    #: Relays on machines without a worker, numbered after the hosts
    relays: tuple[Host, ...] = ()
    #: The number of the host or relay that forwards the bytes of a pair of hosts; others are connected directly
    relayed: Mapping[frozenset[int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            self.default.bits_per_second is None,
            "the default path cannot have a rate, because it has no two sites that share a line. Name the "
            'sites: between = ["west", "east"] in [[paths]], or give the hosts that rate.',
        )
        for ends, path in self.paths.items():
            require(
                path.bits_per_second is None or len(ends) == 2,
                f"only a path between two sites can have a rate, got a path with ends {sorted(ends)}: traffic within "
                "a site uses the hosts' own lines only. Give the hosts that rate.",
            )
        for pair, relay in self.relayed.items():
            require(
                len(pair) == 2 and relay not in pair and 0 <= relay < len(self.hosts) + len(self.relays),
                f"hosts {sorted(pair)} cannot be connected by relay {relay}: a relay is a third machine, with a number "
                f"below {len(self.hosts) + len(self.relays)}.",
            )

    def path(self, a: int, b: int) -> Path:
        """Return the path between hosts a and b. Two hosts of one site use the path of the site with itself. The path
        by a relay has the round trip, jitter and loss of both legs, and the slower of their shared lines."""
        legs = [self.paths.get(frozenset(sites), self.default) for sites in self.legs(a, b)]
        if len(legs) == 1:
            return legs[0]
        one, other = legs
        rates = [leg.bits_per_second for leg in legs if leg.bits_per_second is not None]
        return Path(
            round_trip_seconds=one.round_trip_seconds + other.round_trip_seconds,
            jitter_seconds=hypot(one.jitter_seconds, other.jitter_seconds),
            loss=1 - (1 - one.loss) * (1 - other.loss),
            bits_per_second=min(rates, default=None),
        )

    def legs(self, a: int, b: int) -> tuple[tuple[str, str], ...]:
        """Return the sites (from, to) of each leg from host a to host b: one, or two by a relay. A relay on a machine
        without a worker that has no site is somewhere on the path of the pair."""
        here, there, relay = self.hosts[a].site, self.hosts[b].site, self.relay(a, b)
        if relay is None or (relay >= len(self.hosts) and not self.line(relay).site):
            return ((here, there),)
        between = self.line(relay).site
        return (here, between), (between, there)

    def line(self, number: int) -> Host:
        """Return a host or relay by its number."""
        return self.hosts[number] if number < len(self.hosts) else self.relays[number - len(self.hosts)]

    def relay(self, a: int, b: int) -> int | None:
        """Return the number of the host or relay that forwards between hosts a and b; None without one."""
        return self.relayed.get(frozenset((a, b)))

    def bits_per_second(self, sender: int, receiver: int) -> float:
        """Return the bandwidth from one host to another: the minimum of both lines, the shared line and the relay."""
        shared = self.path(sender, receiver).bits_per_second or inf
        relay = self.relay(sender, receiver)
        if relay is not None:
            line = self.line(relay)
            shared = min(shared, line.down_bits_per_second, line.up_bits_per_second)
        return min(self.hosts[sender].up_bits_per_second, shared, self.hosts[receiver].down_bits_per_second)

    def among(self, numbers: Sequence[int]) -> Network:
        """Return the network of some hosts, in this order. A host that relays for them remains as a relay."""
        if numbers == range(len(self.hosts)):
            return self
        hosts, relays, relayed = tuple(self.hosts[each] for each in numbers), list[int](), dict[frozenset[int], int]()
        for a, b in combinations(range(len(numbers)), 2) if self.relayed else ():
            relay = self.relay(numbers[a], numbers[b])
            if relay is None:
                continue
            if relay not in numbers and relay not in relays:
                relays.append(relay)
            relayed[frozenset((a, b))] = numbers.index(relay) if relay in numbers else len(hosts) + relays.index(relay)
        return replace(self, hosts=hosts, relays=tuple(map(self.line, relays)), relayed=relayed)

    @property
    def hubs(self) -> tuple[int, ...]:
        """The hosts that relay for others."""
        return tuple(sorted({relay for relay in self.relayed.values() if relay < len(self.hosts)}))

    @property
    def is_uniform(self) -> bool:
        return len(set(self.hosts)) <= 1 and not self.paths and not self.relayed
