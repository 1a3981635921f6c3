"""Tensor sampler: samples the bytes that each tensor of a bucket costs, and the part of it that is not sent yet.

One bucket at a time, in turn, on the communication thread after its aggregation, while an exporter subscribes:

    gradient_norm = |x|, residual_norm = |r'|, energy_share = 1 - |wanted - own|^2 / |wanted|^2

x is this worker's input (gradients, or the change of its parameters), own its contribution to the mean, r' its new
residual. wanted = own + r' with a residual, since that holds exactly the unsent part; otherwise x. For compressors of
differences (EF21), wanted is the encoded value, and the residual is its difference to the value known to the others.
None means that a value cannot be determined.

bytes: the bytes of the bucket's operations, divided in proportion to the bytes of each tensor sent alone.
law:   they add up to the bucket's bytes; without compression energy_share is 1 and residual_norm 0
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

SAMPLE_SECONDS = 1.0  # minimum time between two samples, once every bucket was sampled
SAMPLE_SHARE = 0.005  # maximum share of the communication thread's time
CHUNK = 2**18  # elements that are summed at once, in float64

Energy = Tensor | float  # a sum of squares, on the device of its inputs


class TensorSampler:
    """Chooses buckets, measures them, and emits events.TensorsMeasured. steps: returns the number of steps made."""

    def __init__(self, steps: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._steps, self.clock = steps, clock
        self.due = -inf  # no bucket is measured before
        self._measured: set[str] = set()  # buckets measured in this cycle, by their first tensor
        self._passed: set[str] = set()  # those of them that were skipped since the last sample
        self._went_round, self._cold = False, True
        self._alone: dict[str, Sequence[float]] = {}  # bytes of each tensor sent alone

    def takes(self, layout: Layout) -> bool:
        """Whether to measure the next bucket."""
        if self.clock() < self.due or not events.sampled() or not layout.names or not self._steps():
            return False  # the first step includes imports and first allocations, and has no residuals yet
        name = layout.names[0]
        if name in self._measured and name not in self._passed:
            self._passed.add(name)  # other buckets may not have been measured yet
            return False
        if name in self._measured:
            self._went_round, self._measured = True, set()
        self._measured.add(name)
        self._passed = set()
        return True

    def measure(
        self, compressor: Compressor, x: FlatTensors, staged: AggregationResult, nbytes: float, at: AggregationContext
    ) -> None:
        """Measure a bucket and emit its costs. An error ends sampling, but not the training.

        Args:
            x: input of the compressor.
            nbytes: bytes that the bucket's operations have sent.
        """
        try:
            costs = self._bytes(compressor, x, nbytes, at)  # priced once
            began = self.clock()
            rows = self._rows(compressor, x, staged, costs)
        except Exception as error:
            self.due = inf
            events.notice(f"the costs of tensors are no longer measured ({type(error).__name__}: {error})")
            return
        events.emit(events.TensorsMeasured(step=self._steps(), tensors=rows))
        ended = self.clock()
        least = SAMPLE_SECONDS if self._went_round or self._cold else 0.0
        took = 0.0 if self._cold else ended - began  # the first sample runs with cold caches and is not representative
        self.due, self._cold = ended + max(least, took / SAMPLE_SHARE), False

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
    """Divide a bucket's bytes among its tensors, in proportion to `alone`, or to their sizes if that is zero."""
    parts = alone if sum(alone) > 0 else sizes
    whole = sum(parts)
    return [nbytes * part / whole if whole else 0.0 for part in parts]


def _alone(compressor: Compressor, slot: Slot, dtype: torch.dtype, at: AggregationContext) -> float:
    """Bytes that this worker would send for one tensor alone."""
    layout = Layout((Slot(slot.name, slot.shape, 0, slot.stride),))
    like = FlatTensors(torch.empty(slot.numel, dtype=dtype, device="meta"), layout)
    script = compressor.aggregate(like, compressor.init(like, at), at)
    return sum(cost.bytes_sent for cost in price(script, at.world, at.rank))


@dataclass
class Metered:
    """Sums the bytes of a script's operations."""

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
    """State of one tensor: residuals, the value known to others, the smoothed value."""

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


#: Sums of squares of: the input, the residual, the wanted value, and the part of it that was not sent; None if unknown.
_Energies = tuple[Energy, Energy | None, Energy | None, Energy | None]


def _energies(slot: Slot, compressor: Compressor, x: FlatTensors, own: Tensor, state: State) -> _Energies:
    given, sent = slot.flat_view(x.flat), slot.flat_view(own)
    kept, owned = _kept(state, slot), compressor.owns_momentum(slot)
    if owned is not None and owned.rule is not UpdateRule.VELOCITY:
        return _energy(given), None, None, None  # the residual is of moments, in other units
    if kept.known is not None:
        measured = given if kept.smoothed is None else kept.smoothed
        waits = _energy(measured, kept.known, -1)
        return _energy(given), waits, _energy(measured), waits
    if not kept.unsent:
        return _energy(given), 0.0, _energy(given), _energy(given, sent, -1)
    waits = sum((_energy(each) for each in kept.unsent[1:]), _energy(kept.unsent[0]))
    if len(kept.unsent) > 1 or kept.unsent[0].numel() != slot.numel:
        return _energy(given), waits, None, None  # residuals of several stages do not add up to this worker's error
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
    """Fetch all values on a device at once."""
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
