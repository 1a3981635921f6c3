"""Rung costs: bytes, messages and computing time of a step on each rung, by the real aggregations over meta tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gossamer.base.layout import dtype_of
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, Coalesced, CollectiveOp, InGroup, NeighborAllGather
from gossamer.comm.runtime.pipeline import DEPTH
from gossamer.events import Attached
from gossamer.train.auto.ladder import LadderRung
from gossamer.train.traffic.op_trace import trace_ops
from gossamer.train.traffic.traffic import estimate_traffic

BUFFER_TRIPS = 2  # of a broadcast: parts are sent, and passed on; of a mean: there and back


@dataclass(frozen=True, kw_only=True)
class RungCost:
    """Costs of a rung for one worker in a step, on average over its period."""

    name: str
    steps: float  # to a loss, relative to Dense()
    period: int  # steps between two rounds; 1: gradients are averaged in every step
    bytes_sent: float  # payload
    trips: float  # sequential one-way messages
    codec_seconds: float  # of the communication thread, used until it is measured
    shares: tuple[float, ...] = (1.0,)  # of the gradients, in each bucket, in the order in which they are sent

    @property
    def local(self) -> bool:
        return self.period > 1


def rung_costs(
    rungs: Sequence[LadderRung], model: Attached, workers: int, *, adaptive: bool, buffers: Sequence[int] = ()
) -> tuple[RungCost, ...]:
    """Price the rungs for a model attached with any of them. Bytes are exact.

    Args:
        buffers: bytes of each buffer that training changes, such as BatchNorm's statistics. In lock step one rank
            broadcasts each of them separately, which on a slow network is most of a step; local steps average them at
            a merge.
    """
    return tuple(_cost(rung, model, workers, rung.steps(adaptive=adaptive), buffers) for rung in rungs)


def _cost(rung: LadderRung, model: Attached, workers: int, steps: float, buffers: Sequence[int]) -> RungCost:
    recipe = rung.recipe(workers)
    period, local = rung.period, rung.period > 1
    model = replace(
        model,
        fragments=(0,) * len(model.layouts),
        buffer_bytes=0 if local else sum(buffers),
        rider_bytes=(float(sum(buffers)),) if local else (),
    )
    ops = [trace_ops(recipe, layout, dtype_of(text), workers) for text, layout in model.layouts]
    at_once = min(len(ops), DEPTH)  # buckets are sent concurrently
    trips = sum(_trips(op) for bucket in ops for op in bucket) / at_once
    trips += local + BUFFER_TRIPS * (min(len(buffers), 1) if local else len(buffers))  # a participation poll
    bucket_bytes = [dtype_of(text).itemsize * layout.numel for text, layout in model.layouts]
    return RungCost(
        name=rung.name,
        steps=steps,
        period=period,
        bytes_sent=estimate_traffic(recipe, model, workers=workers).bytes_sent,
        trips=trips / period,
        codec_seconds=sum(bucket_bytes) / rung.codec_bytes_per_second / period,
        shares=tuple(nbytes / sum(bucket_bytes) for nbytes in bucket_bytes),
    )


def _trips(op: CollectiveOp) -> int:
    """One-way messages of an operation. A mean is sent to the owners of its parts and back, regardless of hops."""
    match op:
        case AllReduceMean():
            return 2
        case Coalesced(ops):
            return max(map(_trips, ops), default=0)
        case AllGather() | AllToAll() | NeighborAllGather() | InGroup():
            return 1
