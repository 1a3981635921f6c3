"""Two pipeline stages in one process: what crosses between them is copied, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer.train.parallel import Boundary, CompressedStage

GPIPE = ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3"]
ONE_F_ONE_B = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]


class TwoStages:
    """Halves of a model on both sides of a boundary; None: joined by functions that copy, without a boundary."""

    def __init__(self, first: nn.Module, second: nn.Module, edge: Boundary | None) -> None:
        self.first = CompressedStage(first, before=None, after=edge)
        self.second = CompressedStage(second, before=edge, after=None)
        self.crossed: list[Tensor] = []  # copies, forward and backward

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.first.module.parameters(), *self.second.module.parameters()]

    def forward(self, x: Tensor, samples: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(what the first stage sent, what the second received, its output)."""
        sent = self.first(x, samples=samples)
        received = self._copied(sent).requires_grad_(torch.is_grad_enabled())
        return sent, received, self.second(received, samples=samples)

    def step(
        self, x: Tensor, y: Tensor, samples: Tensor | None = None, schedule: Sequence[str] = ("F0", "B0")
    ) -> float:
        """Gradients of the mean loss of all microbatches, and that loss. schedule: such as F0 F1 B0 B1."""
        count = len(schedule) // 2
        xs, ys = x.chunk(count), y.chunk(count)
        ids = [None] * count if samples is None else samples.chunk(count)
        flying, total = {}, 0.0
        for action, number in ((each[0], int(each[1:])) for each in schedule):
            if action == "F":
                flying[number] = self.forward(xs[number], ids[number])
                continue
            sent, received, output = flying.pop(number)
            loss = mse_loss(output, ys[number])
            loss.backward()
            assert received.grad is not None
            sent.backward(self._copied(received.grad))
            total += loss.item()
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.div_(count)
        return total / count

    def _copied(self, tensor: Tensor) -> Tensor:
        """Byte by byte, as a network does."""
        self.crossed.append(tensor.detach().contiguous().view(torch.uint8).clone().view(tensor.dtype))
        return self.crossed[-1].clone()


def halves(seed: int = 0, width: int = 32) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh()), nn.Sequential(
        nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 2)
    )
