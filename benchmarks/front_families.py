"""Families of recipes of benchmarks/front.py: add a line here, and it is trained and shown.

A family's learning rate is tuned for its representative, and all its recipes are trained with that one. A text that
means nothing to this version is left out, and said.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.front_tasks import SGD
from benchmarks.ladder_tasks import ADAMW, MUON

DENSE = "Dense()"

FOUR_BITS = "Feedback(Sharded(Float4()))"
ONE_BIT = f"Route(Feedback(Sharded(OneBit())), rest={FOUR_BITS})"
TWENTIETH = "Chain(TopK(density=0.05), SignMagnitude())"  # a twentieth of the entries, two bits each
FEWEST = "Route(Feedback(TopK(density=0.0001)), rest=Feedback(Sharded(OneBit())))"


def diloco(period: int, momentum: float = 0.5, more: str = "") -> str:
    return f"DiLoCo(period={period}, outer_learning_rate=1.0, outer_momentum={momentum}{more})"


def chosen(density: float, rest: str) -> str:
    """Few entries of matrices, two bits each."""
    return f"Route(Feedback(Chain(TopK(density={density}), SignMagnitude())), rest={rest})"


def cosines(density: float) -> str:
    """Few coefficients of everyone's momentum, two bits each, and the rest in four."""
    inner = f"Rotated(Chain(TopK(density={density}), SignMagnitude()))"
    return f"DeMo(Route({inner}, rest=Float4(feedback=False)))"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Recipes by their names in the picture, from many bytes to few; {twentieth} stands for that part of all steps."""

    about: str
    representative: str
    recipes: Mapping[str, str]
    optimizers: frozenset[str] = frozenset({ADAMW, SGD, MUON})


FAMILIES: dict[str, Family] = {
    "few-bits": Family(
        about="every entry, in few bits",
        representative="Float4()",
        recipes={
            "bfloat16": "Dense(dtype='bfloat16')",
            "8 bits": "Int8()",
            "4 bits": "Float4()",
            "ternary": "TernGrad()",
            "sign, size": "SignMagnitude()",
            "2 bits": "TwoBit()",
            "1 bit": "OneBit()",
            "1 bit, rest 4": ONE_BIT,
        },
    ),
    "few-entries": Family(
        about="few entries, with feedback",
        representative="TopK(density=0.01)",
        recipes={
            "10 %": "TopK(density=0.1)",
            "1 %": "TopK(density=0.01)",
            "random 1 %": "RandomK(density=0.01)",
            "5 %, 2 bits": TWENTIETH,
            "1 %, 2 bits": chosen(0.01, FOUR_BITS),
            "0.1 %, 2 bits": chosen(0.001, "Feedback(Sharded(OneBit()))"),
            "0.01 %": FEWEST,
        },
    ),
    "shared-entries": Family(
        about="entries that all agree on",
        representative="SharedMask(density=0.01)",
        recipes={
            "rows, 10 %": "ARCTopK(density=0.1)",
            "10 %": "SharedMask(density=0.1)",
            "sums of 1 %": "SparseSum(TopK(density=0.01))",
            "1 %": "SharedMask(density=0.01)",
            "0.1 %": f"Route(Feedback(SharedMask(density=0.001)), rest={FOUR_BITS})",
        },
    ),
    "low-rank": Family(
        about="low rank",
        representative="PowerSGD(rank=2)",
        recipes={
            "rank 8": "PowerSGD(rank=8)",
            "rank 4": "PowerSGD(rank=4)",
            "rank 2": "PowerSGD(rank=2)",
            "rank 1": "PowerSGD(rank=1)",
            "rank 1, rest 4 bits": f"Route(Feedback(PowerSGD(rank=1)), rest={FOUR_BITS})",
        },
    ),
    "ef21": Family(
        about="feedback of differences (EF21)",
        representative="Feedback(TopK(density=0.01), rule='ef21')",
        recipes={
            "top 10 %": "Feedback(TopK(density=0.1), rule='ef21')",
            "1 bit": "Feedback(OneBit(), rule='ef21')",
            "top 1 %": "Feedback(TopK(density=0.01), rule='ef21')",
            "top 0.1 %": "Feedback(TopK(density=0.001), rule='ef21')",
        },
    ),
    "adam-updates": Family(
        about="Adam's updates, not gradients",
        representative="AdamUpdate(OneBit())",
        recipes={
            "4 bits": "AdamUpdate(Float4())",
            "1 bit": "AdamUpdate(OneBit())",
            "1 bit, rest 4": f"Route(AdamUpdate(Sharded(OneBit())), rest={FOUR_BITS})",
            "rank 1": "AdamUpdate(PowerSGD(rank=1))",
            "1 %": "AdamUpdate(TopK(density=0.01))",
            "5 %, 2 bits": f"AdamUpdate({TWENTIETH})",
            "1 %, 2 bits": f"Route(AdamUpdate(Chain(TopK(density=0.01), SignMagnitude())), rest={FOUR_BITS})",
            "0.1 %, 2 bits": f"Route(AdamUpdate(Chain(TopK(density=0.001), SignMagnitude())), rest={FOUR_BITS})",
        },
        optimizers=frozenset({ADAMW}),
    ),
    "adam-moments": Family(
        about="Adam's moments taken along",
        representative="CompressedAdam(TopK(density=0.01))",
        recipes={
            "1-bit Adam": "OneBitAdam(warmup={twentieth})",
            "frozen, top 1 %": "OneBitAdam(warmup={twentieth}, inner=TopK(density=0.01))",
            "AdamS, 1 bit": "CompressedAdam(OneBit())",
            "AdamS, top 1 %": "CompressedAdam(TopK(density=0.01))",
            "MicroAdam, 1 %": "MicroAdam(TopK(density=0.01))",
        },
        optimizers=frozenset({ADAMW}),
    ),
    "momentum": Family(
        about="SGD's momentum taken along",
        representative="DGC(density=0.01)",
        recipes={
            "DGC, 1 %": "DGC(density=0.01)",
            "DGC, 0.1 %": "Route(DGC(density=0.001), rest=Int8())",
            "DGC, 0.01 %": "Route(DGC(density=0.0001), rest=Feedback(Sharded(OneBit())))",
        },
        optimizers=frozenset({SGD}),
    ),
    "transforms": Family(
        about="in another basis, and by sign",
        representative="DeMo()",
        recipes={
            "spread, 4 bits": "Rotated(Float4(), by='hadamard')",
            "spread, 1 bit": "Rotated(OneBit(), by='hadamard')",
            "DeMo, 1 %": "DeMo()",
            "DeMo, entries": "DeMo(TopK(density=0.01))",
            "DeMo, 0.1 %": "DeMo(Rotated(TopK(density=0.001)))",
            "DeMo, 1 %, 2 bits": cosines(0.01),
            "DeMo, 0.3 %, 2 bits": cosines(0.003),
            "DeMo, 0.1 %, 2 bits": cosines(0.001),
        },
    ),
    "local": Family(
        about="local steps, everything sent",
        representative=diloco(50),
        recipes={
            "10, averaged": "LocalSGD(period=10)",
            "and moments": "LocalSGD(period=10, first_moment_period=30, second_moment_period=60)",
            "10 steps": diloco(10),
            "30 steps": diloco(30),
            "100 steps": diloco(100),
            "200 steps": diloco(200),
            "500 steps": diloco(500),
        },
    ),
    "local-few-bits": Family(
        about="local steps, in few bits",
        representative=f"{diloco(50)} + {ONE_BIT}",
        recipes={
            "10, 4 bits": f"{diloco(10)} + Float4()",
            "10, 1 bit": f"{diloco(10)} + {ONE_BIT}",
            "50, 4 bits": f"{diloco(50)} + Float4()",
            "50, 1 bit": f"{diloco(50)} + {ONE_BIT}",
            "100, 1 bit": f"{diloco(100)} + {ONE_BIT}",
            "200, 1 bit": f"{diloco(200)} + {ONE_BIT}",
            "500, 1 bit": f"{diloco(500)} + {ONE_BIT}",
        },
    ),
    "local-few-entries": Family(
        about="local steps, few entries",
        representative=f"{diloco(20, 0.0)} + {TWENTIETH}",
        recipes={
            "10, 5 %": f"{diloco(10, 0.0)} + {TWENTIETH}",
            "20, 5 %": f"{diloco(20, 0.0)} + {TWENTIETH}",
            "50, 5 %": f"{diloco(50, 0.0)} + {TWENTIETH}",
            "50, 1 %": f"{diloco(50, 0.0)} + {chosen(0.01, FOUR_BITS)}",
            "100, 1 %": f"{diloco(100, 0.0)} + {chosen(0.01, FOUR_BITS)}",
        },
    ),
    "outer-momentum": Family(
        about="local steps, outer momentum",
        representative=f"{diloco(50, 0.9)} + Float4()",
        recipes={
            "20, 0.9": f"{diloco(20, 0.9)} + Float4()",
            "20, 0": f"{diloco(20, 0.0)} + Float4()",
            "50, 0.9": f"{diloco(50, 0.9)} + Float4()",
            "50, 0.9, paper": "DiLoCo(period=50) + Float4()",
            "50, 0": f"{diloco(50, 0.0)} + Float4()",
            "200, 0": f"{diloco(200, 0.0)} + {ONE_BIT}",
        },
    ),
    "fragments": Family(
        about="local steps, in fragments",
        representative=f"{diloco(50, 0.5, ', fragments=5')} + Float4()",
        recipes={
            "5 parts": diloco(50, 0.5, ", fragments=5"),
            "5 parts, 4 bits": f"{diloco(50, 0.5, ', fragments=5')} + Float4()",
            "and late": f"{diloco(50, 0.5, ', fragments=5, delay=5, mix=0.5')} + Float4()",
            "and late, 1 bit": f"{diloco(100, 0.5, ', fragments=5, delay=5, mix=0.5')} + {ONE_BIT}",
        },
    ),
    "delayed": Family(
        about="means that come late",
        representative="EveryStep(delay=1) + Float4()",
        recipes={
            "1 late": "EveryStep(delay=1)",
            "own steps, 4 late": "DelayedAveraging(delay=4)",
            "1 late, 4 bits": "EveryStep(delay=1) + Float4()",
            "4 late, 4 bits": "EveryStep(delay=4) + Float4()",
            "10 late, 10": "DelayedAveraging(delay=10, period=10) + Float4()",
        },
    ),
}
