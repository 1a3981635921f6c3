"""Replicas: a machine's directory is lost, and its worker goes on from the part that another machine kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_workers import Worker, cluster, network, notices, parameters, train_step
from torch.optim import SGD

from gossamer.errors import CheckpointError
from gossamer.train import checkpoint
from gossamer.train.checkpoint import replicas
from gossamer.train.checkpoint.replicas import MissingPart, blocks, missing, targets

RECIPE = "TopK(density=0.2)"


def trained(worker: Worker, directory: Path, stop: int, save: bool, **options: Any) -> Any:
    model = network(worker.rank)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = worker.attach(model, optimizer, RECIPE)
    mine = session.load(directory)
    assert not mine or mine["whose"] == worker.rank
    begun = session.steps
    for step in range(session.steps, stop):
        train_step(model, optimizer, step, worker.rank)
        if save:
            session.save(directory, whose=worker.rank, **options)
    session.close()
    return begun, parameters(model), session.state_dict()["state"]


def own(tmp_path: Path, worker: Worker) -> Path:
    return tmp_path / f"machine-{worker.rank}" / "kept"


def check_resumes(tmp_path: Path, world: int, lost: list[int], **options: Any) -> list[str]:
    """Two steps, directories are lost, and three more are five; returns what was said."""
    whole = cluster(lambda worker: trained(worker, tmp_path / "none", 5, False), world)
    cluster(lambda worker: trained(worker, own(tmp_path, worker), 2, True, **options), world)
    for rank in lost:
        shutil.rmtree(tmp_path / f"machine-{rank}")
    with notices() as said:
        resumed = cluster(lambda worker: trained(worker, own(tmp_path, worker), 5, False), world)
    for (_, one, remembered), (begun, other, later) in zip(whole, resumed, strict=True):
        assert begun == 2
        assert torch.equal(one, other)
        assert all(torch.equal(x, later[name][key]) for name, kept in remembered.items() for key, x in kept.items())
    return said


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("world", "lost"), [(2, [0]), (2, [1]), (3, [1]), (3, [2]), (4, [0, 2])])
def test_a_lost_directory_is_made_up_for(world: int, lost: list[int], asynchronous: bool, tmp_path: Path) -> None:
    said = check_resumes(tmp_path, world, lost, replicas=1, asynchronous=asynchronous)
    assert ["was copied from another machine" in line for line in said if "loaded nothing" not in line] == [True]


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_damaged_part_is_made_up_for(replicas: int, tmp_path: Path) -> None:
    """Without a replica the step before is taken."""
    cluster(lambda worker: trained(worker, own(tmp_path, worker), 2, True, replicas=replicas), 3)
    path = own(tmp_path, Worker(1, 3, None)) / "step-00000002" / "rank-1.safetensors"  # type: ignore[arg-type]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with notices() as said:
        found = cluster(lambda worker: trained(worker, own(tmp_path, worker), 2, False), 3)
    assert {begun for begun, *_ in found} == {1 + replicas}
    assert ["was copied from another machine" in line for line in said] == [bool(replicas)]


def test_a_replica_that_is_damaged_too_is_passed_over(tmp_path: Path) -> None:
    cluster(lambda worker: trained(worker, own(tmp_path, worker), 2, True, replicas=1), 3)
    for machine in (1, 2):
        path = tmp_path / f"machine-{machine}" / "kept" / "step-00000002" / "rank-1.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    found = cluster(lambda worker: trained(worker, own(tmp_path, worker), 2, False), 3)
    assert {begun for begun, *_ in found} == {1}


def test_two_replicas_make_up_for_two(tmp_path: Path) -> None:
    check_resumes(tmp_path, 4, [1, 2], replicas=2)


def test_without_a_replica_it_is_lost(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"of 3 ranks, 1 have no checkpoint"):
        check_resumes(tmp_path, 3, [1], replicas=0)


def test_a_replica_too_few_is_lost(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"of 4 ranks, 1, 2 have no checkpoint"):
        check_resumes(tmp_path, 4, [1, 2], replicas=1)


def test_chunks_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHUNK_BYTES", 1000)
    check_resumes(tmp_path, 3, [0], replicas=1)


def test_older_replicas_are_removed_too(tmp_path: Path) -> None:
    cluster(lambda worker: trained(worker, own(tmp_path, worker), 4, True, replicas=1, keep=2), 3)
    for rank in range(3):
        kept = tmp_path / f"machine-{rank}" / "kept"
        assert sorted(path.name for path in kept.iterdir()) == ["step-00000003", "step-00000004"]
        for part in (rank, (rank - 1) % 3):
            assert checkpoint.complete_steps(kept, part) == [3, 4]
            checkpoint.read(kept, 4, part)
        assert checkpoint.complete_steps(kept, (rank + 1) % 3) == []


def test_a_shared_directory_is_seen(tmp_path: Path) -> None:
    with notices() as said:
        cluster(lambda worker: trained(worker, tmp_path / "kept", 3, True, replicas=1), 3)
    assert ["one folder for all workers" in line for line in said if "loaded nothing" not in line] == [True]
    assert len(list((tmp_path / "kept" / "step-00000003").iterdir())) == 6
    assert not list((tmp_path / "kept").glob(".rank-*"))


def test_a_directory_that_cannot_be_written_is_loaded_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(lambda worker: trained(worker, tmp_path / "kept", 3, True), 2)

    def refused(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refused)
    found = cluster(lambda worker: trained(worker, tmp_path / "kept", 3, False), 2)
    assert {begun for begun, *_ in found} == {3}
    with pytest.raises(CheckpointError, match=r"not every rank can write into its .*Permission denied"):
        cluster(lambda worker: trained(worker, tmp_path / f"other-{worker.rank}", 3, True, replicas=1), 2)


def test_fewer_machines_than_replicas_is_reported(tmp_path: Path) -> None:
    with notices() as said:
        cluster(lambda worker: trained(worker, own(tmp_path, worker), 2, True, replicas=5), 2)
    assert ["in only 2 directories, not 6" in line for line in said if "loaded nothing" not in line] == [True]


def test_machines_of_several_workers(tmp_path: Path) -> None:
    """Workers 0 and 1 are on one, 2 and 3 on another: each keeps the other's two parts."""

    def place(worker: Worker) -> Path:
        return tmp_path / f"machine-{worker.rank // 2}"

    cluster(lambda worker: trained(worker, place(worker), 2, True, replicas=1), 4)
    whole = cluster(lambda worker: trained(worker, place(worker), 4, False), 4)
    for machine in range(2):
        kept = tmp_path / f"machine-{machine}"
        assert len(list((kept / "step-00000002").iterdir())) == 8
        shutil.move(kept, tmp_path / "gone")
        resumed = cluster(lambda worker: trained(worker, place(worker), 4, False), 4)
        assert all(torch.equal(one[1], other[1]) for one, other in zip(whole, resumed, strict=True))
        shutil.rmtree(kept)
        shutil.move(tmp_path / "gone", kept)


def test_another_number_of_workers_fetches_all_parts(tmp_path: Path) -> None:
    """Each has its own part only; all need all."""
    cluster(lambda worker: trained(worker, own(tmp_path, worker), 2, True), 3)

    def resumed(worker: Worker) -> int:
        model = network(worker.rank)
        session = worker.attach(model, SGD(model.parameters(), lr=0.05, momentum=0.9), RECIPE)
        session.load(own(tmp_path, worker) if worker.rank < 3 else tmp_path / "new")
        return session.steps

    assert cluster(resumed, 4) == [2, 2, 2, 2]


@pytest.mark.parametrize("replicas", [-1, True, "one", 1.0, None])
def test_an_invalid_number_is_refused(replicas: Any, tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        session = worker.attach(model, SGD(model.parameters(), 0.1))
        with pytest.raises(CheckpointError, match=r"replicas is the number.*another name"):
            session.save(tmp_path, replicas=replicas)

    cluster(work, 2)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_parts_go_to_the_next_directories() -> None:
    assert targets([(0, 1, 2)], 1) == {0: (), 1: (), 2: ()}
    assert targets([(0,), (1,), (2,)], 1) == {0: (1,), 1: (2,), 2: (0,)}
    assert targets([(0,), (1,), (2,)], 9) == {0: (1, 2), 1: (2, 0), 2: (0, 1)}
    assert targets([(0, 1), (2, 3)], 1) == {0: (2,), 1: (3,), 2: (0,), 3: (1,)}
    assert targets([(0,), (1, 2, 3)], 1) == {0: (1,), 1: (0,), 2: (0,), 3: (0,)}


A, B = "a", "b"


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([set(), set()], []),
        ([{(2, 0, A, 2)}, {(2, 1, A, 2)}], []),
        ([{(2, 0, A, 2), (2, 1, A, 2)}, set()], [MissingPart(2, 1, 0, (1,))]),
        ([{(2, 0, A, 2)}, {(2, 1, B, 2)}], []),  # of two saves
        ([{(2, 0, A, 2), (4, 0, B, 2)}, {(2, 1, A, 2)}], []),  # the newer one is lost
        ([{(2, 0, A, 2), (2, 1, A, 2), (4, 0, B, 2)}, set()], [MissingPart(2, 1, 0, (1,))]),
        ([{(2, 0, A, 1)}, set()], [MissingPart(2, 0, 0, (1,))]),  # of another number of workers
    ],
)
def test_what_is_missing(held: list[set[tuple[int, int, str, int]]], found: list[MissingPart]) -> None:
    assert missing(held) == found


@given(st.lists(st.binary(max_size=9)), st.integers(1, 7))
def test_blocks_are_the_same_bytes(pieces: list[bytes], nbytes: int) -> None:
    found = list(blocks(pieces, nbytes))
    assert b"".join(found) == b"".join(pieces)
    assert all(len(block) == nbytes for block in found[:-1])
    assert all(found)
