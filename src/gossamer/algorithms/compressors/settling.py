"""Settling: detects, equally on all ranks, that the residual has stopped growing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors.decoding import expect_tensors, sent_by
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels.reference.segments import expect
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, Script

SETTLED = 1.2  # times the stage's mean ratio; the ratio is 2 times the mean while growing linearly, 1 when constant


class WarmupProgress(NamedTuple):
    """The progress of a warm-up: sums over the steps of a stage and all ranks, and this rank's values of its last step.

    `waiting` is the energy (sum of squares) of the residuals, `given` that of the inputs.
    """

    stage: float = 0.0
    steps: float = 0.0  # of this stage that were counted
    waiting: float = 0.0
    given: float = 0.0
    my_waiting: float = 0.0
    my_given: float = 0.0

    @classmethod
    def read(cls, kept: FlatTensors) -> WarmupProgress:
        """Return the newest record; tensors that were unused or reset have an older one."""
        return max(cls(*row) for row in kept.flat.view(-1, len(cls._fields)).tolist())

    def written(self, layout: Layout) -> FlatTensors:
        """Store one record per tensor under the tensor's name, so that it moves with the tensor."""
        return FlatTensors(torch.tensor(self * len(layout), dtype=torch.float64, device="cpu"), layout)

    def updated(self, waiting: float, given: float) -> WarmupProgress:
        """Return the progress after a step with these energies over all ranks; unchanged if all inputs were zero."""
        if not given > 0:
            return self
        so_far = self._replace(
            steps=self.steps + 1, waiting=self.waiting + waiting, given=self.given + given, my_waiting=0.0, my_given=0.0
        )
        settled = so_far.steps > 1 and waiting * so_far.given <= SETTLED * so_far.waiting * given
        return WarmupProgress(stage=self.stage + 1) if settled else so_far


def blank(names: tuple[str, ...]) -> FlatTensors:
    """Return the records before the first step."""
    return WarmupProgress().written(Layout.of({name: (len(WarmupProgress._fields),) for name in names}))


def energy(x: Tensor) -> Tensor:
    """Return the sum of squares: () float64."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def exchange(progress: WarmupProgress, like: Tensor, at: AggregationContext) -> Script:
    """Sum (waiting, given) of the last step over all ranks; the result has the same bits on every rank."""
    own_progress = like.new_tensor([progress.my_waiting, progress.my_given], dtype=torch.float64)
    received = yield AllGather((own_progress,))
    for rank, payload in enumerate(received):
        with sent_by(rank, at):
            expect_tensors([payload], 1)
            expect(payload[0], torch.float64, 2)
    waiting, given = torch.stack([numbers for (numbers,) in received]).cpu().sum(0).tolist()
    return waiting, given
