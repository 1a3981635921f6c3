"""Final mean: the running mean of workers' parameters with the consensus distance, and its payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.base.ops import Payload


class FinalMean(NamedTuple):
    """A mean over workers."""

    payload: Payload  # the parameters (n,), then other state of each worker
    distance: float  # consensus distance: root of the mean over workers of the squared distance to the mean

    def encoded(self) -> Payload:
        return (torch.tensor([self.distance], dtype=torch.float64, device="cpu"), *self.payload)


def decode_mean(payload: Payload) -> FinalMean:
    return FinalMean(payload[1:], payload[0].item())


@dataclass
class RunningMean:
    """A mean in order of arrival, with one division after the sum, and the distance from it.

    law:    sum |x - mean|^2 = sum over k of |x_k - mean of those before|^2 (k - 1) / k
    source: Welford 1962, Technometrics: no cancellation, however close the values are
    """

    totals: Sequence[Tensor] = ()
    count: int = 0
    squared_distance: float = 0.0  # sum over the numbers so far

    def add(self, payload: Payload) -> None:
        if self.count:
            ahead = payload[0] - self.totals[0] / self.count
            self.squared_distance += ahead.double().square().sum().item() * self.count / (self.count + 1)
            torch._foreach_add_(list(self.totals), list(payload))
        else:
            self.totals = [tensor.clone() for tensor in payload]
        self.count += 1

    def mean(self) -> FinalMean:
        return FinalMean(tuple(total / self.count for total in self.totals), sqrt(self.squared_distance / self.count))
