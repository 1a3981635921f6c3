"""Replayed exchange: one worker's part of an aggregation with recorded answers, to time its own work only."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    payload_bytes,
)
from gossamer.base.runner import simulate

SEED = 11
MOMENTUM = 0.9
ROLL = 7919  # shift between the gradients of two workers


@dataclass
class ReplayedExchange:
    """The aggregation of worker 0 of `at.world`, in a step after the first."""

    compressor: Compressor
    x: FlatTensors
    state: State
    at: AggregationContext
    out: Tensor
    answers: list[Any] = field(default_factory=list)  # recorded, by operation
    read_bytes: int = 0  # of input before each operation; after an all-to-all, of its answer
    sent_bytes: int = 0  # payloads of all operations
    settle: Callable[[], object] = lambda: None  # synchronizes the device before each reading of the clock

    def script(self) -> Aggregation:
        return self.compressor.aggregate(self.x, self.state, self.at, self.out)

    @property
    def least_encode_bytes(self) -> int:
        """Input read once, state read and written once, payloads written once."""
        remembered = sum(packed.flat.nbytes for packed in self.state.values())
        return self.read_bytes + 2 * remembered + self.sent_bytes

    @property
    def least_decode_bytes(self) -> int:
        """The last answer read once, the mean written once."""
        return _answer_bytes(self.answers[-1]) + self.out.nbytes

    def run(self) -> tuple[float, float]:
        """Seconds until the last operation, and seconds after its answer."""
        script, answer, spent = self.script(), None, []
        for recorded in self.answers:
            began = self._now()
            op = script.send(answer)
            spent.append(self._now() - began)
            answer = _repeat(op, recorded)
        began = self._now()
        try:
            script.send(answer)
        except StopIteration:  # payloads and answers are freed later, outside the timing
            return sum(spent), self._now() - began
        raise AssertionError(f"{self.compressor!r} has more operations than before")

    def _now(self) -> float:
        self.settle()
        return time.perf_counter()


def prepare(
    compressor: Compressor,
    layout: Layout,
    worlds: Sequence[int],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[ReplayedExchange]:
    """An exchange for each group size. Exchanges with the same state of the first worker share it.

    The largest such group makes a real first step, so that residuals are realistic.
    """
    x = gradient(layout, device, dtype)
    out = torch.empty_like(x.flat)
    alike: dict[object, list[int]] = {}
    for world in worlds:
        alike.setdefault(_remembered(compressor, layout, world), []).append(world)
    found: dict[int, ReplayedExchange] = {}
    for same in alike.values():
        states = _after_one_step(compressor, x, max(same))
        for world in same:
            at = _places(1, world)
            found[world] = ReplayedExchange(compressor, x, states[0], at[0], out)
            others = [compressor.aggregate(of_rank(x, r), states[r], at[r]) for r in range(1, world)]
            simulate([_recording(found[world]), *others])
    return [found[world] for world in worlds]


def _remembered(compressor: Compressor, layout: Layout, world: int) -> object:
    """A key for the shapes of the first worker's state in a group of this size."""
    blank = FlatTensors.zeros(layout, dtype=torch.float32, device=torch.device("meta"))
    return tuple(
        (key, packed.layout) for key, packed in compressor.init(blank, AggregationContext(world=world)).items()
    )


def gradient(layout: Layout, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> FlatTensors:
    draws = torch.randn(layout.numel, generator=rng.generator(SEED, "gradient"))
    return FlatTensors(draws.to(device=device, dtype=dtype), layout)


def of_rank(x: FlatTensors, rank: int) -> FlatTensors:
    """Another worker's gradient: the same numbers at other positions."""
    return FlatTensors(x.flat.roll(ROLL * rank), x.layout)


def _places(step: int, world: int) -> list[AggregationContext]:
    return [
        AggregationContext(step=step, seed=SEED, rank=rank, world=world, momentum=MOMENTUM) for rank in range(world)
    ]


def _after_one_step(compressor: Compressor, x: FlatTensors, world: int) -> list[State]:
    at = _places(0, world)
    states = [compressor.init(x, here) for here in at]
    inputs = [of_rank(x, rank) for rank in range(world)]
    staged: list[AggregationResult] = simulate(
        [compressor.aggregate(*each) for each in zip(inputs, states, at, strict=True)]
    )
    return [new.next_state.after(old) for new, old in zip(staged, states, strict=True)]


def _recording(exchange: ReplayedExchange) -> Generator[CollectiveOp, Any, AggregationResult]:
    """The exchange's script; it also records its answers."""
    script, answer = exchange.script(), None
    fresh = exchange.x.flat.nbytes  # input of the next operation
    while True:
        try:
            op = script.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        exchange.read_bytes += fresh
        exchange.sent_bytes += payload_bytes(op.tensors())
        answer = yield op
        exchange.answers.append(_kept(op, answer))
        fresh = _answer_bytes(answer) if isinstance(op, AllToAll) else exchange.x.flat.nbytes


def _kept(op: CollectiveOp, answer: Any) -> Any:
    """A copy of the answer if it may be in the compressor's own buffers, such as a mean."""
    match op:
        case AllReduceMean():
            return answer.clone()
        case Coalesced(ops):
            return [_kept(*each) for each in zip(ops, answer, strict=True)]
        case AllGather() | AllToAll() | NeighborAllGather() | InGroup():
            return answer
        case _:
            assert_never(op)


def _repeat(op: CollectiveOp, answers: Any) -> Any:
    """Return a recorded answer."""
    match op:
        case AllReduceMean(_, out):
            return answers.clone() if out is None else out.copy_(answers)
        case Coalesced(ops):
            return [_repeat(*each) for each in zip(ops, answers, strict=True)]
        case AllGather() | AllToAll() | NeighborAllGather() | InGroup():
            return answers
        case _:
            assert_never(op)


def _answer_bytes(answer: Any) -> int:
    return answer.nbytes if isinstance(answer, Tensor) else sum(map(_answer_bytes, answer))
