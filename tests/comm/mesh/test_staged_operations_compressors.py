"""Every compressor asks a staged mesh and the plain one the same, step after step, and hears the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.laws import LAYOUT
from laws.laws import Group as Aggregating
from laws.subjects import each_compressor
from support.mesh_group import Group
from support.staged_group import small_chunks, stage, watched
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.base.kernels.library import are_built
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import CollectiveOp
from gossamer.base.runner import run_script

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")


class Both:
    """Asks a plain transport and a staged one, whose answers go on."""

    def __init__(self, plain: Any, staged: Any) -> None:
        self.plain, self.staged, self.asked = plain, staged, 0
        self.rank, self.world = plain.rank, plain.world

    def answer(self, op: CollectiveOp) -> Any:
        self.asked += 1
        due = bits(self.plain.answer(op.map(Tensor.clone)))
        found = self.staged.answer(op)
        assert bits(found) == due, f"another answer to {op}"
        return found

    def begin(self, op: CollectiveOp) -> Any:
        found = self.answer(op)
        return lambda: found


def bits(answer: Any) -> list[Any]:
    """What every tensor of an answer is made of."""
    if isinstance(answer, Tensor):
        return [answer.dtype, answer.shape, answer.contiguous().view(-1).view(torch.uint8).tolist()]
    return [each for part in answer for each in bits(part)]


@each_compressor
def test_every_answer_has_the_same_bits(compressor: Compressor) -> None:
    with small_chunks(), Group(2) as plain, Group(2) as group, watched(lambda rank: devices[rank]):
        devices = stage(group)
        both = [Both(*pair) for pair in zip(plain.transports, group.transports, strict=True)]
        aggregating = Aggregating(compressor, 2, dtype=torch.float32)
        for _ in range(2):
            gradients = aggregating.gradients()

            def act(rank: int, xs: list[Tensor] = gradients) -> None:
                x = FlatTensors(xs[rank].clone(), LAYOUT)
                script = compressor.aggregate(x, aggregating.states[rank], aggregating.at(rank), x.flat)
                run_script(script, both[rank])

            group.all(act)
            aggregating.aggregate(gradients)
        assert all(each.asked for each in both)
