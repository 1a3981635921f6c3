"""Ladder: recipes from weak to strong compression, and how many more steps each needs to the loss of Dense()."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from torch.optim import Optimizer

from gossamer.algorithms.compressors import Compressor, Dense, Float4, PowerSGD, TopK
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies import DiLoCo, LocalSGD
from gossamer.base.term import Terms


@dataclass(frozen=True, kw_only=True)
class LadderRung:
    """A recipe, and what was measured of it elsewhere.

    Steps are counted to a loss, in those of Dense(). Where a table of docs says which loss so many steps end at, they
    are those in which Dense() would have ended there, its loss falling by 0.364 for every e times as many steps: 2.841
    after 80 and 2.360 after 300, in docs/benchmarks/recipes.md.
    """

    written: Compressor | Terms
    steps_adaptive: float  # with Adam and its kin, which move all entries about as far
    steps_sgd: float
    #: Of gradients, encoded and decoded by one core, before this rung was tried: half of what docs/trade-offs.md has
    #: for encoding alone
    codec_bytes_per_second: float = inf

    @property
    def name(self) -> str:
        return repr(self.written)

    def steps(self, *, adaptive: bool) -> float:
        return self.steps_adaptive if adaptive else self.steps_sgd

    def recipe(self, workers: int) -> Recipe:
        return resolve(self.written, workers)


_APART = DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5)

#: From weak to strong. Sources: docs/benchmarks/recipes.md (Int8; PowerSGD and TopK with AdamW), docs/trade-offs.md
#: (Float4; PowerSGD and TopK with SGD), docs/benchmarks/advice.md (local steps: five tasks in 150 steps and seven in
#: 450, where the middle one of all ratios is 1.27 for LocalSGD and 1.16 for DiLoCo; 1.25 for DiLoCo is
#: assumed: it falls further behind where each recipe has its own learning rate, as in docs/benchmarks/ladder.md).
RUNGS: tuple[LadderRung, ...] = (
    LadderRung(written=Dense(), steps_adaptive=1.0, steps_sgd=1.0),
    LadderRung(written=Dense(dtype="bfloat16"), steps_adaptive=1.0, steps_sgd=1.0, codec_bytes_per_second=11.2e9),
    LadderRung(written=Int8(), steps_adaptive=1.0, steps_sgd=1.0, codec_bytes_per_second=6.4e9),
    LadderRung(written=Float4(), steps_adaptive=1.07, steps_sgd=1.03, codec_bytes_per_second=5.5e9),
    LadderRung(written=PowerSGD(rank=4), steps_adaptive=1.18, steps_sgd=1.08, codec_bytes_per_second=0.29e9),
    LadderRung(written=TopK(density=0.01), steps_adaptive=2.3, steps_sgd=1.24, codec_bytes_per_second=5.3e9),
    LadderRung(written=LocalSGD(period=8) + Int8(), steps_adaptive=1.3, steps_sgd=1.3, codec_bytes_per_second=6.4e9),
    LadderRung(written=_APART + Float4(), steps_adaptive=1.25, steps_sgd=1.25, codec_bytes_per_second=5.5e9),
)


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether it divides by how large gradients are, or makes of them something else than plain SGD does: nothing
    about those others was measured, so they count with the more careful numbers."""
    return not {"momentum", "nesterov"} <= optimizer.defaults.keys() or "ns_steps" in optimizer.defaults


def beginning(rungs: Sequence[LadderRung]) -> LadderRung:
    """The rung to begin with: the strongest with local steps, else the weakest of all.

    Nothing is known of the network yet. Twenty local steps cost little loss anywhere, and twenty of Dense() may take
    an hour; the first merge tells of the network, too.
    """
    apart = [rung for rung in rungs if resolve(rung.written).strategy.steady_stage.local_parameters]
    return apart[-1] if apart else rungs[0]


def admitted(auto: Auto, *, adaptive: bool) -> Sequence[LadderRung]:
    """The rungs that the user's words allow; Dense() is always one."""
    return tuple(
        rung
        for rung in RUNGS
        if rung.steps(adaptive=adaptive) <= auto.most_steps
        and (auto.local_steps or not resolve(rung.written).strategy.steady_stage.local_parameters)
    )
