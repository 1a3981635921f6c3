"""Tensor sampler: measures now and then what each tensor of a bucket costs, and what of it waits for later steps.

One bucket at a time, in turn, on the communication thread, right after its aggregation, while something listens:

    gradient_norm = |x|, residual_norm = |r'|, energy_share = 1 - |wanted - own|^2 / |wanted|^2

x is what this worker gives (gradients, or how far its parameters went), own its part of the mean, r' what it keeps for
later. wanted = own + r' where something is kept, since a residual holds just what did not go; else x. Under differences
(EF21) wanted is what is told, and what others do not know of it waits. What cannot be told apart is None.

bytes: those of the bucket's operations, divided as the tensors' own would be if each traveled alone.
law:   they add up to the bucket's; without compression energy_share is 1 and residual_norm 0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.feedback_rules import KNOWN, SMOOTHED
from gossamer.algorithms.compressors.ownership import UpdateRule
from gossamer.algorithms.compressors.sharded import is_unsent
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Layout, Slot
from gossamer.base.ops import Script
from gossamer.base.runner import price
from gossamer.events import TensorCost

SAMPLE_SECONDS = 1.0  # between two samples, at least, once every bucket has had its first
SAMPLE_SHARE = 0.005  # of the communication thread's time, at most
CHUNK = 2**18  # elements that are measured at once, in float64

Energy = Tensor | float  # a sum of squares, on the device of what was summed


class TensorSampler:
    """Chooses buckets to measure, measures them, and emits events.TensorsTold. steps: made so far."""

    def __init__(self, steps: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._steps, self._clock = steps, clock
        self._due = -inf
        self._measured: set[str] = set()  # buckets of this turn, by their first tensor
        self._passed: set[str] = set()  # of them, those that came by again since the last sample
        self._went_round, self._cold = False, True
        self._alone: dict[str, Sequence[float]] = {}  # bytes of each tensor by itself

    def takes(self, layout: Layout) -> bool:
        """Whether the bucket that is about to be aggregated is to be measured."""
        if self._clock() < self._due or not events.sampled() or not layout.names or not self._steps():
            return False  # the first step is that of all imports and first allocations, and nothing waits yet
        name = layout.names[0]
        if name in self._measured and name not in self._passed:
            self._passed.add(name)  # another may have had no turn yet
            return False
        if name in self._measured:
            self._went_round, self._measured = True, set()
        self._measured.add(name)
        self._passed = set()
        return True

    def measure(
        self, compressor: Compressor, x: FlatTensors, staged: AggregationResult, nbytes: float, at: AggregationContext
    ) -> None:
        """Tell of a bucket. x: as it was given to the compressor; nbytes: that its operations have sent.

        An error ends the samples, and not the training that they look at.
        """
        try:
            costs = self._bytes(compressor, x, nbytes, at)  # priced once
            began = self._clock()
            rows = self._rows(compressor, x, staged, costs)
        except Exception as error:
            self._due = inf
            events.notice(f"what tensors cost is not measured any more ({type(error).__name__}: {error})")
            return
        events.emit(events.TensorsTold(step=self._steps(), tensors=rows))
        ended = self._clock()
        least = SAMPLE_SECONDS if self._went_round or self._cold else 0.0
        took = 0.0 if self._cold else ended - began  # the first, which finds nothing in caches, is no measure of others
        self._due, self._cold = ended + max(least, took / SAMPLE_SHARE), False

    def _rows(
        self, compressor: Compressor, x: FlatTensors, staged: AggregationResult, costs: Sequence[float]
    ) -> tuple[TensorCost, ...]:
        own = staged.own
        energies = [_energies(slot, compressor, x, own, staged.next_state) for slot in x.layout]
        return tuple(
            _row(slot, cost, *found) for slot, cost, found in zip(x.layout, costs, _on_host(energies), strict=True)
        )

    def _bytes(self, compressor: Compressor, x: FlatTensors, nbytes: float, at: AggregationContext) -> Sequence[float]:
        key = f"{at.world} {x.layout.names[0]}"
        if key not in self._alone:
            self._alone[key] = [_alone(compressor, slot, x.flat.dtype, at) for slot in x.layout]
        return apportioned(nbytes, self._alone[key], x.layout.sizes)


def apportioned(nbytes: float, alone: Sequence[float], sizes: Sequence[int]) -> Sequence[float]:
    """A bucket's bytes by tensor, as those of each alone; by size where they would send nothing."""
    parts = alone if sum(alone) > 0 else sizes
    whole = sum(parts)
    return [nbytes * part / whole if whole else 0.0 for part in parts]


def _alone(compressor: Compressor, slot: Slot, dtype: torch.dtype, at: AggregationContext) -> float:
    """Bytes that this worker would send for one tensor."""
    layout = Layout((Slot(slot.name, slot.shape, 0, slot.stride),))
    like = FlatTensors(torch.empty(slot.numel, dtype=dtype, device="meta"), layout)
    script = compressor.aggregate(like, compressor.init(like, at), at)
    return sum(cost.bytes_sent for cost in price(script, at.world, at.rank))


@dataclass
class Metered:
    """Adds up the bytes of a script's operations."""

    nbytes: float = field(init=False, default=0.0)

    def run(self, script: Script, at: AggregationContext) -> Generator[Any, Any, Any]:
        answer: Any = None
        while True:
            try:
                op = script.send(answer)
            except StopIteration as stop:
                return stop.value
            self.nbytes += op.bytes_sent(at.world, at.rank)
            answer = yield op


# -- energies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kept:
    """What a state remembers of one tensor."""

    unsent: Sequence[Tensor]
    known: Tensor | None
    smoothed: Tensor | None


def _kept(state: State, slot: Slot) -> _Kept:
    named = {key: packed for key, packed in state.items() if slot.name in packed.layout.by_name}

    def one(last: str) -> Tensor | None:
        found = [packed for key, packed in named.items() if key.rpartition(".")[2] == last]
        return _flat_of(found[0], slot) if found else None

    unsent = [_flat_of(packed, slot) for key, packed in named.items() if is_unsent(key)]
    return _Kept(unsent, one(KNOWN), one(SMOOTHED))


def _flat_of(packed: FlatTensors, slot: Slot) -> Tensor:
    return packed.layout.by_name[slot.name].flat_view(packed.flat)


#: Sums of squares of: what was given, what is kept, what was wanted, and what of it did not go; None: not known.
_Energies = tuple[Energy, Energy | None, Energy | None, Energy | None]


def _energies(slot: Slot, compressor: Compressor, x: FlatTensors, own: Tensor, state: State) -> _Energies:
    given, sent = slot.flat_view(x.flat), slot.flat_view(own)
    kept, owned = _kept(state, slot), compressor.owns_momentum(slot)
    if owned is not None and owned.rule is not UpdateRule.VELOCITY:
        return _energy(given), None, None, None  # what is kept is of moments, in other units
    if kept.known is not None:
        told = given if kept.smoothed is None else kept.smoothed
        waits = _energy(told, kept.known, -1)
        return _energy(given), waits, _energy(told), waits
    if not kept.unsent:
        return _energy(given), 0.0, _energy(given), _energy(given, sent, -1)
    waits = sum((_energy(each) for each in kept.unsent[1:]), _energy(kept.unsent[0]))
    if len(kept.unsent) > 1 or kept.unsent[0].numel() != slot.numel:
        return _energy(given), waits, None, None  # parts of several stages, which add up to no error of this worker's
    return _energy(given), waits, _energy(sent, kept.unsent[0]), waits


def _energy(a: Tensor, b: Tensor | None = None, sign: int = 1) -> Tensor:
    """|a|^2, or |a + sign b|^2. a, b: (n,)."""
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), CHUNK):
        part = a[start : start + CHUNK].double()
        if b is not None:
            part = part.add(b[start : start + CHUNK], alpha=sign)
        total += part.dot(part)
    return total


def _on_host(energies: Sequence[_Energies]) -> Sequence[Sequence[float | None]]:
    """All that lie on a device, fetched at once."""
    there = [each for row in energies for each in row if isinstance(each, Tensor)]
    fetched = iter(torch.stack(there).tolist() if there else [])
    return [[next(fetched) if isinstance(each, Tensor) else each for each in row] for row in energies]


def _row(
    slot: Slot,
    nbytes: float | None,
    given: float | None,
    waits: float | None,
    wanted: float | None,
    lost: float | None,
) -> TensorCost:
    share = None if wanted is None or lost is None or not wanted else 1 - lost / wanted
    return TensorCost(
        name=slot.name,
        numel=slot.numel,
        bytes=nbytes,
        residual_norm=_finite(None if waits is None else sqrt(waits)),
        gradient_norm=_finite(None if given is None else sqrt(given)),
        energy_share=_finite(share),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
