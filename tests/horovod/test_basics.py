"""Init and shutdown, process sets, and the timeline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.horovod_workers import horovod
from support.paths import ROOT
from support.virtual_workers import notices

import gossamer.horovod.torch as hvd
from gossamer.comm.runtime.worker_scope import WorkerScope, enter
from gossamer.errors import AttachError
from gossamer.horovod import basics


@pytest.fixture
def alone() -> Any:
    """A job of one in this thread."""
    enter(WorkerScope())
    hvd.init()
    yield
    hvd.shutdown()


def test_before_init_every_rank_is_unknown() -> None:
    enter(WorkerScope())
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, hvd.join, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"hvd\.init"):
            call()


@pytest.mark.usefixtures("alone")
def test_a_job_of_one() -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (
        *(0, 1, 0, 1, 0, 1),
    )
    assert hvd.is_homogeneous()
    assert hvd.global_process_set.ranks == [0]
    assert hvd.allreduce(torch.ones(1)).item() == 1
    assert hvd.join() == 0
    hvd.shutdown()
    hvd.init()
    assert hvd.allgather(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.usefixtures("alone")
def test_the_example_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "how-to" / "integrations" / "horovod.md").read_text()
    code, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    names["model"](torch.ones(1, 10)).sum().backward()
    names["optimizer"].step()


def test_every_name_of_the_page_is_there() -> None:
    _, _, page = (ROOT / "docs" / "how-to" / "integrations" / "horovod.md").read_text().partition("## Names for torch")
    table = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`([\w.]+)`", table)) - {
        "_async",
        "_",
        "_async_",
        "HOROVOD_TIMELINE",
        "HostsUpdatedInterrupt",
    }
    assert {name for name in named if not reached(name)} == set()


def reached(name: str) -> bool:
    place: Any = hvd
    for part in name.split("."):
        place = getattr(place, part, None)
    return place is not None


def test_init_with_an_mpi_communicator_is_refused() -> None:
    enter(WorkerScope())
    with pytest.raises(ValueError, match="process_sets"):
        hvd.init(comm=[0])


def test_an_elastic_run_is_refused_with_the_line_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(WorkerScope())
    monkeypatch.setattr(basics, "is_elastic", lambda: True)
    with pytest.raises(AttachError, match=r"--max-restarts"):
        hvd.init()


def test_process_sets_work_within_themselves() -> None:
    def work(rank: int) -> Any:
        even, odd = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([1]))
        mine = even if even.included() else odd
        total = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=mine).item()
        rows = hvd.allgather(torch.tensor([rank]), process_set=mine).tolist()
        root = hvd.broadcast(torch.tensor([rank]), mine.ranks[-1], process_set=mine).item()
        objects = hvd.allgather_object(rank, process_set=mine)
        places = mine.rank(), even.size()
        other = odd if mine is even else even
        for call in (lambda: hvd.allreduce(torch.ones(1), process_set=other), other.rank):
            with pytest.raises(ValueError, match="included"):
                call()
        with pytest.raises(ValueError, match="duplicate"):
            hvd.add_process_set([0, 2])
        removed = hvd.remove_process_set(odd), hvd.remove_process_set(odd)
        assert odd.process_set_id is None
        assert hvd.remove_process_set(hvd.global_process_set) is False
        return total, rows, root, objects, places, removed

    first, second, third = horovod(work, 3)
    assert first == (2, [0, 2], 2, [0, 2], (0, 2), (True, False))
    assert second == (1, [1], 1, [1], (0, 2), (True, False))
    assert third == (2, [0, 2], 2, [0, 2], (1, 2), (True, False))


def test_an_unknown_process_set_is_refused() -> None:
    def work(rank: int) -> None:
        invented = hvd.ProcessSet([0])
        for number in (None, 10):
            invented.process_set_id = number
            with pytest.raises(ValueError, match="add_process_set"):
                hvd.allreduce(torch.ones(1), process_set=invented)

    horovod(work)


def test_the_number_of_a_removed_process_set_is_used_again() -> None:
    def work(rank: int) -> list[str]:
        first, second = hvd.add_process_set([0]), hvd.add_process_set([1])
        hvd.remove_process_set(first)
        third = hvd.add_process_set([0, 2])
        return [str(first), str(second), str(third)]

    expected = [
        "ProcessSet(process_set_id=None, ranks=[0], mpi_comm=None)",
        "ProcessSet(process_set_id=2, ranks=[1], mpi_comm=None)",
        "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)",
    ]
    assert horovod(work, 3) == [expected] * 3


def test_an_optimizer_trains_after_its_process_set_was_removed_and_added_again() -> None:
    def work(rank: int) -> list[float]:
        pair = hvd.add_process_set([0, 2])
        x = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), process_set=pair)
        found = []
        for _ in range(2):
            x.grad = torch.tensor([[1.0, 2.0, 4.0][rank]])
            optimizer.step()
            found.append(x.item())
            hvd.remove_process_set(pair)
            hvd.add_process_set(pair)
        return found

    assert horovod(work, 3) == [[-2.5, -5.0], [-2.0, -4.0], [-2.5, -5.0]]


def test_init_with_duplicate_process_sets_may_be_repeated() -> None:
    enter(WorkerScope())
    try:
        for wrong in ([[0], [0]], [[0, 1]]):
            with pytest.raises(ValueError, match=r"process set|ranks"):
                hvd.init(process_sets=list(map(hvd.ProcessSet, wrong)))
            assert not hvd.is_initialized()
        hvd.init(process_sets=[])
        assert hvd.size() == 1
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("ranks", [[0, 5], [], ["a"], 2])
def test_wrong_process_sets_are_refused(ranks: Any) -> None:
    def work(rank: int) -> None:
        with pytest.raises(ValueError, match=r"ranks"):
            hvd.add_process_set(ranks)

    horovod(work)


@pytest.mark.parametrize("marks", [False, True])
def test_the_timeline_has_each_call_by_name(tmp_path: Path, marks: bool) -> None:
    def work(rank: int) -> None:
        hvd.start_timeline(str(tmp_path / "timeline"), mark_cycles=marks)
        hvd.allreduce(torch.ones(2), name="loss")
        hvd.barrier()
        hvd.stop_timeline()

    horovod(work)
    text = (tmp_path / "timeline").read_text()
    shown = json.loads(text)
    assert "start_time_since_epoch_in_micros" in text
    assert ("CYCLE_START" in text) is marks
    rows = {event["args"]["name"]: event["pid"] for event in shown if event.get("name") == "process_name"}
    of_loss = [event["name"] for event in shown if event.get("pid") == rows["allreduce.loss"] and event["ph"] == "X"]
    assert of_loss == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_timeline_and_not_the_calls() -> None:
    def work(rank: int) -> float:
        hvd.start_timeline("/dev/full", mark_cycles=True)
        found = hvd.allreduce(torch.ones(1), name="a", op=hvd.Sum).item()
        hvd.stop_timeline()
        return float(found)

    with notices() as said:
        assert horovod(work) == [2.0, 2.0]
    assert sum("/dev/full ends here" in sentence for sentence in said) == 1


def test_the_environment_sets_timeline_and_fusion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "timeline"))
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2.5")
    settings = basics._round_settings()
    assert (settings.fusion_bytes, settings.cycle_seconds) == (0, 0.0025)
    assert horovod(lambda rank: hvd.allreduce(torch.ones(1), name="a", op=hvd.Sum).item()) == [2, 2]
    assert "allreduce.a" in (tmp_path / "timeline").read_text()
