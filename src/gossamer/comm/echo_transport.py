"""Replay transport: completes collective operations at once without a network, and times the computation between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.kernels import half_decode
from gossamer.base.layout import FlatTensors
from gossamer.base.op_semantics import rank_order_mean
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Payload,
)

WIDE_BYTES = 4  # element size from which on sums need no conversion


@dataclass
class ScriptSeconds:
    """Times of one replayed script."""

    computing: list[float] = field(default_factory=list)  # before the first operation, between them, after the last
    engine: list[float] = field(default_factory=list)  # within each operation


class ReplayTransport:
    """Rank 0 of a group in which all other ranks send the same as this one, or the results come from `answer`.

    Scripts advance one at a time, in one thread. Time is attributed to the script that was resumed last.
    """

    rank = 0
    links = ""

    def __init__(self, world: int, answer: Callable[[CollectiveOp], Any] | None = None) -> None:
        self.world = world
        self.scripts: list[ScriptSeconds] = []  # in the order in which they began
        self._answer = answer or Echo(world).answer
        self._running: ScriptSeconds | None = None
        self._since = time.perf_counter()

    def begin_script(self) -> ScriptSeconds:
        """Begin a script. The computation since the last `pause` is attributed to it."""
        if self._running is None or self._running.engine:
            self._end_turn()
            self._running = ScriptSeconds()
            self.scripts.append(self._running)
        return self._running

    def pause(self) -> None:
        """End the current attribution. Computation from here on belongs to the next script."""
        self._end_turn()
        self._since = time.perf_counter()

    def _end_turn(self) -> None:
        if self._running is not None:
            self._running.computing.append(self._lap())
        self._running = None

    def _lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        script = self._running or self.begin_script()
        script.computing.append(self._lap())
        answer = self._answer(op)
        script.engine.append(self._lap())
        self._running = None

        def wait() -> Any:
            self.pause()
            self._running = script
            return answer

        return wait

    def make_progress(self) -> bool:
        """Return False: all operations are complete."""
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Do nothing: the tensors are equal on all ranks."""

    def all_gather_text(self, text: str) -> list[str]:
        return [text] * self.world

    def part(self, size: int) -> ReplayTransport:
        return ReplayTransport(size)

    def close(self) -> None:
        """Do nothing: there is no group."""


class Echo:
    """Results as if all ranks sent the same as this one.

    In an all-gather after an all-to-all, each rank's payload is the part that this rank has sent to it.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._parts: tuple[Payload, ...] = ()

    def answer(self, op: CollectiveOp) -> Any:
        match op:
            case AllReduceMean(tensor, out) if tensor.element_size() < WIDE_BYTES:
                return _half_mean(tensor, out, self._world)
            case AllReduceMean(tensor, out):
                return _reduced(tensor, self._world, out)
            case Coalesced(ops):
                return [self.answer(each) for each in ops]
            case InGroup(ranks, inner):
                return Echo(len(ranks)).answer(inner)
            case AllGather(payload) if self._parts and _shapes(payload) == _shapes(self._parts[0]):
                return list(self._parts)
            case AllToAll(parts):
                self._parts = parts
                return op.meta_answer(self._world, 0)
            case AllGather() | NeighborAllGather():
                return op.meta_answer(self._world, 0)
            case _:
                assert_never(op)


def _half_mean(tensor: Tensor, out: Tensor | None, world: int) -> Tensor:
    """Perform one rank's work: its own part is converted, summed and rounded, and the data of both rounds is copied
    once, as by sockets. The mean of equal numbers is the number itself."""
    mean = torch.empty_like(tensor) if out is None else out
    piece, *other_pieces = tensor.reshape(-1).tensor_split(world)
    _, *places = mean.view(-1).tensor_split(world)
    contributions, sent = piece.new_empty((world, piece.numel())), torch.empty_like(piece)
    contributions.copy_(piece)
    for part in other_pieces:
        sent[: part.numel()].copy_(part)
    total = torch.empty(piece.shape, device=piece.device)  # float32
    half_decode(contributions.unbind(), total, world)
    mean.view(-1)[: piece.numel()].copy_(total)
    for part, place in zip(other_pieces, places, strict=True):
        sent.copy_(piece)
        place.copy_(part)
    return mean


def _reduced(tensor: Tensor, world: int, out: Tensor | None) -> Tensor:
    """Mean of equal tensors, with one rank's work: it sums its own part, and copies the others."""
    part = tensor.reshape(-1)[: -(-tensor.numel() // world)]
    mean = tensor.clone() if out is None else out.copy_(tensor)
    mean.view(-1)[: len(part)] = rank_order_mean([part] * world)
    return mean


def _shapes(payload: Payload) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in payload]


@Compressor.register  # other attributes are those of the wrapped compressor
@dataclass(frozen=True)
class TimedCompressor:
    """Wraps a compressor, to mark for a replay transport where the script of each bucket begins."""

    compressor: Compressor
    transport: ReplayTransport
    scripts: list[ScriptSeconds] = field(default_factory=list)  # by bucket, in the order in which they began

    def init(self, x: FlatTensors, at: AggregationContext) -> State:
        return self.compressor.init(x, at)

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        script = self.transport.begin_script()
        if not self.scripts or self.scripts[-1] is not script:
            self.scripts.append(script)
        return self.compressor.aggregate(x, state, at, out)
