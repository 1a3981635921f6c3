"""Pair probe: measures every pair of ranks in turn: reachability, round trip and bandwidth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from gossamer.comm.environment.store import RendezvousStore
from gossamer.plan.doctor.link_statistics import clock_offset_seconds, largest_that_fits, round_trip_seconds
from gossamer.plan.doctor.ping_link import PingLink, PingListener, call
from gossamer.plan.doctor.report import PairReport, pair_from

PINGS = 20
WINDOW_ROUND_TRIPS = 20  # in which a connection's window grows to what the path holds
CALL_SECONDS = 3.0  # a lost first packet is sent again after one
PATIENCE_SECONDS = 60.0  # with one pair, beyond what it may send


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One rank's part in measuring."""

    rank: int
    store: RendezvousStore
    listener: PingListener
    token: bytes
    addresses: Sequence[tuple[str, int]]  # of all ranks' listeners, and their ports
    seconds: float  # of sending, each way

    def measure(self, pairs: Sequence[tuple[int, int]]) -> list[PairReport]:
        """All pairs, one after another so that none disturbs another, timed by their first ranks."""
        found = []
        for number, (first, second) in enumerate(pairs, start=1):
            topic = f"pair/{first}-{second}"
            if self.rank == first:
                print(f"pair {number} of {len(pairs)}: ranks {first} and {second}", flush=True)
                self.store.pin(topic, json.dumps(asdict(self._ask(first, second))))
            elif self.rank == second:
                self._answer(first, second)
            found.append(pair_from(self.store.read(topic, PATIENCE_SECONDS + 2 * self.seconds)))
        return found

    def _ask(self, first: int, second: int) -> PairReport:
        with ExitStack() as open_links:
            links, problems = self._connect(first, second, open_links)
            if not links:
                return PairReport(ranks=(first, second), problems=problems)
            try:
                return _measured(links[0], self.seconds, (first, second), problems)
            except OSError as error:
                broken = f"the connection broke while it was measured ({error})"
                return PairReport(ranks=(first, second), problems=(*problems, broken))

    def _answer(self, first: int, second: int) -> None:
        with ExitStack() as open_links:
            links, _ = self._connect(first, second, open_links)
            try:
                for link in links[:1]:
                    link.serve()
            except OSError:
                return  # the asking end notices too, and it is the one that writes

    def _connect(self, first: int, second: int, open_links: ExitStack) -> tuple[list[PingLink], tuple[str, ...]]:
        """Connect both ways, since engines may connect either way; both ends have the same links in the same order."""
        found = [self._link(first, second), self._link(second, first)]
        links = [open_links.enter_context(link) for link, _ in found if link is not None]
        return links, tuple(problem for _, problem in found if problem)

    def _link(self, caller: int, callee: int) -> tuple[PingLink | None, str]:
        """The link that `caller` opened, or why it could not."""
        topic = f"call/{caller}-{callee}"
        if self.rank == caller:
            link, problem = self._call(callee)
            self.store.pin(topic, problem)
            return link, problem
        problem = self.store.read(topic, PATIENCE_SECONDS)
        return (None if problem else self.listener.open(CALL_SECONDS)), problem

    def _call(self, callee: int) -> tuple[PingLink | None, str]:
        address, port = self.addresses[callee]
        try:
            return call(address, port, self.token, CALL_SECONDS), ""
        except OSError as error:
            return None, f"rank {self.rank} cannot reach rank {callee} at {address} ({error})"


def _measured(link: PingLink, seconds: float, ranks: tuple[int, int], problems: tuple[str, ...]) -> PairReport:
    link.ping()  # the first one also wakes both ends
    pings = [link.ping() for _ in range(PINGS)]
    minimum, median = round_trip_seconds(pings)
    each_way = max(seconds, WINDOW_ROUND_TRIPS * median)
    forth, back = largest_that_fits(link.push, each_way), largest_that_fits(link.fetch, each_way)
    link.end()
    return PairReport(
        ranks=ranks,
        minimum_round_trip_seconds=minimum,
        median_round_trip_seconds=median,
        forth_bits_per_second=forth,
        back_bits_per_second=back,
        clock_offset_seconds=clock_offset_seconds(pings),
        problems=problems,
    )
