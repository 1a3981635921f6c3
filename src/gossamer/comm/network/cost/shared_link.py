"""Shared links: lines between sites that many senders share, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.comm.network.model import Network


@dataclass
class SharedLine:
    """One direction between two sites. Told of messages in the order in which their senders are done with them.

    Each takes the line as it is free from its own beginning on, in several parts where others hold it between: the
    earliest deadline first, which delays no message where the line is as fast as all senders together, whatever
    sizes meet.
    source: Horn 1974, Naval Research Logistics Quarterly
    """

    bits_per_second: float
    busy: list[tuple[float, float]] = field(default_factory=list)  # from when to when; ascending, with gaps between

    def carry(self, bits: float, begin: float) -> float:
        """Put `bits` on the line that are there from `begin` on; the moment at which the last has passed."""
        later = []
        while self.busy and self.busy[-1][1] >= begin:
            later.append(self.busy.pop())
        first, now, left = begin, begin, bits / self.bits_per_second
        while later and later[-1][0] < now + left:
            start, end = later.pop()
            left -= max(0.0, start - now)  # what fits into the gap before
            first, now = min(first, start), end
        self.busy += [(first, now + left), *reversed(later)]
        return now + left

    def free_at(self, now: float) -> float:
        """The moment from `now` on at which nothing is on the line, by what it has been told of."""
        return next((max(now, end) for start, end in reversed(self.busy) if start <= now), now)


@dataclass
class SharedLines:
    """The shared lines of a network: one for each direction between two sites whose path has a rate."""

    network: Network
    lines: dict[tuple[str, str], SharedLine] = field(default_factory=dict)

    def between(self, sender: int, receiver: int) -> SharedLine | None:
        """The line that two hosts share with others; None where they have the way to themselves."""
        rate = self.network.path(sender, receiver).bits_per_second
        if rate is None:
            return None
        sites = self.network.hosts[sender].site, self.network.hosts[receiver].site
        return self.lines.setdefault(sites, SharedLine(rate))
