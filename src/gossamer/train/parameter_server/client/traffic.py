"""Traffic estimate: bytes that workers and servers exchange in a step, from real encodings of meta tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from gossamer.algorithms.compressors import point_to_point
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.base.ops import payload_bytes
from gossamer.train.parameter_server.client.partition import split
from gossamer.train.parameter_server.client.shard_client import blocks_of
from gossamer.train.parameter_server.from_recipe import PushPullCodecs
from gossamer.train.parameter_server.shard_spec import Block


class ServerTraffic(NamedTuple):
    """Payload bytes to and from one server in a worker's step, and the compressor's state for it."""

    pushed_bytes: int
    pulled_bytes: int
    remembered: State


def server_traffic(
    codecs: PushPullCodecs,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    shards: int,
    at: AggregationContext,
    workers: int = 1,
) -> list[ServerTraffic]:
    """Estimate the traffic of each server, for parameters in one optimizer group.

    A worker pulls one delta per step, or the uncompressed parameters; if staleness is allowed, one delta for each of
    `workers` contributions, or the whole estimate if that is smaller. With local steps this is the traffic of a period,
    with one answer for each fragment; uncompressed answers of a period contain each fragment once.

    Args:
        at: a step after any warm-up.
    """
    deltas, pulls = codecs.strategy.deltas_per_pull(workers), codecs.strategy.schedule.fragments
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    parts = split(Layout.of(shapes), shards, itemsizes)
    groups = dict.fromkeys(shapes, 0)
    return [
        _of_server(
            codecs,
            [_meta_block(each, dtypes) for each in blocks_of(part, shapes, dtypes, groups, codecs.push)],
            at,
            deltas,
            pulls,
        )
        for part in parts
    ]


def _of_server(
    codecs: PushPullCodecs, blocks: Sequence[FlatTensors], at: AggregationContext, deltas: int, pulls: int
) -> ServerTraffic:
    pushed, pulled, whole, remembered = 0, 0, 0, State()
    for number, block in enumerate(blocks):
        state = point_to_point.begin(codecs.push, block, at)
        remembered.update({f"{number}.{key}": value for key, value in state.items()})
        pushed += payload_bytes(point_to_point.encode(codecs.push, block, state, at).payload)
        if codecs.pull is None:
            pulled += block.flat.nbytes
        else:
            missing = FlatTensors(block.flat.to(accumulation_dtype(block.flat.dtype)), block.layout)
            delta = point_to_point.encode(codecs.pull, missing, point_to_point.begin(codecs.pull, missing, at), at)
            pulled, whole = pulled + deltas * payload_bytes(delta.payload), whole + missing.flat.nbytes
    if codecs.pull is not None:
        pulled = pulls * min(pulled, whole)
    return ServerTraffic(pushed, pulled, remembered)


def _meta_block(block: Block, dtypes: Mapping[str, torch.dtype]) -> FlatTensors:
    dtype = dtypes[block.tensors[0][0]]
    return FlatTensors.zeros(block.layout, dtype=dtype, device=torch.device("meta"))
