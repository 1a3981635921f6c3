"""Flight dumps: torchfrtrace itself reads them, finds who has not come, and who runs something else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from gossamer.base.flight_recorder import FlightRecorder
from gossamer.observe.flight_dump import flight_path, read_flights, write_flight, write_for_torchfrtrace

fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
WORLD = 3


class Member:
    world = WORLD

    def __init__(self, rank: int) -> None:
        self.rank = rank


def record(folder: Path, rank: int, operations: int, kinds: Mapping[int, str], answered: int) -> None:
    """kinds: of operations that are no all-reduce, by number."""
    recorder = FlightRecorder()
    for number in range(operations):
        recorder.step = number + 1
        kind = kinds.get(number, "Mean")
        noted = recorder.begin(Member(rank), {kind}, 4000.0, 10.0 + number, bucket=1)
        noted.answered = 10.5 + number if number < answered else 0.0
    write_flight(flight_path(folder, rank), recorder)


def read_by_torch(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    written = write_for_torchfrtrace(read_flights(folder), folder / "dump")
    assert sorted(path.name for path in written) == [f"gossamer_rank_{rank}" for rank in range(WORLD)]
    with caplog.at_level(logging.INFO):
        logger = logging.getLogger("Flight Recorder")
        logger.propagate = True
        fr_trace.main([str(folder / "dump"), "-o", str(folder / "found")])
    return caplog.text


def test_a_rank_that_has_not_come_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(WORLD):
        record(tmp_path, rank, operations=8 if rank == 2 else 9, kinds={3: "Gather"}, answered=8)
    found = read_by_torch(tmp_path, caplog)
    assert "Not all ranks joining collective, sequence number: 9" in found
    assert "missing ranks: {2}" in found
    assert "all-reduce of step 9, bucket 1" in found


def test_a_rank_that_runs_another_operation_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(WORLD):
        record(tmp_path, rank, operations=9, kinds={8: "Gather"} if rank == 1 else {}, answered=8)
    found = read_by_torch(tmp_path, caplog)
    assert "Collective sequence number: 9 has errors" in found
    assert "Culprit rank 1" in found


def test_a_run_that_is_well_shows_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its twin above differs by one operation of one rank."""
    for rank in range(WORLD):
        record(tmp_path, rank, operations=300, kinds={250: "Gather", 260: "Exchange", 270: "Mix"}, answered=300)
    found = read_by_torch(tmp_path, caplog)
    assert "has errors" not in found
    assert "Not all ranks" not in found
    (folder,) = {len(flight["operations"]) for flight in read_flights(tmp_path).values()}
    assert folder == 200
