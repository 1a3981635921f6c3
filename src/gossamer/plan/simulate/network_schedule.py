"""Network schedule: says which network is in force at a moment of virtual time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from gossamer.comm.network import Network, read_network
from gossamer.comm.network.parse import SECONDS, NetworkError

CHANGE = re.compile(r"^(?P<network>.*?)\s+at\s+(?P<moment>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+)$", re.IGNORECASE)
UNITS = {**SECONDS, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class NetworkSchedule:
    """Networks, each from a virtual second on: ((0, Network), (30, Network))."""

    changes: tuple[tuple[float, Network], ...]

    def __post_init__(self) -> None:
        moments = [since for since, _ in self.changes]
        if not moments or moments[0] != 0:
            raise NetworkError("a schedule begins with the network of the first second: 100mbit,20ms; 10mbit at 30s")
        if any(later <= sooner for sooner, later in pairwise(moments)):
            raise NetworkError(
                f"networks change at {', '.join(f'{moment:g} s' for moment in moments[1:])}, and each is to come after "
                "the one before it. Write them in order: 100mbit; 10mbit at 30s; 100mbit at 60s."
            )

    @classmethod
    def read(cls, text: str, workers: int) -> NetworkSchedule:
        """From `100mbit,20ms; 10mbit,20ms at 30s`: a network as read_network takes it, then each with its moment.

        A moment is a number of s, min, h, ms or us. Raises NetworkError, naming what could not be read.
        """
        first, *later = text.split(";")
        return cls(((0.0, read_network(first.strip(), workers)), *(_change(part.strip(), workers) for part in later)))

    def at(self, seconds: float) -> Network:
        """The network in force at that virtual second."""
        return next(network for since, network in reversed(self.changes) if since <= seconds)


def _change(text: str, workers: int) -> tuple[float, Network]:
    found = CHANGE.match(text)
    if found is None or found["unit"].lower() not in UNITS:
        raise NetworkError(
            f"{text!r} does not say when it begins. Write the network and its moment, in one of "
            f"{', '.join(UNITS)}: 10mbit,20ms at 30s"
        )
    return float(found["moment"]) * UNITS[found["unit"].lower()], read_network(found["network"], workers)
