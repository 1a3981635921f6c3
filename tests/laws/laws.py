"""The laws as functions that raise AssertionError, so that broken twins can be shown to break them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from support.aggregations import aggregate, priced_bytes
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import run_script
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import NotFinite

SHAPES = {
    "matrix": (12, 20),
    "bias": (20,),
    "small": (8, 6),
    "kernel": (6, 5, 3, 3),
    "one": (1,),
    "wide": (16, 33),
}
LAYOUT = Layout.of(SHAPES)
WORLDS = [2, 3, 4, 5, 8]


class Group:
    """`world` virtual workers that aggregate in lock step and commit what was staged."""

    def __init__(
        self,
        compressor: Compressor,
        world: int,
        *,
        dtype: torch.dtype = torch.float64,
        layout: Layout = LAYOUT,
    ) -> None:
        self.compressor, self.world, self.layout, self.dtype, self.step = compressor, world, layout, dtype, 0
        blank = FlatTensors.zeros(layout, dtype=dtype, device=torch.device("cpu"))
        self.states: list[State] = [compressor.init(blank, self.at(rank)) for rank in range(world)]

    def at(self, rank: int) -> AggregationContext:
        return AggregationContext(step=self.step, seed=7, rank=rank, world=self.world)

    def gradients(self, seed: int = 0) -> list[Tensor]:
        """Unequal data: each rank leans its own way."""
        return [
            (
                torch.randn(self.layout.numel, generator=rng.generator(seed, rank, self.step), dtype=self.dtype)
                + torch.randn(self.layout.numel, generator=rng.generator(seed, rank), dtype=self.dtype)
            )
            for rank in range(self.world)
        ]

    def aggregate(self, gradients: Sequence[Tensor]) -> list[AggregationResult]:
        staged = aggregate(self.compressor, [x.clone() for x in gradients], self.layout, self.states, at=self.at)
        self.states = [each.next_state.after(old) for each, old in zip(staged, self.states, strict=True)]
        self.step += 1
        return staged

    def aggregate_into(self, gradients: Sequence[Tensor], into: Sequence[Tensor]) -> list[AggregationResult]:
        """The means written where each rank wants its own; nothing is committed."""
        return aggregate(self.compressor, gradients, self.layout, self.states, into, self.at)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


def check_own(compressor: Compressor, world: int, *, tolerance: float = 1e-11, steps: int = 3) -> None:
    """Law 1: the mean over workers of own is the mean, and every rank receives identical bits."""
    group = Group(compressor, world)
    owed = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for _ in range(steps):
        staged = group.aggregate(group.gradients())
        own = torch.stack([each.own for each in staged]).mean(0)
        for each in staged[1:]:
            assert torch.equal(each.mean, staged[0].mean), "ranks received different bits"
        shares = [each.owed for each in staged if each.owed is not None]
        now = torch.stack(shares).sum(0) if shares else torch.zeros_like(owed)
        close(own, staged[0].mean + now - owed, tolerance)
        owed = now


def check_conservation(
    compressor: Compressor, world: int, *, tolerance: float = 1e-10, steps: int = 6, decay: float = 1.0
) -> None:
    """Law 2: what was sent, the mean residual and what is owed add up to what was given, less what decayed."""
    group = Group(compressor, world)
    given = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    sent = torch.zeros_like(given)
    for _ in range(steps):
        gradients = group.gradients()
        given += torch.stack(gradients).mean(0) - (1 - decay) * mean_residual(group)
        staged = group.aggregate(gradients)
        sent += staged[0].mean
    owed = mean_residual(group)
    for each in staged:
        if (share := each.owed) is not None:
            owed += share
    close(sent + owed, given, tolerance)


def mean_residual(group: Group) -> Tensor:
    """The mean over the workers of what feedback has left: (n,)."""
    mean = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for state in group.states:
        for key, packed in state.items():
            if key.endswith("residual"):
                for name, view in packed.items():
                    LAYOUT.by_name[name].view(mean).add_(view / group.world)
    return mean


def check_zeros(compressor: Compressor, world: int) -> None:
    """Zeros in, zeros out, also at once after something else was a dead layer for a while."""
    group = Group(compressor, world, dtype=torch.float32)
    for _ in range(3):
        for staged in group.aggregate([torch.zeros(LAYOUT.numel) for _ in range(world)]):
            assert torch.equal(staged.mean, torch.zeros_like(staged.mean)), "zeros became something"
    gradients = group.gradients()
    for _ in range(3):
        staged = group.aggregate(gradients)
    assert torch.isfinite(staged[0].mean).all()
    assert float(staged[0].mean.abs().sum()) > 0, "a dead layer never came back"


def check_refuses_to_send_nonsense(compressor: Compressor) -> None:
    """A number that is not finite is noticed before the first op, wherever it lies; nothing is remembered."""
    group = Group(compressor, 2, dtype=torch.float32)
    for number in (math.nan, math.inf, -math.inf):
        for slot in LAYOUT:
            x = group.gradients()[0]
            slot.flat_view(x)[-1] = number
            with pytest.raises(NotFinite):
                next(compressor.aggregate(FlatTensors(x, LAYOUT), group.states[0], group.at(0)))


def check_bytes(compressor: Compressor, world: int, formula: Callable[[int], float]) -> None:
    """Law 3: priced on meta tensors, counted while performing, and the formula: the same number."""
    priced = priced_bytes(compressor, world, LAYOUT)
    assert priced == formula(world), f"priced {priced}, the formula says {formula(world)}"
    counted = {performed.bytes_sent for performed in perform_together(compressor, world)}
    assert counted == {priced}, f"counted {counted}, priced {priced}"


def perform_together(compressor: Compressor, world: int) -> list[Any]:
    """One aggregation per rank, each in a thread, over transports that meet in this process."""
    group = Group(compressor, world, dtype=torch.float32)
    transports = SimulatedGroup(world).transports
    gradients = group.gradients()

    def work(rank: int) -> Any:
        x = FlatTensors(gradients[rank], LAYOUT)
        return run_script(compressor.aggregate(x, group.states[rank], group.at(rank)), transports[rank])

    return in_threads(work, world)


def in_threads(work: Callable[[int], Any], world: int) -> list[Any]:
    """Run work(rank) in a thread per rank; raise the first failure that is not merely somebody else's.

    Threads of their own, no executor's: a process that is forked in one of those, as a DataLoader's worker is, would
    join its own thread when it ends, and end with an error.
    """
    results: list[Any] = [None] * world
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as failure:
            failures[rank] = failure

    threads = [Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        by_rank = [failure for _, failure in sorted(failures.items())]
        raise next((failure for failure in by_rank if type(failure).__name__ != "PeerLost"), by_rank[0])
    return results


def check_untouched(compressor: Compressor) -> None:
    """A transaction: aggregating changes neither the state nor the input it was given."""
    group = Group(compressor, 3)
    group.aggregate(group.gradients())
    before = [{key: packed.flat.clone() for key, packed in state.items()} for state in group.states]
    states = group.states
    inputs = group.gradients()
    kept = [x.clone() for x in inputs]
    aggregate(compressor, inputs, LAYOUT, states, at=group.at)
    for state, old in zip(states, before, strict=True):
        for key, packed in state.items():
            assert torch.equal(packed.flat, old[key]), f"{key} was written before the commit"
    for x, old_x in zip(inputs, kept, strict=True):
        if not torch.equal(x, old_x):
            raise AssertionError("the input was written although no `out` was given")


def check_in_place(compressor: Compressor, world: int) -> None:
    """Writing the mean over the input gives the same bits and the same next state as writing it elsewhere."""
    group = Group(compressor, world, dtype=torch.float32)
    inputs = group.gradients()

    def run(outs: Sequence[Tensor | None]) -> list[AggregationResult]:
        given = [x if out is None else out for x, out in zip(inputs, outs, strict=True)]
        return aggregate(compressor, given, LAYOUT, group.states, outs, group.at)

    apart = run([None] * world)
    apart = [replace(each, mean=each.mean.clone()) for each in apart]
    over = [x.clone() for x in inputs]
    together = run(over)
    for a, b, out in zip(apart, together, over, strict=True):
        assert b.mean.data_ptr() == out.data_ptr()
        assert torch.equal(a.mean.to(out.dtype), out), "the mean differs when written in place"
        for key in a.next_state:
            assert torch.equal(a.next_state[key].flat, b.next_state[key].flat), f"{key} differs when in place"
