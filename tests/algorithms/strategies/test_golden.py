"""Golden trajectories: nothing about them changes unnoticed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support import golden
from support.training_loops import sgd
from support.virtual_workers import Worker, cluster, parameters
from torch import Tensor, nn

GOLDEN = {
    "local": "LocalSGD(4)",
    "post_local": "PostLocalSGD(4, start=7, optimizer_state='average')",
    "streaming": "DiLoCo(6, fragments=3, delay=1, mix=0.5) + Int8()",
    "delayed": "DelayedAveraging(2) + TopK(0.25)",
    "accumulated": "EveryStep(accumulate=2) + Int8()",
    "late": "EveryStep(delay=2) + TopK(0.25)",
}
SHAPES = [(8, 12), (12,), (4, 8)]


def targets(step: int, rank: int) -> list[Tensor]:
    """Numbers with few digits, the same on every machine."""
    make = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-64, 65, shape, generator=make).double() / 32 for shape in SHAPES]


def checksums(worker: Worker, recipe: str, steps: int = 20) -> list[float]:
    """After each step, the sum of the parameters times 1, 2, 3...: correctly rounded, and by entries alone.

    Parameters walk towards targets; nothing is summed in an order that depends on the machine.
    """
    model = nn.ParameterList([nn.Parameter(each / 8) for each in targets(99, 0)])
    optimizer = sgd(lr=0.125, momentum=0.5)(model)
    session = worker.attach(model, optimizer, recipe)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        session.set_batch_weight([1, 1, 2][(worker.rank + step) % 3])
        aims = targets(step, worker.rank)
        sum((0.5 * (p - aim).square()).sum() for p, aim in zip(model, aims, strict=True)).backward()  # type: ignore
        optimizer.step()
        found.append(math.fsum(place * x for place, x in enumerate(parameters(model).tolist(), 1)))
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_trajectories_are_what_they_were(name: str) -> None:
    by_rank = cluster(lambda worker: checksums(worker, GOLDEN[name]), 3)
    golden.check(f"trajectory_{name}", {f"rank {rank}": values for rank, values in enumerate(by_rank)})


def test_one_number_in_the_tenth_digit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_REWRITE_GOLDEN", "1")
    golden.check("some", {"a": [1.0, 3.0]}, folder=tmp_path)
    monkeypatch.delenv("GOSSAMER_REWRITE_GOLDEN")
    golden.check("some", {"a": [1.0, 3.0 + 1e-12]}, folder=tmp_path)
    with pytest.raises(AssertionError, match="number 1 was"):
        golden.check("some", {"a": [1.0, 3.0 + 3e-8]}, folder=tmp_path)
    with pytest.raises(AssertionError, match="is about"):
        golden.check("some", {"b": [1.0, 3.0]}, folder=tmp_path)
