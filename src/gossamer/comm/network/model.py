"""Network model: hosts with a rate each way, and paths between them with a round trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

from gossamer.errors import require


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine's line."""

    up_bits_per_second: float  # that it may send, headers of IP included
    down_bits_per_second: float  # that it may receive
    site: str = ""  # hosts of one site share the paths that are named after it

    def __post_init__(self) -> None:
        for rate in (self.up_bits_per_second, self.down_bits_per_second):
            require(
                isfinite(rate) and rate > 0,
                f"a line's rate is a positive number of bits per second, not {rate}. Write 100mbit, or cut the host "
                "off with --fault.",
            )


@dataclass(frozen=True, kw_only=True)
class Path:
    """The way between two hosts."""

    round_trip_seconds: float = 0.0  # there and back, half of it each way
    jitter_seconds: float = 0.0  # the standard deviation of one way's seconds
    loss: float = 0.0  # the share of packets lost
    #: Of the line between two sites, which all hosts of the one share when they send to the other, each direction for
    #: itself, headers of IP included. None: as much as the hosts' own lines carry.
    bits_per_second: float | None = None

    def __post_init__(self) -> None:
        require(self.round_trip_seconds >= 0, f"a round trip takes at least 0 seconds, not {self.round_trip_seconds}")
        require(self.jitter_seconds >= 0, f"jitter is at least 0 seconds, not {self.jitter_seconds}")
        require(0 <= self.loss < 1, f"loss is a share of packets in [0, 1), not {self.loss}. Write loss=0.1%.")
        require(
            self.bits_per_second is None or (isfinite(self.bits_per_second) and self.bits_per_second > 0),
            "what hosts share between two sites is a positive number of bits per second, not "
            f'{self.bits_per_second}. Write rate = "100mbit", or leave it out where there is no limit.',
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts by number, and a path for every pair of sites; pairs that are not named take `default`.

    Only the path between two different sites may have a rate. text: how a user wrote it, for records.
    """

    hosts: tuple[Host, ...]
    default: Path = Path()
    paths: Mapping[frozenset[str], Path] = field(default_factory=dict)
    text: str = ""

    def __post_init__(self) -> None:
        require(
            self.default.bits_per_second is None,
            "the default path has no two ends whose hosts could share a line, so its rate would limit nobody. Name the "
            'sites: between = ["west", "east"] in [[paths]], or give the hosts that rate.',
        )
        for ends, path in self.paths.items():
            require(
                path.bits_per_second is None or len(ends) == 2,
                f"a line is shared between two sites, and this path's ends are {sorted(ends)}: what hosts of one site "
                "send each other passes their own lines only. Give the hosts that rate.",
            )

    def path(self, a: int, b: int) -> Path:
        """The path between hosts a and b; two hosts of one site are the pair of the site with itself."""
        return self.paths.get(frozenset((self.hosts[a].site, self.hosts[b].site)), self.default)

    def bits_per_second(self, sender: int, receiver: int) -> float:
        """The most that one host can send to another alone: the slowest of its line, the other's, and a shared one."""
        shared = self.path(sender, receiver).bits_per_second or inf
        return min(self.hosts[sender].up_bits_per_second, shared, self.hosts[receiver].down_bits_per_second)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.hosts)) <= 1 and not self.paths
