"""Warm-up: start with dense or less sparse messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.settling import WarmupProgress, blank, energy, exchange
from gossamer.algorithms.compressors.topk import densities
from gossamer.algorithms.compressors.wrapper import Wrapper, without_state
from gossamer.base.aggregation import FORM, Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import coalesce
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class Warmup(Wrapper):
    """Start dense for the first `steps` steps, or with decreasing densities, and end with the inner compressor.

    C(x) = inner of density 1/4, 1/16, ... (x), each until |residual|^2 / |x|^2, of all workers together, is no more
    than 1.2 times what it was over the stage; then inner(x).  With steps: x before step number `steps`, from 0
    law:    the inner compressor's; with steps nothing is lost before, and the inner state is unchanged until then
    bytes:  the inner compressor's of each density, and 16; then the inner compressor's. With steps 2 (n-1)/n N itemsize
            at first
    source: Lin et al. 2018, ICLR (densities); Tang et al. 2021, ICML (a dense first phase); the rule is our own

    The residual grows until each step sends as much of it as it adds, which takes longer at lower densities. The rule
    waits for that balance, for each bucket separately. It needs Feedback around it and an inner compressor with a
    density, such as TopK, RandomK, Chain or SparseSum. Cost estimates, as by gossamer explain, are for steps after the
    warm-up.

    Measured under AdamW (examples/digits.py, conv, two seeds), the automatic rule needs no hyperparameter:

        Warmup(TopK(0.01))             loss 0.0055, 4.8 kB a step
        Warmup(TopK(0.01), steps=10)   loss 0.0050, 5.8 kB a step
        TopK(0.01)                     loss 0.014, 3.0 kB a step

    Args:
        inner: the final compressor.
        steps: number of uncompressed steps; None selects the automatic rule.

    Example:
        >>> gossamer.Warmup(gossamer.TopK(density=0.01), steps=500)
        Warmup(TopK(density=0.01), steps=500)
    """

    inner: Compressor
    steps: int | None = None

    def __post_init__(self) -> None:
        require(
            self.steps is None or self.steps >= 0,
            f"steps must be the number of uncompressed steps, 0 or more, got {self.steps}. "
            "Write Warmup(TopK(density=0.01), steps=500).",
        )
        held = self.inner.held() if isinstance(self.inner, Compressor) else ()
        require(
            self.steps is not None or not held or bool(self.inner.denser()),
            f"{self.inner!r} has no density that could start higher and decrease. Write "
            f"Warmup({self.inner!r}, steps=500) for a dense start.",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.inner.wants_feedback

    @property
    def adapts(self) -> bool:
        return self.steps is None

    @property
    def decodes_without_input(self) -> bool:
        return self.inner.decodes_without_input

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return self.inner.init(like, at)

    def init_compensated(self, like: FlatTensors, at: AggregationContext) -> State:
        form = {FORM: blank(like.layout.names)} if self.steps is None else {}
        return State({**form, **self.inner.init_compensated(like, at)})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if self.steps is None or at.step >= self.steps:
            return (yield from self.inner.aggregate(x, state, at, out))
        return (yield from without_state(state, Dense().aggregate(x, State(), at, out)))

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        if self.steps is None:
            return (yield from self._in_stages(x, residual, state, at, out))
        if at.step >= self.steps:
            return (yield from self.inner.aggregate_compensated(x, residual, state, at, out))
        return (yield from without_state(state, Dense().aggregate_compensated(x, residual, State(), at, out)))

    def _in_stages(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None
    ) -> Aggregation:
        kept, rest, stages = state[FORM], state.part("", FORM), self.inner.denser()
        progress = WarmupProgress(stage=len(stages)) if x.flat.is_meta else WarmupProgress.read(kept)
        if progress.stage >= len(stages):
            staged = yield from self.inner.aggregate_compensated(x, residual, rest, at, out)
            return replace(staged, next_state=State({FORM: kept, **staged.next_state}))
        now, given = stages[int(progress.stage)], float(energy(x.flat))
        both = yield from coalesce(
            [now.aggregate_compensated(x, residual, rest, at, out), exchange(progress, x.flat, at)]
        )
        sent: AggregationResult = both[0]
        waiting, given_to_all = both[1]
        following = progress.updated(waiting, given_to_all)
        following = following._replace(my_waiting=float(energy(residual.after)), my_given=given)
        return replace(sent, next_state=State({FORM: following.written(kept.layout), **sent.next_state}))


def ramp(step: int, steps: int, final_density: float) -> float:
    """Return the density at a step of a warm-up: from 1/4 down to `final_density`, 1/4 of the last one at every stage.

    The stages before the final one share `steps` equally. Lin et al. 2018, ICLR: 25 %, 6.25 %, 1.5625 %, 0.39 %, 0.1 %.
    """
    stages = len(densities(final_density))
    return 0.25 ** (step * stages // steps + 1) if step < steps and stages else final_density
