"""Residual report: what a worker of an elastic run has still to send, told now and then, since it is lost with it.

The norm is told to this process's listeners alone, who write it beside the run's logs: nothing of it travels, and
whoever outlives the worker may read it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from math import hypot, inf

import torch
from torch import Tensor

from gossamer import events
from gossamer.base.layout import accumulation_dtype
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.train.synchronizers.base import Synchronizer

REPORT_SECONDS = 5.0  # between two reports, at least
REPORT_SHARE = 0.001  # of the communication thread's time, at most: residuals are as large as the model


def norm_of(tensors: Iterable[Tensor]) -> float:
    """|x| of all tensors side by side, in float64 on the host, summed in accumulation_dtype. 0 of none."""
    return hypot(*(float(torch.linalg.vector_norm(each, dtype=accumulation_dtype(each.dtype))) for each in tensors))


class ResidualReport:
    """Emits events.ResidualTold while something listens. The communication thread measures, since it alone knows when
    no exchange writes to what is measured."""

    def __init__(self, comm_thread: CommThread, clock: Callable[[], float] = time.perf_counter) -> None:
        self._comm_thread, self._clock, self._due = comm_thread, clock, -inf

    def look(self, synchronizer: Synchronizer) -> None:
        """A step is over."""
        if self._clock() >= self._due and events.observed():
            self._due = inf  # one at a time
            self._comm_thread.submit(partial(self._measure, synchronizer, synchronizer.step))

    def _measure(self, synchronizer: Synchronizer, step: int) -> None:
        began = self._clock()
        unsent = [tensor for bucket in synchronizer.buckets for tensor in bucket.unsent]
        norm, ended = norm_of(unsent), self._clock()
        self._due = ended + max(REPORT_SECONDS, (ended - began) / REPORT_SHARE)
        if unsent:
            events.emit(events.ResidualTold(step=step, norm=norm))
