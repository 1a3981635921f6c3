"""SGD steps: a device tells its training as batches and a loss, so that many devices can take their steps together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer.errors import require
from gossamer.federated.client.metrics import plain_metrics, weighted_mean


@dataclass(frozen=True, kw_only=True)
class SGDSteps:
    """What a device would do in a round: one step of SGD for each batch.

    w <- w - learning_rate v,  v <- momentum v + gradient of loss(model, *batch)
    """

    loss: Callable[..., Tensor]  # loss(model, *batch): a scalar. Devices with the same function step together
    batches: Sequence[tuple[Tensor, ...]]  # any iterable of tensors or of sequences of them
    learning_rate: float
    samples: int  # that it trains on: its weight among the cohort
    momentum: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, f"learning_rate is above 0, not {self.learning_rate}")
        require(0 <= self.momentum < 1, f"momentum is in [0, 1), not {self.momentum}")
        require(type(self.samples) is int and self.samples >= 0, f"samples is 0 or more, not {self.samples!r}")
        object.__setattr__(self, "batches", tuple(_as_tuple(batch) for batch in self.batches))
        object.__setattr__(self, "metrics", plain_metrics(self.metrics))

    def run(self, model: nn.Module) -> dict[str, float]:
        """Take the steps by a plain loop; returns the metrics, with the mean loss."""
        optimizer = torch.optim.SGD(
            [each for each in model.parameters() if each.requires_grad], lr=self.learning_rate, momentum=self.momentum
        )
        losses = []
        for batch in self.batches:
            optimizer.zero_grad()
            loss = self.loss(model, *batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return self.told(losses)

    def told(self, losses: Sequence[float]) -> dict[str, float]:
        """The metrics, with the mean of these losses unless there is one of that name."""
        return ({"loss": weighted_mean(losses, [1] * len(losses))} if losses else {}) | dict(self.metrics)


def _as_tuple(batch: Tensor | Iterable[Tensor]) -> tuple[Tensor, ...]:
    return (batch,) if isinstance(batch, Tensor) else tuple(batch)
