"""Measured links: a network from the report of `gossamer doctor --json`, and remarks on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path

from gossamer.base import bounded_file
from gossamer.base.json_text import read_json
from gossamer.comm.network import Network
from gossamer.comm.network.parse import NetworkError
from gossamer.comm.network.site_detection import measured
from gossamer.plan.doctor import DoctorReport, PairReport, rate_text
from gossamer.plan.doctor.report import host_from, pair_from

CONTRADICTS = 1.5  # a larger factor of rate or round trip means another network
LEAST_SECONDS = 2e-3  # shorter round trips consist mostly of the machines' own delays
HOW = (
    "Measure them: gossamer doctor --nnodes N --node-rank K --rendezvous HOST:PORT --json links.json, on every machine"
)


def read_links(file: Path, workers: int) -> tuple[Network, tuple[str, ...]]:
    """The network of a doctor's report, and remarks on its machines. Raises NetworkError."""
    report = _report(file)
    if len(report.hosts) < workers:
        raise NetworkError(
            f"{file} has {len(report.hosts)} ranks, and {workers} workers need one each. Write --workers "
            f"{len(report.hosts)}, or measure more."
        )
    ranks = range(workers)
    seconds = [[0.0] * workers for _ in ranks]
    up, down = [0.0] * workers, [0.0] * workers
    for pair in report.pairs:
        a, b = pair.ranks
        if a >= workers or b >= workers:
            continue
        found = (pair.minimum_round_trip_seconds, pair.forth_bits_per_second, pair.back_bits_per_second)
        if any(each is None or each <= 0 for each in found):
            raise NetworkError(f"{file}: there is no measurement between ranks {a} and {b}. {HOW}")
        round_trip, forth, back = (float(each or 0.0) for each in found)
        seconds[a][b] = seconds[b][a] = round_trip
        up[a], down[b] = max(up[a], forth), max(down[b], forth)
        up[b], down[a] = max(up[b], back), max(down[a], back)
    if not all((*up, *down)):
        raise NetworkError(f"{file}: some ranks were not measured at all. {HOW}")
    network = replace(measured(seconds, up, down), text=str(file))
    return network, tuple(_machine_remarks(report, workers))


def contradictions(given: Network, found: Network) -> tuple[str, ...]:
    """Differences between a network as described and as measured."""
    return tuple(_contradictions(given, found))


def _contradictions(given: Network, found: Network) -> Iterator[str]:
    for host, (stated, seen) in enumerate(zip(given.hosts, found.hosts, strict=False)):
        rates = stated.up_bits_per_second, seen.up_bits_per_second
        if max(rates) >= CONTRADICTS * min(rates):
            yield (
                f"host {host} has a measured rate of {rate_text(rates[1])}, and {rate_text(rates[0])} in {given.text}: "
                "the advice is for the latter. Leave out --network for the measured one"
            )
    farthest = [max(_round_trips(each)) for each in (given, found)]
    if max(farthest) >= LEAST_SECONDS and max(farthest) >= CONTRADICTS * min(farthest):
        yield (
            f"the longest round trip is {1000 * farthest[1]:.3g} ms as measured, and {1000 * farthest[0]:.3g} ms in "
            f"{given.text}: the advice is for the latter. Leave out --network for the measured one"
        )


def _round_trips(network: Network) -> list[float]:
    return [0.0, *(network.path(0, other).round_trip_seconds for other in range(1, len(network.hosts)))]


def _machine_remarks(report: DoctorReport, workers: int) -> Iterator[str]:
    """Remarks on machines that differ, since estimates assume that all are like this one."""
    hosts = report.hosts[:workers]
    kinds = {(host.cores, host.gpus) for host in hosts}
    if len(kinds) > 1:
        given = "; ".join(f"rank {host.rank}: {host.cores} cores{_gpus(host.gpus)}" for host in hosts)
        yield (
            f"the machines differ ({given}), and without --speeds the advice assumes that all compute as fast as this "
            "one. Name their speeds, relative to this machine: --speeds 1,1,1,0.2"
        )


def _gpus(names: tuple[str, ...]) -> str:
    return f" and {', '.join(map(str, names))}" if names else ""


def _report(file: Path) -> DoctorReport:
    """Read the doctor's JSON, which contains more than its report."""
    try:
        fields = read_json(bounded_file.read_bytes(file))
        hosts = tuple(host_from(json.dumps(each)) for each in fields["hosts"])
        pairs = tuple(pair_from(json.dumps(each)) for each in fields["pairs"])
        for pair in pairs:
            _check(pair)
        return DoctorReport(hosts=hosts, pairs=pairs, seconds=float(fields["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as problem:
        stated = f"{type(problem).__name__}: {str(problem)[:100]}"
        raise NetworkError(f"{file} cannot be read as a doctor's report ({stated}). {HOW}") from None


def _check(pair: PairReport) -> None:
    """Raise ValueError or TypeError for fields that are not of a pair."""
    numbers = (pair.minimum_round_trip_seconds, pair.forth_bits_per_second, pair.back_bits_per_second)
    ranks_are_valid = len(pair.ranks) == 2 and all(type(rank) is int and rank >= 0 for rank in pair.ranks)
    if not ranks_are_valid or not all(isfinite(each) for each in numbers if each is not None):
        raise ValueError(f"the pair {pair.ranks} has invalid ranks or numbers")
