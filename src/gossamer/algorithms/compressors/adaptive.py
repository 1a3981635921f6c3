"""Adaptive density: distribute the entries to send over the tensors by their gradient energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.decoding import expect_tensors, sent_by
from gossamer.algorithms.compressors.settling import energy
from gossamer.algorithms.compressors.wrapper import Wrapper
from gossamer.base.aggregation import FORM, Aggregation, AggregationContext, State
from gossamer.base.kernels import Residual
from gossamer.base.kernels.reference.segments import expect
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, Script, coalesce
from gossamer.errors import require

LARGEST = 1e290  # upper limit of a tensor's energy: the sum over all workers stays finite
LEAST = 1e-9  # lower limit of a weight relative to the largest: tensors of little energy get the remaining entries


@dataclass(frozen=True, repr=False)
class Adaptive(Wrapper):
    """Send as many entries as `inner`, distributed over the tensors by a square-root rule.

    C(x) = inner of k_t entries of tensor t (x), k_t in proportion to sqrt(n_t E_t), from 1 to n_t, as many in all as
    inner sends;  E_t = |x_t|^2 of all workers together, measured every `every` steps
    law:    an entry of tensor t waits for about n_t / k_t steps, and no other k_t of that sum (but for rounding) have a
            smaller sum of E_t n_t / k_t
    bytes:  the inner compressor's, and in every `every`th step 8 (workers - 1) for each tensor
    source: Kleinrock 1964, Communication Nets (the square-root rule, for the capacities of channels); that it suits the
            residuals of error feedback is our own finding

    The inner compressor determines the total; it needs a density, as TopK and Chain have. Entries are distributed
    within a bucket. Until the first measurement, each tensor has the inner compressor's share.

    The density remains a hyperparameter: rules that bound each tensor's own error, or the residual relative to the
    gradient, ended at a higher loss on most tasks than a fixed density that sends as many bytes.

    Args:
        inner: a compressor with a density.
        every: steps between measurements of E_t.

    Example:
        >>> gossamer.Adaptive(gossamer.TopK(density=0.01), every=50)
        Adaptive(TopK(density=0.01), every=50)
    """

    inner: Compressor
    every: int = 20

    def __post_init__(self) -> None:
        require(
            self.every >= 1,
            f"every must be a number of steps between measurements, 1 or more, got {self.every}. "
            "Write Adaptive(TopK(density=0.01), every=20).",
        )
        held = self.inner.held() if isinstance(self.inner, Compressor) else ()
        require(
            not held or self.inner.with_counts((1,)) is not None,
            f"Adaptive needs a compressor with a density, got {self.inner!r}, which has no numbers of entries to "
            "distribute. Write Adaptive(TopK(density=0.01)).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.inner.wants_feedback

    @property
    def adapts(self) -> bool:
        return True

    @property
    def decodes_without_input(self) -> bool:
        return self.inner.decodes_without_input

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return State({FORM: _written([0.0] * len(like.layout), like.layout), **self.inner.init(like, at)})

    def init_compensated(self, like: FlatTensors, at: AggregationContext) -> State:
        return State({FORM: _written([0.0] * len(like.layout), like.layout), **self.inner.init_compensated(like, at)})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        sending = self._now(x, state).aggregate(x, state.part("", FORM), at, out)
        return self._measured(x, state, at, sending)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        sending = self._now(x, state).aggregate_compensated(x, residual, state.part("", FORM), at, out)
        return self._measured(x, state, at, sending)

    def _now(self, x: FlatTensors, state: State) -> Compressor:
        """Return the inner compressor with this step's numbers of entries, equal on all ranks."""
        energies = () if x.flat.is_meta else tuple(state[FORM].flat.tolist())
        if not any(energies):
            return self.inner
        sizes = tuple(x.layout.sizes)
        found = self.inner.with_counts(spread(sum(self.inner.counts(sizes)), sizes, energies))
        assert found is not None
        return found

    def _measured(self, x: FlatTensors, state: State, at: AggregationContext, sending: Aggregation) -> Aggregation:
        """Aggregate, and in some steps measure the energies that determine the next numbers of entries."""
        known = state[FORM]
        if at.step % self.every and (x.flat.is_meta or bool(known.flat.any())):
            sent = yield from sending
        else:
            sent, energies = yield from coalesce([sending, _energies(x, at)])
            known = _written(energies, x.layout)
        return replace(sent, next_state=State({FORM: known, **sent.next_state}))


def _written(energies: Sequence[float], layout: Layout) -> FlatTensors:
    """Store one number per tensor under the tensor's name, so that it moves with the tensor."""
    return FlatTensors(
        torch.tensor(energies, dtype=torch.float64, device="cpu"), Layout.of(dict.fromkeys(layout.names, (1,)))
    )


@lru_cache(maxsize=256)
def spread(total: int, sizes: tuple[int, ...], energies: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of entries of each tensor, `total` in all: in proportion to sqrt(size energy), from 1 to size.

    The result is the same on every machine: every operation in it has a defined rounding.
    """
    roots = [math.sqrt(size) * math.sqrt(energy) for size, energy in zip(sizes, energies, strict=True)]
    weights = [max(root, LEAST * max(roots)) for root in roots]
    low, high = 0.0, max(size / weight for size, weight in zip(sizes, weights, strict=True))
    for _ in range(100):  # bisect for the factor at which the counts add up to `total`
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_bounded(middle, weights, sizes)) <= total else (low, middle)
    wanted = _bounded(low, weights, sizes)
    counts = [int(count) for count in wanted]
    rest = sorted(range(len(sizes)), key=lambda place: counts[place] - wanted[place])
    for place in rest[: total - sum(counts)]:
        counts[place] += 1
    return tuple(counts)


def _bounded(factor: float, weights: Sequence[float], sizes: Sequence[int]) -> list[float]:
    return [min(float(size), max(1.0, factor * weight)) for weight, size in zip(weights, sizes, strict=True)]


def _energies(x: FlatTensors, at: AggregationContext) -> Script:
    """Return the energy of each tensor summed over all ranks; values that are not finite count as zero."""
    own = torch.stack([energy(tensor) for _, tensor in x.items()])
    received = yield AllGather((own,))
    if x.flat.is_meta:
        return [0.0] * len(x.layout)
    for rank, payload in enumerate(received):
        with sent_by(rank, at):
            expect_tensors([payload], 1)
            expect(payload[0], torch.float64, len(own))
    statistics = torch.stack([numbers for (numbers,) in received]).cpu().nan_to_num(0.0, 0.0, 0.0)
    return statistics.clamp(0.0, LARGEST).sum(0).tolist()
