"""Ladder: recipes from weak to strong compression, and the steps that each needs to a loss relative to Dense()."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from torch.optim import Optimizer

from gossamer.algorithms.compressors import Compressor, Dense, Float4, OneBit, PowerSGD, TopK
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.recipe import Recipe, period_of, resolve
from gossamer.algorithms.strategies import ALIGN, DiLoCo, LocalSGD
from gossamer.base.term import Terms


@dataclass(frozen=True, kw_only=True)
class LadderRung:
    """A recipe, and measurements of it from benchmarks.

    Steps to a loss are relative to Dense(). Benchmarks that give a loss after a fixed number of steps are converted by
    the loss curve of Dense(): it falls by 0.364 for every factor e of steps, from 2.841 after 80 steps to 2.360 after
    300, in docs/benchmarks/recipes.md.
    """

    written: Compressor | Terms
    steps_adaptive: float  # with Adam and similar optimizers, which move all entries about equally far
    steps_sgd: float  # inf: not measured, so never used
    least_steps: int = 0  # of a training in which the recipe is used; with fewer rounds it retained too little
    #: Of gradients, encoded and decoded by one core, used before this rung was tried: half of the rate in
    #: docs/reference/trade-offs.md for encoding alone
    codec_bytes_per_second: float = inf

    @property
    def name(self) -> str:
        return repr(self.written)

    def steps(self, *, adaptive: bool) -> float:
        return self.steps_adaptive if adaptive else self.steps_sgd

    @property
    def period(self) -> int:
        return period_of(resolve(self.written))

    def recipe(self, workers: int) -> Recipe:
        return resolve(self.written, workers)


_APART = DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5)
_ALIGNED = LocalSGD(period=4, optimizer_state=ALIGN)
_SELDOM = DiLoCo(period=16, outer_learning_rate=1.5, outer_momentum=0.0, optimizer_state=ALIGN)
UNKNOWN_STEPS = 1000  # of a training whose length is not given

#: From weak to strong. Sources: docs/benchmarks/recipes.md (Int8; PowerSGD and TopK with AdamW),
#: docs/reference/trade-offs.md (Float4; PowerSGD and TopK with SGD), docs/benchmarks/advice.md (local steps: five tasks
#: in 150 steps and seven in 450, where the median of all ratios is 1.27 for LocalSGD and 1.16 for DiLoCo; 1.25 for
#: DiLoCo is assumed, since its ratio is larger if each recipe has its own learning rate, as in
#: docs/benchmarks/ladder.md). Parameters in one bit: docs/benchmarks/ladder.md, with 550 rounds or more. Their final
#: losses are converted by the loss of lock step there, which falls by 0.25 for every factor e of steps: every 4 steps
#: 0.99, 1.14 and 1.05 with 57, 113 and 237 thousand parameters, every 16 steps 1.07 and 1.04 with 57 and 237 thousand.
#: Fewest steps: 50 rounds (fewer retained less than half of the benefit of communication), in one bit 500 rounds.
RUNGS: tuple[LadderRung, ...] = (
    LadderRung(written=Dense(), steps_adaptive=1.0, steps_sgd=1.0),
    LadderRung(written=Dense(dtype="bfloat16"), steps_adaptive=1.0, steps_sgd=1.0, codec_bytes_per_second=5.1e9),
    LadderRung(written=Int8(), steps_adaptive=1.0, steps_sgd=1.0, codec_bytes_per_second=2.9e9),
    LadderRung(written=Float4(), steps_adaptive=1.07, steps_sgd=1.03, codec_bytes_per_second=2.3e9),
    LadderRung(written=PowerSGD(rank=4), steps_adaptive=1.18, steps_sgd=1.08, codec_bytes_per_second=1.3e9),
    LadderRung(written=TopK(density=0.01), steps_adaptive=2.3, steps_sgd=1.24, codec_bytes_per_second=2.4e9),
    LadderRung(
        written=LocalSGD(period=8) + Int8(),
        steps_adaptive=1.3,
        steps_sgd=1.3,
        least_steps=400,
        codec_bytes_per_second=2.9e9,
    ),
    LadderRung(
        written=_ALIGNED + OneBit(),
        steps_adaptive=1.06,
        steps_sgd=inf,
        least_steps=2000,
        codec_bytes_per_second=2.9e9,
    ),
    LadderRung(
        written=_APART + Float4(), steps_adaptive=1.25, steps_sgd=1.25, least_steps=1000, codec_bytes_per_second=2.3e9
    ),
    LadderRung(
        written=_SELDOM + OneBit(),
        steps_adaptive=1.06,
        steps_sgd=inf,
        least_steps=8000,
        codec_bytes_per_second=2.9e9,
    ),
)


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether it scales by gradient magnitudes, or differs from plain SGD in another way. There are no measurements for
    the latter, so the more conservative numbers are used."""
    return not {"momentum", "nesterov"} <= optimizer.defaults.keys() or "ns_steps" in optimizer.defaults


def beginning(rungs: Sequence[LadderRung]) -> LadderRung:
    """The initial rung: the one with the longest period of local steps, otherwise the weakest of all.

    The network is not known yet. Twenty local steps cost little loss on any network, while twenty steps of Dense() may
    take an hour; the first merge also measures the network.
    """
    return max(rungs, key=lambda rung: rung.period)


def admitted(auto: Auto, *, adaptive: bool) -> Sequence[LadderRung]:
    """The rungs that the recipe text allows; Dense() is always included."""
    training = UNKNOWN_STEPS if auto.steps is None else auto.steps
    return tuple(
        rung
        for rung in RUNGS
        if rung.steps(adaptive=adaptive) <= auto.most_steps
        and rung.least_steps <= training
        and (auto.local_steps or rung.period == 1)
    )
