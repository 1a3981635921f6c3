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


def test_a_constant_channel_of_large_values_is_normalized_to_zero() -> None:
    def work(rank: int) -> tuple[Tensor, Tensor | None]:
        layer = hvd.SyncBatchNorm(2)
        batch = torch.stack([torch.full((1000,), 255.0), 4096.3 + torch.arange(1000.0) % 2], dim=1)
        return layer(batch).detach(), layer.running_var

    for out, variance in horovod(work):
        assert variance is not None
        assert out[:, 0].abs().max() < 0.1
        assert torch.allclose(out[:, 1].abs(), torch.ones(1000), atol=1e-2)
        assert torch.allclose(variance, torch.tensor([0.9, 0.9 + 0.1 * 0.25]), atol=1e-3)


def test_it_works_without_a_bias() -> None:
    def work(rank: int) -> Tensor:
        found: Tensor = hvd.SyncBatchNorm(4, bias=False)(batch(rank, (4,)).float()).detach()
        return found

    joined = nn.BatchNorm1d(4)(torch.cat([batch(rank, (4,)).float() for rank in range(2)]))
    assert torch.allclose(torch.cat(horovod(work)), joined.detach(), atol=1e-5)


def test_a_single_value_per_channel_is_refused_on_all_ranks_and_statistics_stay() -> None:
    def work(rank: int) -> None:
        layer = hvd.SyncBatchNorm(2)
        with pytest.raises(ValueError, match=r"have 1 values per channel together.*drop_last=True"):
            layer(torch.ones(1 - rank, 2))
        assert layer.running_var.tolist() == [1.0, 1.0]  # type: ignore[union-attr]

    horovod(work)
