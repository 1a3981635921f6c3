"""Shard client: a worker's side of one server's shard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gossamer.algorithms.compressors import Compressor
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout, Slot, contiguous_stride, dtype_name
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import SERVER, Peer, Stamp
from gossamer.errors import AttachError, MalformedError
from gossamer.train.parameter_server import shard_message
from gossamer.train.parameter_server.client.partition import ShardSlice, gather, scatter, split
from gossamer.train.parameter_server.delta_chain import Replica
from gossamer.train.parameter_server.from_recipe import PushPullCodecs
from gossamer.train.parameter_server.shard import has_velocity, push_context
from gossamer.train.parameter_server.shard_message import ShardMessage
from gossamer.train.parameter_server.shard_spec import Block, Options, ShardSpec, name_of, options_of


class ShardClient:
    """Gradient buffer, compressor state and parameter replica for one server's shard."""

    def __init__(
        self, spec: ShardSpec, parts: Mapping[str, ShardSlice], codecs: PushPullCodecs, device: torch.device
    ) -> None:
        self.spec = spec
        self.peer = Peer(SERVER, spec.number)
        self.applied_version = -1  # version of the replica at its last copy to the parameters
        self._parts = [[parts[name] for name, _ in block.tensors] for block in spec.blocks]
        self._push, self._seed = codecs.push, rng.address(spec.seed, spec.number)
        self.gradients = list(spec.zeros(device))
        self.states = shard_message.initial_states(codecs.push, self.gradients, push_context(self._seed, Stamp(0, 0)))
        self.replica = Replica(self.gradients, codecs.pull, self._seed, sender=str(self.peer))

    def gather(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Overwrite the gradient buffer with this server's rows."""
        for parts, packed in zip(self._parts, self.gradients, strict=True):
            gather(tensors, parts, packed)

    def parameters_of(self, tensors: Mapping[str, Tensor]) -> Payload:
        """This server's rows of all tensors: (n,) for each block, on the CPU."""
        found = self.spec.zeros()
        for parts, packed in zip(self._parts, found, strict=True):
            gather(tensors, parts, packed)
        return tuple(packed.flat for packed in found)

    def encode(
        self, stamp: Stamp, options: Sequence[Options] | None = None, fragment: int | None = None
    ) -> ShardMessage:
        """Compress the gradient buffer; `commit` adopts the new state. Raises NotFinite.

        Args:
            options: the optimizer's hyperparameters by group; None means the initial ones.
            fragment: the group of the blocks to compress; None: all blocks.
        """
        groups, at = self.spec.groups if options is None else options, push_context(self._seed, stamp)
        numbers, states = self.spec.blocks_of(fragment), list(self.states)
        blocks = [self.spec.blocks[number] for number in numbers]
        contexts = [
            with_momentum(at, groups[block.group]) if has_velocity(self._push, block.layout) else at for block in blocks
        ]
        message = shard_message.encode(
            self._push, [self.gradients[number] for number in numbers], [states[number] for number in numbers], contexts
        )
        for number, state in zip(numbers, message.states, strict=True):
            states[number] = state
        return message._replace(states=tuple(states))

    def empty_message(self, fragment: int | None = None) -> ShardMessage:
        """A contribution without gradients."""
        return ShardMessage((), (0,) * len(self.spec.blocks_of(fragment)), self.states)

    def commit(self, message: ShardMessage) -> None:
        """Adopt the compressor's new state, after the message was sent."""
        self.states = message.states

    def about(self, options: Sequence[Options], weight: float, counts: Sequence[int], **more: int) -> str:
        """Header of a contribution: hyperparameters by group, weight, tensors by block; fragment and steps."""
        return json.dumps({"groups": options, "weight": weight, "tensors": counts, **more})

    def apply_pull(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite this server's rows of the tensors with the last pulled values."""
        self.scatter(tuple(packed.flat for packed in self.replica.values), tensors)
        self.applied_version = self.replica.version

    # -- local training: `anchors` are the parameters from which the unsent change is measured, by block

    def anchors(self) -> list[FlatTensors]:
        """The last pulled values, in the parameters' dtypes and on their device."""
        found = [FlatTensors(torch.empty_like(block.flat), block.layout) for block in self.gradients]
        for anchor, pulled in zip(found, self.replica.values, strict=True):
            anchor.flat.copy_(pulled.flat)
        return found

    @torch.no_grad()
    def take_change(self, tensors: Mapping[str, Tensor], anchors: list[FlatTensors], fragment: int) -> None:
        """Move a fragment's change since its anchors, which is the pseudo-gradient, into the gradient buffer."""
        for number in self.spec.blocks_of(fragment):
            gather(tensors, self._parts[number], self.gradients[number])
            anchors[number].flat.sub_(self.gradients[number].flat)
            anchors[number], self.gradients[number] = self.gradients[number], anchors[number]

    @torch.no_grad()
    def take_up(self, tensors: Mapping[str, Tensor], anchors: Sequence[FlatTensors], *, keep_change: bool) -> None:
        """Overwrite the parameters with the last pulled values, plus the change since the anchors if it is kept.

        The anchors become the pulled values. This overwrites the gradient buffer.
        """
        for parts, own, anchor, pulled in zip(self._parts, self.gradients, anchors, self.replica.values, strict=True):
            gather(tensors, parts, own)
            own.flat.sub_(anchor.flat)
            anchor.flat.copy_(pulled.flat)
            if keep_change:
                own.flat.add_(anchor.flat)
            else:
                own.flat.copy_(anchor.flat)
            scatter(own, parts, tensors)
        self.applied_version = self.replica.version

    def scatter(self, values: Payload, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite this server's rows of the tensors with `values`: (n,) for each block. Raises MalformedError."""
        for parts, block, flat in zip(self._parts, self.gradients, values, strict=True):
            if flat.shape != block.flat.shape:
                raise MalformedError(
                    f"{self.peer} sent {tuple(flat.shape)} numbers for {tuple(block.flat.shape)}: it was started with "
                    "another model or recipe. Run the same script with the same recipe on every worker"
                )
            scatter(FlatTensors(flat, block.layout), parts, tensors)


def with_momentum(at: AggregationContext, options: Options) -> AggregationContext:
    return replace(at, momentum=float(options["momentum"]), nesterov=bool(options["nesterov"]))


def check_velocities(push: Compressor, optimizer: Optimizer) -> None:
    """Raise AttachError for an optimizer with momentum that workers cannot apply in place of the server."""
    wanted = "Train with torch.optim.SGD(model.parameters(), ...), or push by TopK(density=0.01), which supports all."
    if not isinstance(optimizer, SGD):
        raise AttachError(
            f"{push!r} applies the momentum of torch.optim.SGD on the worker, but this optimizer is a "
            f"{type(optimizer).__name__}, which would apply momentum a second time. {wanted}"
        )
    for setting in ("dampening", "maximize"):
        if any(group[setting] for group in optimizer.param_groups):
            raise AttachError(
                f"{setting} is not supported for momentum that {push!r} applies in place of the optimizer. Leave "
                f"{setting} out, or push by TopK(density=0.01)."
            )


def shard_clients(
    tensors: Mapping[str, Tensor],
    optimizer: Optimizer,
    codecs: PushPullCodecs,
    *,
    recipe: str,
    world: int,
    seed: int,
    shards: int,
) -> list[ShardClient]:
    """Partition a model's parameters over `shards` servers; fewer with too few rows.

    Raises AttachError if servers cannot rebuild the optimizer.
    """
    groups = _groups(tensors, optimizer)
    if any(codecs.push.owns_momentum(slot) for slot in Layout.of({n: tuple(t.shape) for n, t in tensors.items()})):
        check_velocities(codecs.push, optimizer)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    divided = split(Layout.of(shapes), shards, {name: dtype.itemsize for name, dtype in dtypes.items()})
    return [
        ShardClient(
            ShardSpec(
                blocks=tuple(blocks_of(parts, shapes, dtypes, groups, codecs.push)),
                optimizer=name_of(optimizer),
                groups=options_of(optimizer),
                recipe=recipe,
                world=world,
                seed=seed,
                number=number,
                shards=len(divided),
            ),
            {part.name: part for part in parts},
            codecs,
            next(iter(tensors.values())).device,
        )
        for number, parts in enumerate(divided)
    ]


def blocks_of(
    parts: Sequence[ShardSlice],
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    groups: Mapping[str, int],
    push: Compressor,
) -> Iterator[Block]:
    """One block for each dtype, group and place of the momentum, which is the worker's or the optimizer's; in it,
    tensors that the compressor treats alike lie side by side."""

    def slot(part: ShardSlice) -> Slot:
        shape = part.shape(shapes[part.name])
        return Slot(part.name, shape, 0, contiguous_stride(shape))

    found: dict[tuple[str, int, bool], list[ShardSlice]] = {}
    for part in sorted(parts, key=lambda part: push.group(slot(part))):
        kind = (dtype_name(dtypes[part.name]), groups[part.name], push.owns_momentum(slot(part)) is None)
        found.setdefault(kind, []).append(part)
    for (dtype, number, _), members in found.items():
        yield Block(dtype, number, tuple((part.name, part.shape(shapes[part.name])) for part in members))


def _groups(tensors: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, int]:
    """The index of each parameter's group in the optimizer."""
    groups = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
    unknown = [name for name, tensor in tensors.items() if id(tensor) not in groups]
    if unknown:
        raise AttachError(
            f'"{unknown[0]}" is not in this optimizer, so no server would ever move it. Put it into the optimizer, '
            "or freeze it by requires_grad_(False)."
        )
    return {name: groups[id(tensor)] for name, tensor in tensors.items()}
