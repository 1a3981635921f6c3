"""Memory of a step's reduction: what is alive at once follows from the buckets in flight, not from the model's size."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext, AggregationResult
from gossamer.base.ops import AllReduceMean, Coalesced, CollectiveOp, Payload
from gossamer.base.transport import Transport
from gossamer.train.engine.bucket import NO_INPUT, Bucket
from gossamer.train.engine.bucket_reduction import StepReduction, without_own

WORLD, SIDE = 4, 256
BUCKET_BYTES = 4 * SIDE * SIDE
FEW, MANY = 3, 8  # buckets; with FEW the pipeline is full
IN_FLIGHT = 2.05  # buckets' worth of payloads, and of what they are made of, at the most: two travel

RECIPES = ["Dense()", "Dense(dtype='bfloat16')", "Int8()", "Float4()", "TopK(0.01)", "OneBit()", "PowerSGD(rank=4)"]


class Echo:
    """A transport over which every rank sends what this one does; `watch` is called whenever something has left."""

    rank, world = 0, WORLD

    def __init__(self, watch: Callable[[], None]) -> None:
        self._watch = watch

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        heard = _heard(op)
        self._watch()
        return lambda: heard


def _heard(op: CollectiveOp) -> Any:
    match op:
        case Coalesced(ops):
            return [_heard(each) for each in ops]
        case AllReduceMean():
            return op.meta_answer(WORLD, 0)
        case _:
            payloads: list[Payload] = op.meta_answer(WORLD, 0)
            return [tuple(tensor.clone() for tensor in payload) for payload in payloads]


def alive_bytes() -> int:
    """Of the memory of all tensors, each counted once."""
    storages = (each.untyped_storage() for each in gc.get_objects() if type(each) in (Tensor, Parameter))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


Keep = Callable[[AggregationResult], AggregationResult]


def made_step(step: int, compressor: Compressor, buckets: Sequence[Bucket], keep: Keep) -> int:
    """The bytes that were alive at once during a step."""
    for bucket in buckets:
        torch.arange(bucket.flat.numel(), out=bucket.flat).sin_()
    seen = [0]
    transport = cast(Transport, Echo(lambda: seen.append(alive_bytes())))
    at, names = AggregationContext(world=WORLD, step=step), [name for bucket in buckets for name in bucket.parameters]
    reduction = StepReduction(compressor, transport, names, at, 1.0, 1.0, keep=keep)
    for bucket in buckets:
        reduction.exchange(bucket, NO_INPUT, 1.0)
    reduction._pipeline.finish()
    seen.append(alive_bytes())
    for bucket, (_, staged) in zip(buckets, sorted(reduction._staged.items()), strict=True):
        bucket.commit(staged.next_state, set(bucket.parameters), 1.0)
    return max(seen)


def peak_bytes(recipe: str, count: int, keep: Keep) -> int:
    """Alive at once in the second step, beyond what was before it: buckets and what compressors remember."""
    compressor = resolve(recipe, WORLD).compressor
    start = AggregationContext(world=WORLD)
    buckets = [Bucket({f"{k}": Parameter(torch.zeros(SIDE, SIDE))}, compressor, start) for k in range(count)]
    made_step(0, compressor, buckets, keep)
    gc.collect()
    before = alive_bytes()
    return made_step(1, compressor, buckets, keep) - before


@pytest.fixture(autouse=True)
def _nothing_older_is_looked_at() -> None:
    gc.freeze()


def check(recipe: str, keep: Keep = without_own) -> None:
    few, many = peak_bytes(recipe, FEW, keep), peak_bytes(recipe, MANY, keep)
    assert few <= IN_FLIGHT * BUCKET_BYTES
    assert many - few <= 0.02 * MANY * BUCKET_BYTES, "what is not of the buckets in flight was kept"


@pytest.mark.parametrize("recipe", RECIPES)
def test_more_buckets_hold_no_more_memory(recipe: str) -> None:
    check(recipe)


@pytest.mark.parametrize("inner", ["TopK(0.01)", "Sharded(Float4())"])
def test_a_widened_residual_is_freed_before_its_bucket_travels(inner: str) -> None:
    """Without it, two buckets in flight hold a float32 residual each."""
    narrow = f"Feedback({inner}, dtype='bfloat16')"
    assert peak_bytes(narrow, MANY, without_own) <= peak_bytes(f"Feedback({inner})", MANY, without_own) + 1024


def test_the_check_catches_payloads_that_are_kept_until_the_commit() -> None:
    """Twin: each bucket's own contribution stays computable."""
    with pytest.raises(AssertionError):
        check("Int8()", keep=lambda staged: staged)
