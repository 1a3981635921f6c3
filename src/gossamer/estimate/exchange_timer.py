"""How long an exchange takes without a network: the real one, while everyone else says the same at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, assert_never

import numpy as np
import torch
from torch import Tensor

from gossamer.compressors import Compressor
from gossamer.core.aggregation import AggregationContext, AggregationResult
from gossamer.core.layout import FlatTensors
from gossamer.core.op_semantics import meta_answer, rank_order_mean
from gossamer.core.ops import AllGather, AllReduceMean, AllToAll, Coalesced, CollectiveOp, InGroup, Payload
from gossamer.estimate.workload_profile import STEADY
from gossamer.gossip.rules import MixingRule, NeighborMessage
from gossamer.reducer.bucket import Bucket
from gossamer.reducer.reduction import (
    NO_INPUT,
    BucketInput,
    Reducible,
    StepReduction,
    StepTrailer,
    with_own,
    without_own,
)
from gossamer.reducer.step_report import NOBODY, Presence, StepReport
from gossamer.strategies import (
    AveragingStage,
    AveragingStrategy,
    GossipStage,
    GradientStage,
    Memory,
    ServerStage,
    Stage,
)
from gossamer.synchronizers.in_flight import OutgoingBucket
from gossamer.synchronizers.stages import Fragments

EXCHANGES = 4  # the first is not counted

Gradients = Mapping[str, Tensor]


@dataclass
class BucketTiming:
    """One bucket's seconds. computing: before the first word, between words, after the last; engine: within words;
    offering, landing: of the training thread, where parameters are averaged."""

    computing: Sequence[float]
    engine: Sequence[float]
    offering: float = 0.0
    landing: float = 0.0


def time_stage(
    stage: Stage, fragments: Fragments, compressor: Compressor, workers: int, fresh: Gradients
) -> list[dict[str, Any]]:
    """Medians for each bucket of a stage, by the names in foretell.MeasuredBucket; `fresh`: what is sent, by name."""
    found = [_once(stage, fragments, compressor, workers, fresh) for _ in range(EXCHANGES)][1:]
    return [_medians(same) for same in zip(*found, strict=True)]


def _once(
    stage: Stage, fragments: Fragments, compressor: Compressor, workers: int, fresh: Gradients
) -> list[BucketTiming]:
    match stage:
        case AveragingStage(strategy=strategy):
            return [each for buckets in fragments for each in turn(strategy, buckets, compressor, workers, fresh)]
        case GossipStage(strategy=strategy):
            return mix(strategy.rule(compressor), fragments[0], fresh)
        case GradientStage() | ServerStage():
            once = late if stage.scheduled else exchange
            return [each for buckets in fragments for each in once(buckets, compressor, workers, fresh)]
        case _:
            assert_never(stage)


def _medians(found: Sequence[BucketTiming]) -> dict[str, Any]:
    return {
        "computing_seconds": np.median([each.computing for each in found], axis=0).tolist(),
        "engine_seconds": np.median([each.engine for each in found], axis=0).tolist(),
        "offering_seconds": median(each.offering for each in found),
        "landing_seconds": median(each.landing for each in found),
    }


# -- everyone else -----------------------------------------------------------------------------------------------------


class _Echo:
    """A transport on which all ranks say what this one says; keeps when it was asked and when it had answered.

    Who was sent a part in an exchange tells of that part in the gather after it: as if what it was sent.
    """

    rank = 0
    links = ""

    def __init__(self, world: int) -> None:
        self.world = world
        self.moments: list[float] = []
        self._parts: tuple[Payload, ...] = ()

    def answer(self, op: CollectiveOp) -> Any:
        self.moments.append(time.perf_counter())
        answer = self._answer(op)
        self.moments.append(time.perf_counter())
        return answer

    def _answer(self, op: CollectiveOp) -> Any:
        match op:
            case AllReduceMean(tensor, out):
                mean = rank_order_mean([tensor] * self.world)
                return mean if out is None else out.copy_(mean)
            case Coalesced(ops):
                return [self._answer(each) for each in ops]
            case InGroup(ranks, inner):
                return _Echo(len(ranks)).answer(inner)
            case AllGather(payload) if self._parts and _shapes(payload) == _shapes(self._parts[self.rank]):
                return list(self._parts)
            case AllToAll(parts):
                self._parts = parts
                return meta_answer(op, self.world, self.rank)
            case _:
                return meta_answer(op, self.world, self.rank)

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        answer = self.answer(op)
        return lambda: answer

    def make_progress(self) -> bool:
        """Everything is answered at once."""
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """They are alike."""

    def all_gather_text(self, text: str) -> list[str]:
        return [text] * self.world

    def part(self, size: int) -> _Echo:
        return _Echo(size)

    def close(self) -> None:
        """There is nobody to leave."""


def _shapes(payload: Payload) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in payload]


# -- exchanges of gradients, and turns of parameters -------------------------------------------------------------------


def exchange(buckets: Sequence[Bucket], compressor: Compressor, workers: int, fresh: Gradients) -> list[BucketTiming]:
    """Exchange gradients once."""
    pairs = [BucketInput([(view, fresh[name]) for name, view in bucket.views.items()]) for bucket in buckets]
    found, all_staged = _travel(buckets, pairs, compressor, workers, without_own)
    for bucket, staged in zip(buckets, all_staged, strict=True):
        bucket.state = staged.next_state.after(bucket.state)
    return found


def late(buckets: Sequence[Bucket], compressor: Compressor, workers: int, fresh: Gradients) -> list[BucketTiming]:
    """Let copies of gradients travel once."""
    parcels, offering = [], []
    for bucket in buckets:
        began = time.perf_counter()
        flat = torch.zeros_like(bucket.flat)
        torch._foreach_copy_([slot.view(flat) for slot in bucket.layout], [fresh[name] for name in bucket.layout.names])
        flat.div_(1.0)  # the loss scale
        offering.append(time.perf_counter() - began)
        parcels.append(OutgoingBucket(bucket, flat, keeps=False))
    found, all_staged = _travel(parcels, [NO_INPUT] * len(parcels), compressor, workers, without_own)
    for timed, seconds, bucket, staged in zip(found, offering, buckets, all_staged, strict=True):
        bucket.state = staged.next_state.after(bucket.state)
        timed.offering = seconds
    return found


@torch.no_grad()
def turn(
    strategy: AveragingStrategy, buckets: Sequence[Bucket], compressor: Compressor, workers: int, fresh: Gradients
) -> list[BucketTiming]:
    """Let parameters take their turn once, and leave them as they are; `fresh` travels as what they changed by."""
    memories = [strategy.begin(_gathered(bucket)) for bucket in buckets]
    offers = [_offer(strategy, bucket, memory) for bucket, memory in zip(buckets, memories, strict=True)]
    for parcel, _ in offers:
        views = [slot.view(parcel.flat) for slot in parcel.layout]
        torch._foreach_copy_(views, [fresh[name] for name in parcel.layout.names])
    keep = with_own if strategy.needs_own else without_own
    found, all_staged = _travel([parcel for parcel, _ in offers], [NO_INPUT] * len(offers), compressor, workers, keep)
    for timed, (parcel, offering), memory, staged in zip(found, offers, memories, all_staged, strict=True):
        parcel.bucket.state = staged.next_state.after(parcel.bucket.state)
        timed.offering, timed.landing = offering, _land(strategy, parcel.bucket, memory, staged)
    return found


@torch.no_grad()
def mix(rule: MixingRule, buckets: Sequence[Bucket], fresh: Gradients) -> list[BucketTiming]:
    """Make a round with one neighbour that says the same; `fresh` is what parameters changed by."""
    found = []
    for bucket in buckets:
        x, at = FlatTensors(_gathered(bucket), bucket.layout), AggregationContext(step=STEADY)
        memory = rule.begin(x.flat)
        for name, view in x.items():
            view.add_(fresh[name])
        moments = [time.perf_counter()]
        offer = rule.offer(x, memory, bucket.state, at, told=1)
        moments += [time.perf_counter()] * 2
        rule.land(x.flat, x.layout, memory, offer, [NeighborMessage(0.5, offer.payload, at)])
        encoding, engine, decoding = np.diff([*moments, time.perf_counter()]).tolist()
        bucket.state = offer.next_state.after(bucket.state)
        found.append(BucketTiming([encoding, decoding], [engine]))
    return found


def _offer(strategy: AveragingStrategy, bucket: Bucket, memory: Memory) -> tuple[OutgoingBucket, float]:
    began = time.perf_counter()
    flat = _gathered(bucket) if strategy.needs_own else _gather(bucket, bucket.flat)
    strategy.offer(flat, memory)
    return OutgoingBucket(bucket, flat, strategy.needs_own), time.perf_counter() - began


def _land(strategy: AveragingStrategy, bucket: Bucket, memory: Memory, staged: AggregationResult) -> float:
    began = time.perf_counter()
    flat = _gathered(bucket)
    strategy.land(flat, memory, staged.mean, staged.own if strategy.needs_own else None)
    torch._foreach_copy_(list(bucket.views.values()), [slot.view(flat) for slot in bucket.layout])  # not the parameters
    return time.perf_counter() - began


def _gathered(bucket: Bucket) -> Tensor:
    return _gather(bucket, torch.empty_like(bucket.flat))


def _gather(bucket: Bucket, flat: Tensor) -> Tensor:
    parameters = [parameter.detach() for parameter in bucket.parameters.values()]
    torch._foreach_copy_([slot.view(flat) for slot in bucket.layout], parameters)
    return flat


def _travel(
    cargo: Sequence[Reducible],
    fresh: Sequence[BucketInput],
    compressor: Compressor,
    workers: int,
    keep: Callable[[AggregationResult], AggregationResult],
) -> tuple[list[BucketTiming], Sequence[AggregationResult]]:
    echo, at = _Echo(workers), AggregationContext(step=STEADY, world=workers)
    names = [name for each in cargo for name in each.layout.names]
    # One after the other, or a bucket's seconds would be told among those of others.
    round_ = StepReduction(compressor, echo, names, at, reference=1.0, weight=1.0, keep=keep, window=1)
    found = []
    for each, pairs in zip(cargo, fresh, strict=True):
        echo.moments = [time.perf_counter()]
        if each is cargo[-1]:
            round_.close(each, pairs, 1.0, _closing(len(names)))
        else:
            round_.exchange(each, pairs, 1.0)
        seconds = np.diff([*echo.moments, time.perf_counter()]).tolist()
        found.append(BucketTiming(seconds[::2], seconds[1::2]))
    return found, round_.staged


def _closing(parameters: int) -> StepTrailer:
    report = StepReport(
        weight=1.0,
        presence=Presence.TRAINING,
        settings=0,
        first_nonfinite=NOBODY,
        used=np.ones(parameters, dtype=bool),
        moved=np.zeros(0, dtype=bool),
    )
    return StepTrailer(report=report, settings="", buffers=())
