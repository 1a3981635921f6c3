"""Operation trace: the collective operations that one bucket asks for, over meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from gossamer.core.aggregation import AggregationContext
from gossamer.core.coalesce import coalesce
from gossamer.core.layout import FlatTensors, Layout
from gossamer.core.ops import AllGather, CollectiveOp, Script
from gossamer.estimate.workload_profile import STEADY
from gossamer.recipes.recipe import Recipe


def trace_ops(
    recipe: Recipe, layout: Layout, dtype: torch.dtype, workers: int, control_bytes: int = 0
) -> list[CollectiveOp]:
    """The words, over meta tensors, that one bucket asks for, round by round; control travels in the first."""
    at = AggregationContext(step=STEADY, world=workers)
    packed = FlatTensors(torch.empty(layout.numel, dtype=dtype, device="meta"), layout)
    aggregation: Script = recipe.compressor.aggregate(packed, recipe.compressor.init(packed, at), at)
    script = coalesce([aggregation, _control(control_bytes)]) if control_bytes else aggregation
    said: list[CollectiveOp] = []
    answer: Any = None
    while True:
        try:
            said.append(script.send(answer))
        except StopIteration:
            return said
        answer = said[-1].meta_answer(workers, 0)


def _control(nbytes: int) -> Script:
    yield AllGather((torch.empty(nbytes, dtype=torch.uint8, device="meta"),))
