"""Operation trace: the collective operations that one bucket issues, over meta tensors."""

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
    """The operations that one bucket issues, round by round; the control report travels with the first."""
    at, packed = AggregationContext(step=STEADY, world=workers), on_meta(layout, dtype)
    aggregation: Script = recipe.compressor.aggregate(packed, recipe.compressor.init(packed, at), at)
    script = coalesce([aggregation, _control(control_bytes)]) if control_bytes else aggregation
    issued: list[CollectiveOp] = []
    answer: Any = None
    while True:
        try:
            issued.append(script.send(answer))
        except StopIteration:
            return issued
        answer = issued[-1].meta_answer(workers, 0)


def on_meta(layout: Layout, dtype: torch.dtype) -> FlatTensors:
    return FlatTensors(torch.empty(layout.numel, dtype=dtype, device="meta"), layout)


def _control(nbytes: int) -> Script:
    yield AllGather((torch.empty(nbytes, dtype=torch.uint8, device="meta"),))
