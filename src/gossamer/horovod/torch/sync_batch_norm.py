"""SyncBatchNorm: batch normalization by the statistics of the batches of all ranks, on processors and GPUs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.horovod.basics import Sum, is_initialized, size
from gossamer.horovod.torch.ops import allreduce


class SyncBatchNorm(_BatchNorm):
    """Normalizes by the mean and variance over the batches of all ranks while it trains, for inputs (N, C, ...).

    Every rank runs it as often as the others. Gradients flow through the statistics of all ranks.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as for torch.nn.BatchNorm1d.

    Raises:
        ValueError: for fewer than two values per channel in the batches of all ranks, while it trains.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 (torch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (N, C, ...), got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        self._check_input_dim(input)
        if not self.training or not is_initialized() or size() == 1:
            plain: Tensor = super().forward(input)
            return plain
        over = [0, *range(2, input.dim())]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, variance, samples = _joined_moments(wide, over)
        if samples < 2:
            raise ValueError(
                f"the batches of all ranks have {int(samples)} values per channel together, and a variance needs 2 or "
                "more. Leave such a batch out on every rank, as by DataLoader(..., drop_last=True)."
            )
        self._remember(mean.detach(), variance.detach(), samples.detach())
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        normal = (wide - mean.view(shape)) * scale.view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape)
        if self.bias is not None:
            normal = normal + self.bias.view(shape)
        found: Tensor = normal.to(input.dtype)
        return found

    def _remember(self, mean: Tensor, variance: Tensor, samples: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * samples / (samples - 1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def _joined_moments(wide: Tensor, over: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance (C,) over the batches of all ranks, and the number of samples (1,).

    The variance is that within the ranks plus that of their means. The mean square minus the squared mean would cancel
    in float32, to a variance below 0 for a channel whose mean is large.
    """
    channels, rows = wide.size(1), wide.numel() // wide.size(1)
    own = wide.sum(over) / max(rows, 1)
    within = (wide - own.view([1, -1] + [1] * (wide.dim() - 2))).square().sum(over)
    own, within = own.cpu().double(), within.cpu().double()  # Apple's GPUs have no float64
    total = allreduce(torch.cat([own * rows, within + own.square() * rows, own.new_tensor([rows])]), op=Sum)
    sums, squares, samples = total.split([channels, channels, 1])
    mean = sums / samples
    variance = (squares / samples - mean.square()).clamp(min=0.0)
    mean, variance, samples = (each.to(wide.dtype).to(wide.device) for each in (mean, variance, samples))
    return mean, variance, samples
