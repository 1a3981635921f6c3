"""Warmup: compression that begins later, or grows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.compressors.base import Compressor
from gossamer.compressors.dense import Dense
from gossamer.compressors.wrapper import Wrapper, beside
from gossamer.core.aggregation import Aggregation, AggregationContext, State
from gossamer.core.layout import FlatTensors
from gossamer.errors import require
from gossamer.kernels import Residual


@dataclass(frozen=True, repr=False)
class Warmup(Wrapper):
    """Send everything for the first `steps` steps, and then what the inner compressor sends.

    C(x) = x before step number `steps`, counted from 0; then inner(x)
    law:    the inner compressor's; before, nothing is lost and the inner state stays as it began
    bytes:  2 (n-1)/n N itemsize, then the inner compressor's
    source: Lin et al. 2018, ICLR; Tang et al. 2021, ICML (a dense first phase)
    """

    inner: Compressor
    steps: int

    def __post_init__(self) -> None:
        require(
            self.steps >= 0,
            f"steps counts the steps that send everything, not {self.steps}. "
            "Write Warmup(TopK(density=0.01), steps=500).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.inner.wants_feedback

    @property
    def decodes_without_input(self) -> bool:
        return self.inner.decodes_without_input

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return self.inner.init(like, at)

    def init_compensated(self, like: FlatTensors, at: AggregationContext) -> State:
        return self.inner.init_compensated(like, at)

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if at.step >= self.steps:
            return (yield from self.inner.aggregate(x, state, at, out))
        return (yield from beside(state, Dense().aggregate(x, State(), at, out)))

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        if at.step >= self.steps:
            return (yield from self.inner.aggregate_compensated(x, residual, state, at, out))
        return (yield from beside(state, Dense().aggregate_compensated(x, residual, State(), at, out)))


def ramp(step: int, steps: int, final_density: float) -> float:
    """The density of a step, from a quarter down to `final_density`: a quarter of the last one at every stage.

    The stages before the final one share `steps` equally. Lin et al. 2018, ICLR: 25 %, 6.25 %, 1.5625 %, 0.39 %, 0.1 %.
    """
    stages = 0
    while 0.25 ** (stages + 1) > final_density:
        stages += 1
    return 0.25 ** (step * stages // steps + 1) if step < steps and stages else final_density
