"""Doctor's report: results for hosts and pairs, and its JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gossamer.base import bounded_file


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """One rank's host."""

    rank: int
    name: str
    address: str
    interface: str | None
    gossamer: str
    torch: str
    python: str
    nccl: str | None
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    load_average: float
    missing_kernels: str | None = None  # why compiled kernels are missing; None if they exist
    clock_offset_seconds: float | None = None  # relative to rank 0's, with an error of half a round trip


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """The link between two ranks; None for values without a measurement."""

    ranks: tuple[int, int]
    minimum_round_trip_seconds: float | None = None
    median_round_trip_seconds: float | None = None
    forth_bits_per_second: float | None = None  # from the first to the second rank
    back_bits_per_second: float | None = None
    clock_offset_seconds: float | None = None  # of the second rank, relative to the first
    problems: tuple[str, ...] = ()  # reasons for missing measurements


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """All hosts and pairs, and whether a process group of all workers was created."""

    hosts: tuple[HostReport, ...]  # by rank
    pairs: tuple[PairReport, ...]  # in the order of measurement
    seconds: float  # total
    backend: str | None = None  # of the process group; None if not tried, or not created
    join_seconds: float | None = None
    join_problem: str | None = None  # why the process group was not created

    @property
    def healthy(self) -> bool:
        """Whether every pair has links in both directions, and the process group was created."""
        return self.join_problem is None and not any(pair.problems for pair in self.pairs)


def host_from(text: str) -> HostReport:
    fields = json.loads(text)
    return HostReport(**fields | {"gpus": tuple(fields["gpus"])})


def pair_from(text: str) -> PairReport:
    fields = json.loads(text)
    return PairReport(**fields | {"ranks": tuple(fields["ranks"]), "problems": tuple(fields["problems"])})


def write_report(path: Path, report: DoctorReport) -> None:
    """Write the file atomically."""
    bounded_file.write_whole(path, json.dumps(asdict(report)))


def read_report(path: Path) -> DoctorReport:
    fields = json.loads(path.read_text(encoding="utf-8"))
    hosts = tuple(host_from(json.dumps(host)) for host in fields["hosts"])
    pairs = tuple(pair_from(json.dumps(pair)) for pair in fields["pairs"])
    return DoctorReport(**fields | {"hosts": hosts, "pairs": pairs})
