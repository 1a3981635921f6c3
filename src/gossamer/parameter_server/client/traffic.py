"""What servers and workers send each other in a step, before anyone starts: real letters, of meta tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from gossamer.compressors import Compressor, point_to_point
from gossamer.core.aggregation import AggregationContext, State
from gossamer.core.layout import FlatTensors, Layout, Slot, accumulation_dtype, contiguous_stride
from gossamer.core.ops import payload_bytes
from gossamer.parameter_server.client.partition import ShardSlice, split
from gossamer.parameter_server.from_recipe import PushPullCodecs


class ServerTraffic(NamedTuple):
    """Payload bytes to and from one server in a worker's step, and what the worker remembers of it."""

    pushed_bytes: int
    pulled_bytes: int
    remembered: State


def server_traffic(
    ways: PushPullCodecs,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    shards: int,
    at: AggregationContext,
) -> list[ServerTraffic]:
    """By server, for parameters by name, all in one of the optimizer's groups. at: a step after any warm-up.

    A worker pulls one link in a step, or the parameters as they are.
    """
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    parts = split(Layout.of(shapes), shards, itemsizes)
    return [_of_server(ways, list(_blocks(part, shapes, dtypes, ways.push)), at) for part in parts]


def _of_server(ways: PushPullCodecs, blocks: Sequence[FlatTensors], at: AggregationContext) -> ServerTraffic:
    pushed, pulled, remembered = 0, 0, State()
    for number, block in enumerate(blocks):
        state = point_to_point.begin(ways.push, block, at)
        remembered.update({f"{number}.{key}": value for key, value in state.items()})
        pushed += payload_bytes(point_to_point.encode(ways.push, block, state, at).payload)
        if ways.pull is None:
            pulled += block.flat.nbytes
        else:
            missing = FlatTensors(block.flat.to(accumulation_dtype(block.flat.dtype)), block.layout)
            link = point_to_point.encode(ways.pull, missing, point_to_point.begin(ways.pull, missing, at), at)
            pulled += payload_bytes(link.payload)
    return ServerTraffic(pushed, pulled, remembered)


def _blocks(
    parts: Sequence[ShardSlice],
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    push: Compressor,
) -> Iterator[FlatTensors]:
    """As a worker lays them out: a block for each dtype, and what the compressor treats alike side by side."""

    def group(part: ShardSlice) -> int:
        shape = part.shape(shapes[part.name])
        return push.group(Slot(part.name, shape, 0, contiguous_stride(shape)))

    ordered = sorted(parts, key=group)
    for dtype in dict.fromkeys(dtypes[part.name] for part in ordered):
        layout = Layout.of({part.name: part.shape(shapes[part.name]) for part in ordered if dtypes[part.name] == dtype})
        yield FlatTensors.zeros(layout, dtype=dtype, device=torch.device("meta"))
