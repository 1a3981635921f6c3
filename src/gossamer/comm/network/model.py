"""Network model: hosts with an upload and a download bandwidth, and paths between them with a round trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

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

    def path(self, a: int, b: int) -> Path:
        """Return the path between hosts a and b. Two hosts of one site use the path of the site with itself."""
        return self.paths.get(frozenset((self.hosts[a].site, self.hosts[b].site)), self.default)

    def bits_per_second(self, sender: int, receiver: int) -> float:
        """Return the bandwidth from one host to another: the minimum of both lines and the shared line."""
        shared = self.path(sender, receiver).bits_per_second or inf
        return min(self.hosts[sender].up_bits_per_second, shared, self.hosts[receiver].down_bits_per_second)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.hosts)) <= 1 and not self.paths
