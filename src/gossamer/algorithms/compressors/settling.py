"""Settling: whether what waits to be sent has stopped growing, as all ranks agree."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors.decoding import expect_tensors, sent_by
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels.reference.segments import expect
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, Script

SETTLED = 1.2  # times the mean of its stage: 2 where it grows by as much in each step, 1 where it stays as it is


class WarmupProgress(NamedTuple):
    """How far a warm-up has come: sums over the steps of a stage and all ranks, and this rank's of its last step.

    Energies are squares added up: of what waits in residuals, and of what was given to send.
    """

    stage: float = 0.0
    steps: float = 0.0  # of this stage that were heard of
    waiting: float = 0.0
    given: float = 0.0
    my_waiting: float = 0.0
    my_given: float = 0.0

    @classmethod
    def read(cls, kept: FlatTensors) -> WarmupProgress:
        """The newest record: of a tensor that nobody used, or that was reset, it is an older one."""
        return max(cls(*row) for row in kept.flat.view(-1, len(cls._fields)).tolist())

    def written(self, layout: Layout) -> FlatTensors:
        """One record for each tensor, so that it goes where the tensors go."""
        return FlatTensors(torch.tensor(self * len(layout), dtype=torch.float64, device="cpu"), layout)

    def heard(self, waiting: float, given: float) -> WarmupProgress:
        """After a step in which all ranks together had so much. Where nobody was given anything, there is no news."""
        if not given > 0:
            return self
        so_far = self._replace(
            steps=self.steps + 1, waiting=self.waiting + waiting, given=self.given + given, my_waiting=0.0, my_given=0.0
        )
        settled = so_far.steps > 1 and waiting * so_far.given <= SETTLED * so_far.waiting * given
        return WarmupProgress(stage=self.stage + 1) if settled else so_far


def blank(names: tuple[str, ...]) -> FlatTensors:
    """Before the first step."""
    return WarmupProgress().written(Layout.of({name: (len(WarmupProgress._fields),) for name in names}))


def energy(x: Tensor) -> Tensor:
    """The sum of squares: () float64."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def exchange(progress: WarmupProgress, like: Tensor, at: AggregationContext) -> Script:
    """What all ranks had in their last steps: (waiting, given), the same bits everywhere."""
    mine = like.new_tensor([progress.my_waiting, progress.my_given], dtype=torch.float64)
    heard = yield AllGather((mine,))
    for rank, payload in enumerate(heard):
        with sent_by(rank, at):
            expect_tensors([payload], 1)
            expect(payload[0], torch.float64, 2)
    waiting, given = torch.stack([numbers for (numbers,) in heard]).cpu().sum(0).tolist()
    return waiting, given
