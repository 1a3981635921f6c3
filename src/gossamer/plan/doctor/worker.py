"""Doctor's worker, run as `gossamer run plan/doctor/worker.py REPORT.json --seconds S`.

Each rank describes its host: versions, memory, GPUs and the interface that training would use. Then all pairs of ranks
are measured in turn: reachability, round trip and bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from gossamer.base import system
from gossamer.base.host_port import LOOPBACK
from gossamer.base.kernels.library import missing_kernels
from gossamer.comm import environment
from gossamer.comm.environment.store import RendezvousStore
from gossamer.errors import ConnectError
from gossamer.plan.doctor.link_statistics import (
    clock_offset_seconds,
    direction_seconds,
    largest_that_fits,
    pairs,
    round_trip_seconds,
)
from gossamer.plan.doctor.ping_link import PingLink, PingListener, call
from gossamer.plan.doctor.report import DoctorReport, HostReport, PairReport, host_from, pair_from, write_report
from gossamer.version import __version__


def describe(job: environment.JobEnvironment) -> HostReport:
    """This rank's host, on the interface that training would use."""
    interface, address = _interface(job)
    return HostReport(
        rank=job.rank,
        name=socket.gethostname(),
        address=address,
        interface=interface,
        gossamer=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        nccl=_nccl(),
        cores=system.cores(),
        memory_bytes=system.memory_bytes(),
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())),
        load_average=system.load_average(),
        missing_kernels=missing_kernels(),
    )


def _interface(job: environment.JobEnvironment) -> tuple[str | None, str]:
    """Its name (None if the system has none) and its address."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    interface = given or environment.choose_interface(job)
    address = environment.interfaces().get(interface) if interface else None
    return interface, address or _address_towards(job.master_address or LOOPBACK)


def _address_towards(address: str) -> str:
    found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    family, *_, there = min(found, key=lambda each: each[0] != socket.AF_INET)  # IPv6 only where there is no IPv4
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # a datagram socket sends nothing here; the kernel only selects the route
        return str(probe.getsockname()[0])


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


# -- pairs of ranks ----------------------------------------------------------------------------------------------------


PINGS = 20
WINDOW_ROUND_TRIPS = 20  # for a connection's window to grow to the bandwidth-delay product
CALL_SECONDS = 3.0  # a lost first packet is sent again after one second
PATIENCE_SECONDS = 60.0  # for one pair, in addition to its sending time


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One rank's part in the measurements."""

    rank: int
    store: RendezvousStore
    listener: PingListener
    token: bytes
    addresses: Sequence[tuple[str, int]]  # addresses and ports of all ranks' listeners
    seconds: float  # of sending, per direction

    def measure(self, pairs: Sequence[tuple[int, int]]) -> list[PairReport]:
        """Measure all pairs sequentially, so that they do not disturb each other; the first rank of each measures."""
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
                broken = f"the connection broke during the measurement ({error})"
                return PairReport(ranks=(first, second), problems=(*problems, broken))

    def _answer(self, first: int, second: int) -> None:
        with ExitStack() as open_links:
            links, _ = self._connect(first, second, open_links)
            try:
                for link in links[:1]:
                    link.serve()
            except OSError:
                return  # the other end detects it too, and reports it

    def _connect(self, first: int, second: int, open_links: ExitStack) -> tuple[list[PingLink], tuple[str, ...]]:
        """Connect in both directions, as engines may use either; both ends have the same links in the same order."""
        found = [self._link(first, second), self._link(second, first)]
        links = [open_links.enter_context(link) for link, _ in found if link is not None]
        return links, tuple(problem for _, problem in found if problem)

    def _link(self, caller: int, callee: int) -> tuple[PingLink | None, str]:
        """The link that `caller` opened, or why it failed."""
        called, accepted = f"call/{caller}-{callee}", f"accept/{caller}-{callee}"
        link: PingLink | None = None
        if self.rank == callee:
            problem = self.store.read(called, PATIENCE_SECONDS)
            if not problem:
                link, problem = self._accept(caller)
                self.store.pin(accepted, problem)
            return link, problem
        link, problem = self._call(callee)
        self.store.pin(called, problem)
        if link is not None and (problem := self.store.read(accepted, PATIENCE_SECONDS)):
            link.close()
            return None, problem
        return link, problem

    def _accept(self, caller: int) -> tuple[PingLink | None, str]:
        address, _ = self.addresses[self.rank]
        try:
            return self.listener.open(CALL_SECONDS), ""
        except OSError as error:
            return None, (
                f"rank {caller} reached {address}, but not rank {self.rank} there ({error}): another machine has this "
                "address, too, or a firewall drops its messages"
            )

    def _call(self, callee: int) -> tuple[PingLink | None, str]:
        address, port = self.addresses[callee]
        try:
            return call(address, port, self.token, CALL_SECONDS), ""
        except OSError as error:
            return None, f"rank {self.rank} cannot reach rank {callee} at {address} ({error})"


def _measured(link: PingLink, seconds: float, ranks: tuple[int, int], problems: tuple[str, ...]) -> PairReport:
    link.ping()  # the first one also wakes up both ends
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


# -- the script --------------------------------------------------------------------------------------------------------

RENDEZVOUS_SECONDS = 30.0  # workers start within a few seconds
TOKEN_BYTES = 16


def main(args: argparse.Namespace) -> None:
    began = time.monotonic()
    job = environment.detect(os.environ)
    store = _store(job)
    hosts, found = _probe(job, store, args.seconds)
    report = DoctorReport(hosts=_with_clocks(hosts, found), pairs=tuple(found), seconds=time.monotonic() - began)
    if report.healthy:
        report = _joined(job, report)
    if job.local_rank == 0:
        write_report(args.report, report)
    _leave(job, store)


def _store(job: environment.JobEnvironment) -> RendezvousStore:
    if job.master_address is None or job.master_port is None:
        raise ConnectError("A single worker has no pairs to measure. Start `gossamer doctor --workers 2`, or more.")
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = job.rank == 0 and not launcher_serves
    port = job.master_port + (0 if launcher_serves else 1)  # rank 0's own port is for the process group
    return RendezvousStore("doctor", job.master_address, port, serves=serves, seconds=RENDEZVOUS_SECONDS)


def _probe(
    job: environment.JobEnvironment, store: RendezvousStore, seconds: float
) -> tuple[list[HostReport], list[PairReport]]:
    own = describe(job)
    if job.rank == 0:
        store.pin("token", secrets.token_hex(TOKEN_BYTES))
    token = bytes.fromhex(store.read("token", RENDEZVOUS_SECONDS))
    with closing(PingListener(own.address, token)) as listener:
        text = json.dumps({"host": asdict(own), "port": listener.port})
        everyone = [json.loads(each) for each in store.everyone("host", job.rank, job.world, text, RENDEZVOUS_SECONDS)]
        probe = Probe(
            rank=job.rank,
            store=store,
            listener=listener,
            token=token,
            addresses=[(each["host"]["address"], each["port"]) for each in everyone],
            seconds=direction_seconds(seconds, job.world),
        )
        found = probe.measure(pairs(job.world))
    return [host_from(json.dumps(each["host"])) for each in everyone], found


def _joined(job: environment.JobEnvironment, report: DoctorReport) -> DoctorReport:
    """Create the process group of a training."""
    began = time.monotonic()
    try:
        backend = environment.join(job, RENDEZVOUS_SECONDS)
    except ConnectError as error:
        return replace(report, join_problem=str(error))
    return replace(report, backend=backend, join_seconds=time.monotonic() - began)


def _leave(job: environment.JobEnvironment, store: RendezvousStore) -> None:
    """Rank 0 leaves last, since its process may serve the store."""
    store.pin(f"end/{job.rank}", "")
    if job.rank == 0:
        for rank in range(job.world):
            store.read(f"end/{rank}", RENDEZVOUS_SECONDS)


def _with_clocks(hosts: Sequence[HostReport], found: Sequence[PairReport]) -> tuple[HostReport, ...]:
    """Rank 0 is the first rank in a pair with each of the others."""
    offsets = {pair.ranks[1]: pair.clock_offset_seconds for pair in found if pair.ranks[0] == 0} | {0: 0.0}
    return tuple(replace(host, clock_offset_seconds=offsets[host.rank]) for host in hosts)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="One worker of the doctor.")
    options.add_argument("report", type=Path)
    options.add_argument("--seconds", type=float, required=True)
    main(options.parse_args())
