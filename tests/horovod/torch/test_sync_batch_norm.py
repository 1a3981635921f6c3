"""SyncBatchNorm equals BatchNorm on the joined batch, gradients included."""

from __future__ import annotations

import pytest
import torch
from support.horovod_workers import horovod
from torch import Tensor, nn

import gossamer.horovod.torch as hvd


def batch(rank: int, shape: tuple[int, ...]) -> Tensor:
    """Different numbers of samples on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3 + rank, *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4,), (4, 5), (4, 2, 3)], ids=str)
def test_it_equals_batch_norm_of_the_joined_batch(shape: tuple[int, ...]) -> None:
    plain = nn.BatchNorm1d(4) if len(shape) < 3 else nn.BatchNorm2d(4)
    plain = plain.double()
    joined = torch.cat([batch(rank, shape) for rank in range(2)]).requires_grad_()
    expected = plain(joined)
    expected.square().sum().backward()

    def work(rank: int) -> tuple[Tensor, ...]:
        layer = hvd.SyncBatchNorm(4).double()
        mine = batch(rank, shape).requires_grad_()
        out = layer(mine)
        out.square().sum().backward()
        assert layer.weight.grad is not None
        assert mine.grad is not None
        weight = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
        layer.eval()
        layer(mine)
        return out.detach(), mine.grad, weight, layer.running_mean, layer.running_var

    outs, grads, weights, means, variances = zip(*horovod(work), strict=True)
    assert torch.allclose(torch.cat(outs), expected.detach())
    assert joined.grad is not None
    assert torch.allclose(torch.cat(grads), joined.grad, atol=1e-9)
    for found, value in ((weights, plain.weight.grad), (means, plain.running_mean), (variances, plain.running_var)):
        assert value is not None
        assert all(torch.allclose(each, value) for each in found)


def test_without_init_it_is_plain_batch_norm() -> None:
    assert hvd.SyncBatchNorm(2)(torch.randn(3, 2)).mean().abs() < 1e-6
    with pytest.raises(ValueError, match="2 dimensions"):
        hvd.SyncBatchNorm(2)(torch.randn(3))
