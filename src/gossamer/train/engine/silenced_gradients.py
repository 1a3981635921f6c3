"""Silenced gradients: makes zeros of all gradients where one is not finite, on the GPU, and tells later which it was.

An optimizer without gradients does nothing, but whoever takes them away has to know first, and the host would wait for
the GPU in every step. So they stay, as zeros: momentum goes on for a step, weight decay as well, and no parameter is
spoiled. What was found is read by the communication thread, whose stream may wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import inf
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.comm.runtime.comm_thread import CommThread, Work
from gossamer.train.engine.sparse_gradients import entries


def silence(gradients: Sequence[Tensor]) -> Tensor:
    """Fill all gradients with zeros if one holds a NaN or an infinity; which ones did: (gradients,) of bool, on the
    first one's device. The host waits for nothing, and one device for another."""
    first = gradients[0].device
    by_device = groupby(torch._foreach_norm(list(gradients), inf), attrgetter("device"))  # as layers mostly lie
    largest = [torch.stack([each.float() for each in norms]).to(first) for _, norms in by_device]
    spoiled = torch.cat(largest).isfinite().logical_not()
    any_spoiled = {device: spoiled.any().to(device) for device in {gradient.device for gradient in gradients}}
    for gradient in gradients:
        gradient.masked_fill_(any_spoiled[gradient.device], 0)
    return spoiled


class SilencedGradients:
    """The gradients of `parameters`, by name, which lie on GPUs."""

    def __init__(self, parameters: Mapping[str, Parameter], comm_thread: CommThread) -> None:
        self._parameters, self._comm_thread = parameters, comm_thread
        self._found: deque[Work[str | None]] = deque()  # by step

    @staticmethod
    def serves(parameters: Mapping[str, Parameter]) -> bool:
        """Whether all lie on devices of one kind, which is not the host's memory: no copy between them waits for it."""
        kinds = {parameter.device.type for parameter in parameters.values()}
        return len(kinds) == 1 and kinds.isdisjoint(("cpu", "meta"))

    @torch.no_grad()
    def silence(self) -> None:
        """A step is about to use them."""
        graded = {name: entries(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        held = {name: numbers for name, numbers in graded.items() if numbers.numel()}
        if held:
            spoiled = silence(list(held.values()))
            self._found.append(self._comm_thread.submit(partial(_first, list(held), spoiled)))

    def told(self) -> Iterator[str | None]:
        """For each of the steps that are known by now and were not told, in order: the name of the first gradient that
        was not finite, or None."""
        while self._found and self._found[0].is_done:
            yield self._found.popleft().wait()


def _first(names: Sequence[str], spoiled: Tensor) -> str | None:
    return next((name for name, found in zip(names, spoiled.tolist(), strict=True) if found), None)
