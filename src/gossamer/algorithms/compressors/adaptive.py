"""Adaptive: spreads the entries that may travel over the tensors, more of them where waiting costs more."""

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
from gossamer.base.coalesce import coalesce
from gossamer.base.kernels import Residual
from gossamer.base.kernels.reference.segments import expect
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, Script
from gossamer.errors import require

LARGEST = 1e290  # energy of a tensor that is reckoned with: sums of all workers stay finite
LEAST = 1e-9  # of the largest weight, for tensors with next to no energy: what others have no room for is theirs


@dataclass(frozen=True, repr=False)
class Adaptive(Wrapper):
    """Send as many entries as the inner compressor, but spread over the tensors by a square-root rule.

    C(x) = inner of k_t entries of tensor t (x), k_t in proportion to sqrt(n_t E_t), from 1 to n_t, as many in all as
    inner sends;  E_t = |x_t|^2 of all workers together, measured every `every` steps
    law:    an entry of tensor t waits for about n_t / k_t steps, and no other k_t of that sum (but for rounding) have a
            smaller sum of E_t n_t / k_t
    bytes:  the inner compressor's, and in every `every`th step 8 (workers - 1) for each tensor
    source: Kleinrock 1964, Communication Nets (the square-root rule, for the capacities of channels); that it suits the
            residuals of error feedback is our own finding

    The inner compressor says how many entries travel in all; it needs a density, as TopK and Chain have. Entries are
    spread within a bucket. Until the first measurement, each tensor has the inner compressor's share.

    What is chosen is still a density. A bound of each tensor's own error in its place, and one of how much waits beside
    a gradient, were tried: on most tasks they ended higher than one density for as many bytes.
    """

    inner: Compressor
    every: int = 20  # steps between measurements

    def __post_init__(self) -> None:
        require(
            self.every >= 1,
            f"every counts steps between measurements, at least 1, not {self.every}. "
            "Write Adaptive(TopK(density=0.01), every=20).",
        )
        held = self.inner.held() if isinstance(self.inner, Compressor) else ()
        require(
            not held or self.inner.with_counts((1,)) is not None,
            f"{self.inner!r} has no numbers of entries that could be spread otherwise. "
            "Write Adaptive(TopK(density=0.01)).",
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
        """The inner compressor with the numbers of entries that hold in this step, the same on every rank."""
        energies = () if x.flat.is_meta else tuple(state[FORM].flat.tolist())
        if not any(energies):
            return self.inner
        sizes = tuple(x.layout.sizes)
        found = self.inner.with_counts(spread(sum(self.inner.counts(sizes)), sizes, energies))
        assert found is not None
        return found

    def _measured(self, x: FlatTensors, state: State, at: AggregationContext, sending: Aggregation) -> Aggregation:
        """What is sent, and beside it in some steps what the next numbers of entries follow from."""
        known = state[FORM]
        if at.step % self.every and (x.flat.is_meta or bool(known.flat.any())):
            sent = yield from sending
        else:
            sent, energies = yield from coalesce([sending, _energies(x, at)])
            known = _written(energies, x.layout)
        return replace(sent, next_state=State({FORM: known, **sent.next_state}))


def _written(energies: Sequence[float], layout: Layout) -> FlatTensors:
    """A number for each tensor, so that it goes where the tensor goes."""
    return FlatTensors(
        torch.tensor(energies, dtype=torch.float64, device="cpu"), Layout.of(dict.fromkeys(layout.names, (1,)))
    )


@lru_cache(maxsize=256)
def spread(total: int, sizes: tuple[int, ...], energies: tuple[float, ...]) -> tuple[int, ...]:
    """How many entries of each tensor travel, `total` of all: in proportion to sqrt(size energy), and from 1 to size.

    Whoever asks with the same numbers gets the same answer: there is no operation in it whose rounding is not fixed.
    """
    roots = [math.sqrt(size) * math.sqrt(energy) for size, energy in zip(sizes, energies, strict=True)]
    weights = [max(root, LEAST * max(roots)) for root in roots]
    low, high = 0.0, max(size / weight for size, weight in zip(sizes, weights, strict=True))
    for _ in range(100):  # the factor at which they are as many as may travel
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
    """The energy of each tensor on all ranks together; what is no number counts as nothing."""
    mine = torch.stack([energy(tensor) for _, tensor in x.items()])
    heard = yield AllGather((mine,))
    if x.flat.is_meta:
        return [0.0] * len(x.layout)
    for rank, payload in enumerate(heard):
        with sent_by(rank, at):
            expect_tensors([payload], 1)
            expect(payload[0], torch.float64, len(mine))
    told = torch.stack([numbers for (numbers,) in heard]).cpu().nan_to_num(0.0, 0.0, 0.0)
    return told.clamp(0.0, LARGEST).sum(0).tolist()
