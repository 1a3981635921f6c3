"""Random recipes by the grammar of terms, such as DiLoCo(3, fragments=2) + Feedback(Sharded(Int8())) + Ring()."""

from __future__ import annotations

from random import Random

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import RecipeError


def codec(draw: Random) -> str:
    return draw.choice(
        [
            "Dense()",
            "Dense(dtype='bfloat16')",
            "Dense(dtype='float16')",
            "Int8()",
            "Int8(block=32, stochastic=True)",
            "Float4(block=64)",
            "OneBit(block=64)",
            "OneBit(columns=True)",
            "QSGD(levels=7, block=64)",
            "TwoBit(threshold=0.01)",
            "TwoBit(adaptive=True, block=64)",
            "SignMagnitude(block=64)",
            "BinMeans()",
            "BinMeans(bits=3, feedback=False)",
            "EDEN(bits=2, block=64)",
            "Threshold(value=0.01, capacity=0.2)",
            sparse(draw),
        ]
    )


def sparse(draw: Random) -> str:
    return draw.choice(["TopK(0.1)", "TopK(0.3, chunk=64)", "TopK(0.05, feedback=False)"])


def collective(draw: Random) -> str:
    return draw.choice(
        [
            "PowerSGD(rank=2)",
            "RandomProjection(rank=2)",
            "RandomK(0.1)",
            "RandomK(0.2, feedback=False)",
            "ARCTopK(density=0.1, row=8)",
            "SharedMask(density=0.1)",
            "SharedMask(density=0.2, feedback=False)",
            "TernGrad()",
            "TernGrad(clip=2.5, feedback=False)",
        ]
    )


def momentum(draw: Random) -> str:
    inner = compressor(draw, 1)
    return draw.choice(
        [
            "DGC(density=0.1)",
            "DGC(density=0.1, warmup=4, masking=False, clip=1.0)",
            f"DGC(density=0.1, then={codec(draw)})",
            f"OneBitAdam(warmup=3, inner={inner})",
            f"CompressedAdam({inner}, warmup=2)",
            f"CompressedAdam({inner}, variance='update', warmup=2)",
            f"AdamUpdate({inner})",
            f"MicroAdam({inner}, window=3)",
            f"DeMo({inner}, decay=0.9)",
            "DeMo(decay=0.9, sign=False)",
        ]
    )


def compressor(draw: Random, depth: int = 0) -> str:
    """Text of a compressor, which may hold others."""
    if depth >= 3 or draw.random() < 0.35:
        return draw.choice([codec, codec, sparse, collective])(draw)
    inner = compressor(draw, depth + 1)
    rule = draw.choice(["rule='ef21'", "rule='ef21', momentum=0.5", "decay=0.9", "dtype='bfloat16'", "decay=1.0"])
    return draw.choice(
        [
            f"Feedback({inner}, {rule})",
            f"Feedback({inner})",
            f"Route({inner}, smallest={draw.choice([1, 32, 300])})",
            f"Route({inner}, rest={compressor(draw, depth + 1)}, smallest=100)",
            f"Route({inner}, names='*last*')",
            f"Sharded({codec(draw)})",
            f"SparseSum({sparse(draw)})",
            f"Feedback(Sharded({codec(draw)}))",
            f"Feedback(SparseSum({sparse(draw)}))",
            f"Chain({sparse(draw)}, {codec(draw)})",
            f"Rotated({inner}, by='{draw.choice(['dct', 'hadamard'])}', block=32)",
            f"Warmup({inner}, steps={draw.choice([2, 5, 30])})",
            f"Warmup({inner})",
            f"Adaptive({sparse(draw)}, every={draw.choice([1, 3])})",
            f"Hierarchical({inner}, per_node=2)",
            f"PerWorker({codec(draw)}, slow={codec(draw)}, ranks={draw.choice([0, 1])})",
        ]
    )


def strategy(draw: Random, world: int) -> str:
    period = draw.choice([1, 2, 3, 4])
    moments = draw.choice(["", "", ", optimizer_state='average'", ", optimizer_state='align'"])
    moments = draw.choice(
        [
            moments,
            moments,
            ", optimizer_state='reset'",
            f", first_moment_period={period * draw.choice([1, 2])}",
            f", second_moment_period={period * draw.choice([1, 2])}",
            ", second_moment='agreed'",
            ", second_moment='amsgrad'",
        ]
    )
    fragments = draw.choice(["", "", f", fragments={draw.randint(1, period)}"])
    outer = draw.choice(["", ", outer_learning_rate=1.0, outer_momentum=0.0", ", outer_momentum=0.5"])
    late = draw.choice(["", "", f", delay={draw.randint(0, period - 1)}", ", mix=0.5", ", averaging='radial'"])
    return draw.choice(
        [
            "EveryStep()",
            "EveryStep()",
            f"EveryStep(accumulate={draw.choice([2, 3])})",
            f"EveryStep(delay={draw.choice([1, 2])})",
            f"EveryStep(global_batch={8 * world}, batch=4)",
            f"LocalSGD({period}{moments}{fragments})",
            f"LocalSGD({period}, per_site=2{moments})",
            f"PostLocalSGD({period}, start={draw.choice([2, 3, 5])})",
            f"DiLoCo({period}{outer}{moments}{fragments}{late})",
            f"DiLoCo({period}{outer}{moments}{fragments}{late})",
            f"DelayedAveraging(delay={draw.choice([0, 1, 3])}, period={period})",
            f"Gossip(period={draw.choice([1, 2])})",
            "Gossip('push-sum')",
            f"NoLoCo({period})",
            "Silent()",
        ]
    )


def recipe(draw: Random, world: int) -> str:
    chosen = strategy(draw, world)
    gossips = chosen.startswith(("Gossip", "NoLoCo"))
    more = ["Torus()", "RandomPeers(count=1)", "Groups(size=2)", "Exponential(one_peer=True)"] if gossips else []
    topology = draw.choice(["Complete()", "Complete()", "Ring()", "Exponential()", "Hierarchy(per_node=2)", *more])
    compressed = momentum(draw) if draw.random() < 0.2 else compressor(draw)
    return f"{chosen} + {compressed} + {topology}"


def random_recipe(draw: Random, world: int) -> str:
    """A recipe that the grammar and the rules of recipes allow."""
    while True:
        text = recipe(draw, world)
        try:
            resolve(text, world)
        except (RecipeError, ValueError):
            continue
        return text
