"""Operation trace: the collective operations that one bucket issues, over meta tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.aggregation import STEADY, AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, CollectiveOp, Script, coalesce


@dataclass(frozen=True)
class BucketTrace:
    """Operations and state of one bucket's aggregation, round by round."""

    ops: tuple[CollectiveOp, ...]
    remembered: tuple[tuple[str, int], ...]  # (key, bytes)


@lru_cache(maxsize=1024)
def trace_bucket(compressor: Compressor, layout: Layout, dtype: torch.dtype, workers: int) -> BucketTrace:
    """Run one worker's aggregation over meta tensors; results are cached."""
    at, packed = AggregationContext(step=STEADY, world=workers), on_meta(layout, dtype)
    state = compressor.init(packed, at)
    remembered = tuple((key, each.flat.nbytes) for key, each in state.items())
    return BucketTrace(tuple(_issued(compressor.aggregate(packed, state, at), workers)), remembered)


def trace_ops(
    recipe: Recipe, layout: Layout, dtype: torch.dtype, workers: int, control_bytes: int = 0
) -> list[CollectiveOp]:
    """The operations that one bucket issues, round by round; the control report is part of the first one."""
    ops = trace_bucket(recipe.compressor, layout, dtype, workers).ops
    return _issued(coalesce([_script_of(ops), _control(control_bytes)]), workers) if control_bytes else [*ops]


def _issued(script: Script, workers: int) -> list[CollectiveOp]:
    issued: list[CollectiveOp] = []
    answer: Any = None
    while True:
        try:
            issued.append(script.send(answer))
        except StopIteration:
            return issued
        answer = issued[-1].meta_answer(workers, 0)


def _script_of(ops: Sequence[CollectiveOp]) -> Script:
    for op in ops:  # noqa: UP028 - yielding from a tuple takes no answers
        yield op


def on_meta(layout: Layout, dtype: torch.dtype) -> FlatTensors:
    return FlatTensors(torch.empty(layout.numel, dtype=dtype, device="meta"), layout)


def _control(nbytes: int) -> Script:
    yield AllGather((torch.empty(nbytes, dtype=torch.uint8, device="meta"),))
