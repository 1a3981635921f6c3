"""Collectives in a world of one: names of reductions, dtypes, and what cannot be sent. With two: test_lightning.py."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

import torch
import torch.distributed as dist

from gossamer.integrations.lightning import collectives


@pytest.mark.parametrize(
    "operation", ["mean", "AVG", "sum", "min", "MAX", "product", dist.ReduceOp.SUM, dist.ReduceOp.AVG]
)
def test_reductions_by_name_and_by_torch(operation: object) -> None:
    tensor = torch.tensor([3.0, -2.0])
    assert torch.equal(collectives.all_reduce(tensor, operation), tensor)


def test_integers_stay_integers_but_in_means() -> None:
    tensor = torch.tensor([3, 4], dtype=torch.int32)
    assert collectives.all_reduce(tensor, "sum").dtype == torch.int32
    assert collectives.all_reduce(tensor).dtype == torch.float32


@pytest.mark.parametrize("operation", ["median", dist.ReduceOp.BXOR, None])
def test_others_are_refused(operation: object) -> None:
    with pytest.raises(ValueError, match="is none of mean, sum, product, min, max"):
        collectives.all_reduce(torch.zeros(1), operation)


def test_tensors_are_stacked_by_rank() -> None:
    assert collectives.all_gather(torch.zeros(2, 3)).shape == (1, 2, 3)
    assert collectives.all_gather(torch.tensor(1.0)).shape == (1,)


def test_what_json_holds_is_broadcast() -> None:
    collectives.barrier()
    value = {"text": "a", "number": 1.5, "list": [1, None, True]}
    assert collectives.broadcast(value, 0, rank=0) == value
    with pytest.raises(TypeError, match="Broadcast their fields"):
        collectives.broadcast({1, 2}, 0, rank=0)


@pytest.mark.parametrize("value", [{0: "a"}, {"by rank": [{0: "a"}]}, ({None: 1},)])
def test_keys_that_json_would_change_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"key (0|None), which is not a string"):
        collectives.broadcast(value, 0, rank=0)
