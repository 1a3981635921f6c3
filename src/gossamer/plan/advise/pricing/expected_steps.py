"""Expected steps: how many more backward passes a recipe needs than Dense(), from what was measured: a prior.

A page of measurements tells how much higher a recipe's loss ends than that of Dense() after as many steps. Divided by
what a training gains when its length grows by a factor of e, that is the logarithm of how many times as long it would
have to go on. Strategies and compressors multiply. What a race finds counts more: this only orders candidates for it.

source: docs/compressors.md ("bytelm-adamw", "bytelm", 100 steps, training loss; "What closes the gap under AdamW"),
        docs/benchmarks/front.md (200 steps, held out, AdamW), docs/local.md (1000 steps, held out, AdamW at 0.001;
        "what to take from it"). All of the small byte model: on yours the order may be another.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

from torch.optim import SGD, Optimizer

from gossamer.plan.profile.gradient_statistics import RANKS, GradientStatistics

#: Nats that Dense() gains from 50 to 100 steps, over ln 2: docs/compressors.md, bytelm-adamw and bytelm.
ADAM_NATS_PER_E_FOLD = (2.911 - 2.659) / log(2)
SGD_NATS_PER_E_FOLD = (2.790 - 2.638) / log(2)

COMPRESSORS, FRONT, LOCAL = "docs/compressors.md", "docs/benchmarks/front.md", "docs/local.md"
ASSUMED = "assumed, between those that were measured"


@dataclass(frozen=True)
class LossGap:
    """How much higher a loss ends than that of Dense(), in nats, and where that was measured."""

    adam: float
    sgd: float
    source: str

    def passes(self, optimizer_type: type[Optimizer], share: float = 1.0) -> float:
        """Backward passes to a loss over Dense()'s, where `share` of this gap is expected. Others count as Adam."""
        if issubclass(optimizer_type, SGD):
            return exp(share * self.sgd / SGD_NATS_PER_E_FOLD)
        return exp(share * self.adam / ADAM_NATS_PER_E_FOLD)


NOTHING = LossGap(0.0, 0.0, COMPRESSORS)

FEW_BITS = {
    "Dense()": NOTHING,
    "Dense(dtype='bfloat16')": NOTHING,
    "Int8()": NOTHING,
    "QSGD()": LossGap(0.005, 0.0, COMPRESSORS),
    "Rotated(Float4(), by='hadamard')": LossGap(0.007, 0.0, FRONT),
    "Float4()": LossGap(0.011, 0.0, COMPRESSORS),
    "SignMagnitude()": LossGap(0.127, 0.272, COMPRESSORS),
    "SignMagnitude(feedback=False)": LossGap(0.053, 0.066, COMPRESSORS),
    "TwoBit(adaptive=True)": LossGap(0.302, 0.476, COMPRESSORS),
    "TwoBit(adaptive=True, feedback=False)": LossGap(0.116, 0.286, COMPRESSORS),
    "TernGrad()": LossGap(0.311, 0.072, COMPRESSORS),
    "OneBit()": LossGap(0.264, 0.398, COMPRESSORS),
    "OneBit(feedback=False)": LossGap(0.124, 0.243, COMPRESSORS),
}

FEW_ENTRIES = {
    "TopK(density=0.1)": LossGap(0.126, 0.024, COMPRESSORS),
    "TopK(density=0.03)": LossGap(0.266, 0.051, COMPRESSORS),
    "TopK(density=0.01)": LossGap(0.409, 0.079, COMPRESSORS),
    "TopK(density=0.003)": LossGap(0.57, 0.19, ASSUMED),
    "TopK(density=0.001)": LossGap(0.71, 0.31, ASSUMED),
    "Feedback(TopK(density=0.01), rule='ef21')": LossGap(0.45, 0.1, ASSUMED),
    "Chain(TopK(density=0.1), Int8())": LossGap(0.126, 0.024, ASSUMED),
    "Chain(TopK(density=0.03), Int8())": LossGap(0.265, 0.051, COMPRESSORS),
    "Chain(TopK(density=0.01), Int8())": LossGap(0.408, 0.078, COMPRESSORS),
    "Chain(TopK(density=0.01), SignMagnitude())": LossGap(0.42, 0.09, ASSUMED),
    "Warmup(TopK(density=0.01))": LossGap(0.258, 0.106, COMPRESSORS),
    "SharedMask(density=0.01)": LossGap(0.5, 0.2, ASSUMED),
    "ARCTopK(density=0.01)": LossGap(0.5, 0.2, ASSUMED),
    "RandomK(density=0.1)": LossGap(0.6, 0.2, ASSUMED),
    "RandomK(density=0.01)": LossGap(1.339, 0.466, COMPRESSORS),
}

LOW_RANK = {
    "PowerSGD(rank=8)": LossGap(0.03, 0.006, ASSUMED),
    "PowerSGD(rank=4)": LossGap(0.086, 0.017, COMPRESSORS),
    "PowerSGD(rank=2)": LossGap(0.145, 0.029, FRONT),
    "PowerSGD(rank=1)": LossGap(0.2, 0.04, ASSUMED),
}

_DEMO_IN_BITS = "DeMo(Route(Rotated(Chain(TopK(density={}), SignMagnitude())), rest=Float4(feedback=False)))"
_UPDATE_IN_BITS = "Route(AdamUpdate(Chain(TopK(density={}), SignMagnitude())), rest=Feedback(Sharded(Float4())))"
OPTIMIZER_PARTS = {  # that take a part of the optimizer's work; others' rates of learning would have to be found first
    "DGC(density=0.01)": LossGap(0.0, 0.099, COMPRESSORS),
    "DGC(density=0.001)": LossGap(0.0, 0.3, ASSUMED),
    "OneBitAdam(warmup=40)": LossGap(0.026, 0.0, COMPRESSORS),
    "OneBitAdam(warmup=40, inner=TopK(density=0.01))": LossGap(0.153, 0.0, COMPRESSORS),
    "CompressedAdam(TopK(density=0.01))": LossGap(0.2, 0.0, ASSUMED),
    "MicroAdam(TopK(density=0.01))": LossGap(0.3, 0.0, ASSUMED),
    "AdamUpdate(Float4())": LossGap(0.038, 0.0, FRONT),
    "AdamUpdate(OneBit())": LossGap(0.131, 0.0, FRONT),
    "AdamUpdate(TopK(density=0.01))": LossGap(0.132, 0.0, FRONT),
    "DeMo()": LossGap(0.041, 0.1, FRONT),
    "DeMo(TopK(density=0.01))": LossGap(0.138, 0.2, FRONT),
    "DeMo(Rotated(TopK(density=0.001)))": LossGap(0.228, 0.3, FRONT),
    _DEMO_IN_BITS.format(0.01): LossGap(0.037, 0.1, FRONT),
    _DEMO_IN_BITS.format(0.003): LossGap(0.146, 0.2, FRONT),
    _UPDATE_IN_BITS.format(0.01): LossGap(0.133, 0.0, FRONT),
}

EVERY_STEP = FEW_BITS | FEW_ENTRIES | LOW_RANK | OPTIMIZER_PARTS

_ONE_BIT_AND_REST = "Route(Feedback(Sharded(OneBit())), rest=Feedback(Sharded(Float4())))"
DIFFERENCES = {  # of parameters, after some steps of one's own
    "Dense()": LossGap(0.0, 0.0, LOCAL),
    "Dense(dtype='bfloat16')": LossGap(0.0, 0.0, ASSUMED),
    "Int8()": LossGap(0.0, 0.0, LOCAL),
    "Float4()": LossGap(0.011, 0.011, LOCAL),
    "OneBit()": LossGap(0.034, 0.034, LOCAL),
    _ONE_BIT_AND_REST: LossGap(0.034, 0.034, LOCAL),
    "TwoBit(adaptive=True)": LossGap(0.093, 0.093, LOCAL),
    "TopK(density=0.03)": LossGap(0.102, 0.102, LOCAL),
    "Chain(TopK(density=0.05), SignMagnitude())": LossGap(0.159, 0.159, LOCAL),
}
LETTERS = {  # to neighbors, of differences to public copies
    "Dense()": NOTHING,
    "Int8()": LossGap(0.0, 0.0, ASSUMED),
    "Float4()": LossGap(0.02, 0.02, ASSUMED),
    "TopK(density=0.1)": LossGap(0.1, 0.1, ASSUMED),
}

_OUTER = "outer_learning_rate=1.0, outer_momentum=0.5"
LOCAL_STEPS = {  # strategies whose workers make steps of their own
    "LocalSGD(period=2)": LossGap(0.168, 0.1, ASSUMED),
    "LocalSGD(period=4)": LossGap(0.168, 0.1, LOCAL),
    "LocalSGD(period=8)": LossGap(0.175, 0.11, ASSUMED),
    "LocalSGD(period=16)": LossGap(0.19, 0.12, ASSUMED),
    "PostLocalSGD(period=4, start=100)": LossGap(0.14, 0.08, ASSUMED),
    "PostLocalSGD(period=16, start=100)": LossGap(0.16, 0.1, ASSUMED),
    f"DiLoCo(period=10, {_OUTER})": LossGap(0.06, 0.06, ASSUMED),
    f"DiLoCo(period=20, {_OUTER})": LossGap(0.066, 0.066, LOCAL),
    f"DiLoCo(period=50, {_OUTER})": LossGap(0.181, 0.181, LOCAL),
    f"DiLoCo(period=100, {_OUTER})": LossGap(0.289, 0.289, LOCAL),
    f"DiLoCo(period=20, {_OUTER}, fragments=4, delay=4)": LossGap(0.08, 0.08, ASSUMED),
    f"DiLoCo(period=50, {_OUTER}, fragments=4, delay=5)": LossGap(0.19, 0.19, ASSUMED),
    "DelayedAveraging(delay=2)": LossGap(0.178, 0.1, ASSUMED),
    "DelayedAveraging(delay=4)": LossGap(0.178, 0.1, LOCAL),
    "DelayedAveraging(delay=8, period=4)": LossGap(0.19, 0.12, ASSUMED),
}
GOSSIP = {
    "Gossip()": LossGap(0.178, 0.12, ASSUMED),
    "Gossip(period=4)": LossGap(0.19, 0.13, ASSUMED),
}
SITES = LossGap(0.084, 0.05, ASSUMED)  # LocalSGD(per_site=...): a half of LocalSGD's
DELAYED = LossGap(0.03, 0.03, ASSUMED)  # EveryStep(delay=1)

# -- what gradient statistics say of it --------------------------------------------------------------------------------

#: Shares of energy in gradients of the small byte model, with which the gaps above were measured: of the largest
#: hundredth and thousandth, and of the first 1, 2, 4, 8 directions. Eight batches of one worker with AdamW at 0.001,
#: means of what was seen after 50 steps (0.564, 0.203; 0.61, 0.95, 0.98, 0.99) and after 100.
REFERENCE_LARGEST = (0.571, 0.207)
REFERENCE_SINGULAR = (0.68, 0.91, 0.97, 0.985)
SPARSER, LESS_RANK = 1.5, 1.5  # times what noise would have, below which a choice finds no more than chance
MOST_CHANGE = 1.5  # of a gap, by statistics


def gap_share(compressor: str, statistics: GradientStatistics | None) -> float:
    """What share of a compressor's measured gap to expect: as much as one message loses more of these gradients' norm.

    sqrt((1 - kept) / (1 - kept of the model that it was measured with)), for few entries and low ranks.
    """
    if statistics is None:
        return 1.0
    if compressor in FEW_ENTRIES:
        thin = "0.001" in compressor or "0.003" in compressor
        kept, reference = (
            (statistics.largest_thousandth, REFERENCE_LARGEST[1])
            if thin
            else (statistics.largest_hundredth, REFERENCE_LARGEST[0])
        )
    elif compressor in LOW_RANK and statistics.singular_shares is not None:
        place = RANKS.index(rank_of(compressor))
        kept, reference = statistics.singular_shares[place], REFERENCE_SINGULAR[place]
    else:
        return 1.0
    return min(MOST_CHANGE, sqrt((1 - kept) / (1 - reference)))


def beyond_noise(kept: float, noise: float) -> bool:
    """Whether some directions hold more energy than they would of noise, which has at most `noise` there."""
    return kept >= min(LESS_RANK * noise, (1 + noise) / 2)


def rank_of(compressor: str) -> int:
    return int(compressor.removeprefix("PowerSGD(rank=").removesuffix(")"))
