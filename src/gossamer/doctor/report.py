"""What the doctor found, and the file that holds it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What one rank says of the machine it runs on.

    clock_offset_seconds: how far its clock is ahead of rank 0's, give or take half a round trip; None: not measured.
    """

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
    clock_offset_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """Two ranks, and what lies between them; None where it was not measured, then `problems` says why.

    forth: from the first to the second rank; clock_offset_seconds: how far the second's clock is ahead.
    """

    ranks: tuple[int, int]
    minimum_round_trip_seconds: float | None = None
    median_round_trip_seconds: float | None = None
    forth_bits_per_second: float | None = None
    back_bits_per_second: float | None = None
    clock_offset_seconds: float | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """By rank, and by pair in the order of measurement.

    backend, join_seconds: of the process group of all, None where it was not tried or did not come up.
    """

    hosts: tuple[HostReport, ...]
    pairs: tuple[PairReport, ...]
    seconds: float
    backend: str | None = None
    join_seconds: float | None = None
    join_problem: str | None = None

    @property
    def healthy(self) -> bool:
        """Whether every pair can talk, and all together."""
        return self.join_problem is None and not any(pair.problems for pair in self.pairs)


def host_from(text: str) -> HostReport:
    fields = json.loads(text)
    return HostReport(**fields | {"gpus": tuple(fields["gpus"])})


def pair_from(text: str) -> PairReport:
    fields = json.loads(text)
    return PairReport(**fields | {"ranks": tuple(fields["ranks"]), "problems": tuple(fields["problems"])})


def write_report(path: Path, report: DoctorReport) -> None:
    """Readers find the whole file or none."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(report)), encoding="utf-8")
    os.replace(draft, path)


def read_report(path: Path) -> DoctorReport:
    fields = json.loads(path.read_text(encoding="utf-8"))
    hosts = tuple(host_from(json.dumps(host)) for host in fields["hosts"])
    pairs = tuple(pair_from(json.dumps(pair)) for pair in fields["pairs"])
    return DoctorReport(**fields | {"hosts": hosts, "pairs": pairs})
