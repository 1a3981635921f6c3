"""Gradient accumulation: sums gradients over several backward passes before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.train.reducer.bucket import Bucket
from gossamer.train.reducer.reduction import BucketInput

SUM = "accumulated"


class GradientAccumulator:
    """Sums of weighted gradients over the backward passes of one reduction before its last."""

    def __init__(self, buckets: Sequence[Bucket], accumulate: int | Callable[[], int]) -> None:
        """accumulate: backward passes of a reduction; of the one that is due, where their number changes."""
        self._buckets = buckets
        self._accumulate = accumulate if callable(accumulate) else lambda: accumulate
        sums = callable(accumulate) or accumulate > 1
        self._flats = [torch.zeros_like(bucket.flat) for bucket in buckets] if sums else []
        self.clear()

    def clear(self) -> None:
        self.made = 0  # backward passes that are in the sums
        self.weight = 0.0  # of all their samples
        self.used: set[str] = set()  # parameters that had a gradient

    @property
    def complete(self) -> bool:
        """Whether the next pass is the one that is sent."""
        return self.made >= self._accumulate() - 1

    @torch.no_grad()
    def add(self, weight: float, scale: float) -> None:
        """Take the gradients away from the parameters, so that no optimizer uses them yet."""
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            if not self.made:
                flat.zero_()
            for slot in bucket.layout:
                parameter = bucket.parameters[slot.name]
                if parameter.grad is not None:
                    slot.view(flat).add_(parameter.grad, alpha=weight / scale)
                    self.used.add(slot.name)
                    parameter.grad = None
        self.made, self.weight = self.made + 1, self.weight + weight

    def join(self, place: int, pairs: Sequence[tuple[Tensor, Tensor]], weight: float, scale: float) -> BucketInput:
        """The input that makes a bucket, by place, the mean over all samples of all passes."""
        if not self.made:
            return BucketInput(pairs)
        total = self.weight + weight or 1.0
        return BucketInput(pairs, weight / total, self._flats[place], scale / total)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The sums by parameter name, as views."""
        for bucket, flat in zip(self._buckets, self._flats, strict=False):
            for slot in bucket.layout:
                yield slot.name, slot.view(flat)

    def progress(self) -> dict[str, Any]:
        return {"made": self.made, "weight": self.weight, "used": sorted(self.used)}

    def resume(self, progress: Mapping[str, Any]) -> None:
        self.made, self.weight, self.used = progress["made"], progress["weight"], set(progress["used"])


@contextmanager
def kept_gradients(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Keep gradients that an optimizer has not used yet over a reduction within the block."""
    kept = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient
