"""Broadcast of parameters and of the optimizer's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.horovod_workers import horovod
from support.virtual_workers import agree, loss_of, network, parameters
from torch import Tensor, nn

import gossamer.horovod.torch as hvd


@pytest.mark.parametrize("given", [lambda m: m.state_dict(), lambda m: m.named_parameters(), lambda m: m.parameters()])
def test_parameters_become_those_of_the_root(given: Any) -> None:
    def work(rank: int) -> Tensor:
        model = network(rank)
        hvd.broadcast_parameters(given(model), root_rank=1)
        return parameters(model)

    assert torch.equal(agree(horovod(work)), parameters(network(1)))


def test_buffers_and_strided_parameters_are_broadcast_in_place() -> None:
    def work(rank: int) -> Tensor:
        layer = nn.BatchNorm1d(2)
        layer.running_mean.fill_(rank)  # type: ignore[union-attr]
        strided = torch.full((3, 2), float(rank)).t()
        hvd.broadcast_parameters({**layer.state_dict(), "strided": strided}, root_rank=1)
        assert layer.running_mean is not None
        return torch.cat([layer.running_mean, strided.flatten()])

    assert agree(horovod(work)).tolist() == [1] * 8


@pytest.mark.parametrize("params", [None, "text", torch.ones(2), 3])
def test_other_values_are_refused(params: Any) -> None:
    with pytest.raises(ValueError, match="invalid params"):
        hvd.broadcast_parameters(params, 0)


@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_the_optimizers_state_and_options_become_those_of_the_root(rule: Any) -> None:
    def work(rank: int) -> tuple[list[Any], float, dict[str, type]]:
        model = network(0)
        optimizer = rule(model.parameters(), lr=0.1 * (rank + 1), weight_decay=0.01 * rank)
        if rank == 1:
            loss_of(model, 0, rank).backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        kinds = {key: type(value) for group in optimizer.param_groups for key, value in group.items()}
        state = [value for each in optimizer.state.values() for value in each.values()]
        assert all(each.grad is not None for each in model.parameters())
        return state, optimizer.param_groups[0]["lr"], kinds

    (first, lr, kinds), (second, other_lr, other_kinds) = horovod(work)
    assert (lr, kinds) == (other_lr, other_kinds) == (0.2, other_kinds)
    assert len(first) == len(second) > 0
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, second, strict=True))


def test_the_state_of_lbfgs_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(nn.Linear(1, 1).parameters()), 0)
