"""One server's part of a model, as a worker sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.compressors import Compressor
from gossamer.core import rng
from gossamer.core.layout import FlatTensors, Layout, Slot, contiguous_stride, dtype_name
from gossamer.core.ops import Payload
from gossamer.core.peer_ops import SERVER, Peer, Stamp
from gossamer.errors import AttachError, MalformedError
from gossamer.parameter_server import shard_message
from gossamer.parameter_server.client.partition import ShardSlice, gather, scatter, split
from gossamer.parameter_server.delta_chain import Replica
from gossamer.parameter_server.from_recipe import PushPullCodecs
from gossamer.parameter_server.shard import push_at
from gossamer.parameter_server.shard_message import ShardCodec
from gossamer.parameter_server.shard_spec import Block, Options, ShardSpec, name_of, options_of


class ShardClient:
    """A buffer for its gradients, what the compressor remembers about them, and a copy of its parameters.

    landed: the version that the worker's parameters are of.
    """

    def __init__(
        self, description: ShardSpec, parts: Mapping[str, ShardSlice], ways: PushPullCodecs, device: torch.device
    ) -> None:
        self.description = description
        self.peer = Peer(SERVER, description.number)
        self.landed = -1
        self._parts = [[parts[name] for name, _ in block.tensors] for block in description.blocks]
        self._push, self._seed = ways.push, rng.address(description.seed, description.number)
        self.gradients = description.zeros(device)
        self.states = shard_message.begin(ways.push, self.gradients, push_at(self._seed, Stamp(0, 0)))
        self.copy = Replica(self.gradients, ways.pull, self._seed)

    def gather(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Overwrite the buffer with this server's rows."""
        for parts, packed in zip(self._parts, self.gradients, strict=True):
            gather(tensors, parts, packed)

    def values(self, tensors: Mapping[str, Tensor]) -> Payload:
        """This server's rows of all tensors: (n,) for each block, on the CPU."""
        found = self.description.zeros()
        for parts, packed in zip(self._parts, found, strict=True):
            gather(tensors, parts, packed)
        return tuple(packed.flat for packed in found)

    def write(self, stamp: Stamp) -> ShardCodec:
        """Encode the buffer. Raises NotFinite."""
        return shard_message.write(self._push, self.gradients, self.states, push_at(self._seed, stamp))

    def commit(self, written: ShardCodec) -> None:
        """What was written is sent."""
        self.states = written.states

    def land(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite this server's rows of the tensors with what was pulled last."""
        self.put(tuple(packed.flat for packed in self.copy.values), tensors)
        self.landed = self.copy.version

    def put(self, values: Payload, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite this server's rows of the tensors with `values`: (n,) for each block. Raises MalformedError."""
        for parts, block, flat in zip(self._parts, self.gradients, values, strict=True):
            if flat.shape != block.flat.shape:
                raise MalformedError(f"{self.peer} sent {tuple(flat.shape)} numbers for {tuple(block.flat.shape)}")
            scatter(FlatTensors(flat, block.layout), parts, tensors)

    def about(self, options: Sequence[Options], weight: float, counts: Sequence[int]) -> str:
        return json.dumps({"groups": options, "weight": weight, "tensors": counts})


def shard_clients(
    tensors: Mapping[str, Tensor],
    optimizer: Optimizer,
    ways: PushPullCodecs,
    *,
    recipe: str,
    world: int,
    seed: int,
    shards: int,
) -> list[ShardClient]:
    """Divide a model's parameters over so many servers, or fewer where there are not rows enough.

    Raises AttachError for an optimizer that cannot live there.
    """
    groups = _groups(tensors, optimizer)
    layout = Layout.of({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    divided = split(layout, shards, {name: tensor.element_size() for name, tensor in tensors.items()})
    return [
        ShardClient(
            ShardSpec(
                blocks=tuple(_blocks(parts, tensors, groups, ways.push)),
                optimizer=name_of(optimizer),
                groups=options_of(optimizer),
                recipe=recipe,
                world=world,
                seed=seed,
                number=number,
                shards=len(divided),
            ),
            {part.name: part for part in parts},
            ways,
            next(iter(tensors.values())).device,
        )
        for number, parts in enumerate(divided)
    ]


def _blocks(
    parts: Sequence[ShardSlice], tensors: Mapping[str, Tensor], groups: Mapping[str, int], push: Compressor
) -> Iterator[Block]:
    """One block for each dtype and group; in it, tensors that the compressor treats alike lie side by side."""

    def group(part: ShardSlice) -> int:
        shape = part.shape(tensors[part.name].shape)
        return push.group(Slot(part.name, shape, 0, contiguous_stride(shape)))

    found: dict[tuple[str, int], list[ShardSlice]] = {}
    for part in sorted(parts, key=group):
        kind = (dtype_name(tensors[part.name].dtype), groups[part.name])
        found.setdefault(kind, []).append(part)
    for (dtype, number), members in found.items():
        yield Block(dtype, number, tuple((part.name, part.shape(tensors[part.name].shape)) for part in members))


def _groups(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, int]:
    """Which of the optimizer's groups each parameter is in."""
    places = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
    strangers = [name for name, tensor in tensors.items() if id(tensor) not in places]
    if strangers:
        raise AttachError(
            f'"{strangers[0]}" is not in this optimizer, so no server would ever move it. Put it into the optimizer, '
            "or freeze it by requires_grad_(False)."
        )
    return {name: places[id(tensor)] for name, tensor in tensors.items()}
