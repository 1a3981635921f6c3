"""Own GPU: each worker takes one that no other has, and the same GPU is known by whatever number it is seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer.comm.environment.host_info import assumed, own_gpus, visible_gpus
from gossamer.comm.environment.launcher_env import JobEnvironment


@pytest.mark.parametrize(
    ("seen", "own"),
    [
        ([["a", "b", "c"]] * 3, [0, 1, 2]),
        ([["a", "b"]] * 3, [0, 1, None]),
        ([["a"], ["b"]], [0, 0]),
        ([["a"], ["a"]], [0, None]),
        ([["a", "b"], ["c", "d"]], [0, 0]),
        ([["a", "b"], ["b", "a"]], [0, 0]),  # one list, in two orders
        ([["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]], [0, 1, 0, 1]),  # two machines
        ([[], ["a"]], [None, 0]),
        ([[], []], [None, None]),
    ],
)
def test_each_takes_the_first_that_no_other_has(seen: list[list[str]], own: list[int | None]) -> None:
    assert own_gpus(seen) == own


def machine(monkeypatch: pytest.MonkeyPatch, visible: int, **known: Any) -> None:
    """known: what torch says of each GPU, by its property."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(**known))


def named(monkeypatch: pytest.MonkeyPatch, physical: str, said: str) -> list[str]:
    """How a worker names the one GPU that it sees."""
    machine(monkeypatch, 1, uuid=physical)
    return list(visible_gpus({"CUDA_VISIBLE_DEVICES": said}))


def check_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(monkeypatch, "one", "0") != named(monkeypatch, "other", "0"), "each in a container of its own"
    assert named(monkeypatch, "one", "0") == named(monkeypatch, "one", "GPU-one"), "one GPU, by two names"


def test_gpus_are_distinguished_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    check_told_apart(monkeypatch)


def test_the_check_catches_names_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.comm.environment.host_info._name", lambda number, listed: listed)
    with pytest.raises(AssertionError):
        check_told_apart(monkeypatch)


def test_parts_of_one_gpu_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(monkeypatch, "one", "MIG-first") != named(monkeypatch, "one", "MIG-second")


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_where_torch_knows_no_uuid_the_variable_says_which(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    machine(monkeypatch, 1)
    first, again, other = (visible_gpus({variable: said}) for said in ("0", "0", "1"))
    assert first == again != other
    machine(monkeypatch, 2)
    assert list(visible_gpus({variable: " 0, 1"})) == [*first, *other] == list(visible_gpus({}))


def test_a_driver_that_fails_is_no_reason_not_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int) -> Any:
        raise RuntimeError("CUDA driver initialization failed")

    machine(monkeypatch, 1)
    expected = visible_gpus({})
    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    assert visible_gpus({}) == expected


@pytest.mark.parametrize(
    ("visible", "said", "local_rank", "own"),
    [
        (4, {}, 3, 3),
        (1, {}, 1, None),
        (1, {"SLURM_PROCID": "1", "SLURM_GPUS_PER_TASK": "1"}, 1, 0),  # each sees its own
        (2, {"SLURM_PROCID": "1", "SLURM_GPUS_PER_TASK": "a100:2"}, 1, 0),
        (8, {"SLURM_PROCID": "1", "SLURM_GPUS_PER_TASK": "1"}, 1, 1),  # each sees all
        (1, {"SLURM_GPUS_PER_TASK": "1"}, 1, None),  # of an allocation, in which another launcher runs
        (0, {"SLURM_PROCID": "1", "SLURM_GPUS_PER_TASK": "0"}, 0, None),
        (0, {"SLURM_PROCID": "0", "SLURM_GPUS_PER_TASK": "some"}, 0, None),
    ],
)
def test_without_a_word_of_the_others_slurms_tasks_have_their_own_and_others_share(
    monkeypatch: pytest.MonkeyPatch, visible: int, said: dict[str, str], local_rank: int, own: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    job = JobEnvironment(rank=local_rank, local_rank=local_rank, local_world=local_rank + 1, world=local_rank + 1)
    assert own_gpus(assumed(job, said))[-1] == own
