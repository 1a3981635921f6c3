"""Arms of benchmarks/ladder.py: the rivals that every table shows, and the recipes that are compared with them."""

from dataclasses import dataclass

from benchmarks.virtual_workers import APART

DENSE = "Dense()"
LOCK_STEP, SILENCE = ENDS = "lock step", "silence"  # of the scale of the retained benefit
FOUR_BITS = "Feedback(Sharded(Float4()))"
SPARSELOCO = (
    "DiLoCo(period=30, outer_learning_rate=1.0, outer_momentum=0.0) + "
    "Feedback(Chain(TopK(density=0.015625, chunk=4096), BinMeans(bits=2)), decay=0.95)"
)
PERIODS = 2, 4, 8, 16, 32  # of parameters that are averaged in one bit
OUTER_RATES = (
    *((4, 1.5), (4, 2.0), (4, 3.0)),
    *((8, 1.5), (16, 1.5), (32, 2.0)),
)  # periods, and by how much their mean difference is lengthened
IN_TURN = (
    (4, 1.0, 4),
    (16, 1.5, 4),
    (16, 2.0, 8),
    (32, 2.0, 8),
    (64, 2.0, 16),
    (128, 2.0, 32),
)  # periods, outer rates, fragments
UNALIGNED = (16, 1.5, 4), (32, 2.0, 8)  # the same for Muon, whose momentum cannot be aligned
ALIGNED_RADIAL = ", averaging='radial', optimizer_state='align'"
ONE_BIT = f"Route(Feedback(Sharded(OneBit())), rest={FOUR_BITS})"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of a table.

    recipe: recipe text, or APART for workers that never communicate. workers: 0 means as many as the study has; one
    worker makes as many times more steps, so all arms see equally many samples. share: of the study's steps; a rival
    with fewer steps sees fewer samples. rate_of: the arm that has the same recipe and the study's number of steps; its
    learning rate is used without a search.
    """

    name: str
    recipe: str
    workers: int = 0
    share: float = 1.0
    rate_of: str = ""


RIVALS = [
    Arm(name=LOCK_STEP, recipe=DENSE),
    Arm(name=SILENCE, recipe=APART),
    Arm(name="lock step, bfloat16", recipe="Dense(dtype='bfloat16')"),
    Arm(name="lock step, 20 batches accumulated", recipe="EveryStep(accumulate=20)"),
    Arm(name="lock step, 1/20 of the steps", recipe=DENSE, share=0.05),
    Arm(name="one worker, as many samples", recipe=DENSE, workers=1),
]


def diloco(period: int, momentum: float = 0.5, rate: float = 1.0, more: str = "") -> str:
    return f"DiLoCo(period={period}, outer_learning_rate={rate}, outer_momentum={momentum}{more})"


def aligned(period: int) -> str:
    return f"LocalSGD(period={period}, optimizer_state='align')"


def faster(period: int, rate: float, fragments: int = 1, state: str = ", optimizer_state='align'") -> str:
    parts = f", fragments={fragments}" if fragments > 1 else ""
    return diloco(period, 0.0, rate, f"{parts}{state}")


def demo(density: float) -> str:
    inner = f"Rotated(Chain(TopK(density={density}), SignMagnitude()))"
    return f"DeMo(Route({inner}, rest=Float4(feedback=False)))"


def sparse(density: float) -> str:
    return f"Route(Feedback(Chain(TopK(density={density}), SignMagnitude())), rest={FOUR_BITS})"


def arm(recipe: str, name: str = "") -> Arm:
    return Arm(name=name or recipe, recipe=recipe)


EVERY_STEP = [
    arm("Float4()", "4 bits"),
    arm(ONE_BIT, "1 bit"),
    arm("Int8()", "8 bits"),
    arm("PerWorker(Int8(), slow=OneBit(), ranks=3)", "8 bits, one worker of four 1 bit"),
    arm(f"Route(AdamUpdate(Sharded(OneBit())), rest={FOUR_BITS})", "Adam's update, 1 bit"),
    arm(demo(0.01), "DeMo, 1 %, 2 bits"),
    arm(demo(0.003), "DeMo, 0.3 %, 2 bits"),
    arm(sparse(0.01), "top 1 %, 2 bits"),
    arm("PowerSGD(rank=2)", "rank 2"),
]
LOCAL = [
    arm("LocalSGD(period=1)", "parameters averaged every step"),
    arm("LocalSGD(period=4)", "parameters averaged every 4 steps"),
    arm(f"LocalSGD(period=4) + {ONE_BIT}", "parameters averaged every 4 steps, 1 bit"),
    arm(f"LocalSGD(period=8) + {ONE_BIT}", "parameters averaged every 8 steps, 1 bit"),
    arm("LocalSGD(period=8) + OneBit()", "every 8 steps, plain 1 bit"),
    arm("LocalSGD(period=4, optimizer_state='align') + OneBit()", "every 4 steps, plain 1 bit, momentum aligned"),
    arm("LocalSGD(period=20)", "parameters averaged every 20 steps"),
    arm("LocalSGD(period=4, optimizer_state='average')", "every 4 steps, moments averaged"),
    arm("LocalSGD(period=4, optimizer_state='align')", "every 4 steps, momentum aligned"),
    *(arm(f"{aligned(period)} + {ONE_BIT}", f"every {period} steps, 1 bit, momentum aligned") for period in PERIODS),
    *(
        arm(
            f"{faster(period, rate)} + {ONE_BIT}", f"every {period} steps, 1 bit, momentum aligned, outer rate {rate:g}"
        )
        for period, rate in OUTER_RATES
    ),
    arm(f"{faster(4, 1.0, 1, ALIGNED_RADIAL)} + {ONE_BIT}", "every 4 steps, 1 bit, momentum aligned, radial mean"),
    *(
        arm(
            f"{faster(period, rate, fragments)} + {ONE_BIT}",
            f"{fragments} fragments, each every {period} steps, 1 bit, momentum aligned, outer rate {rate:g}",
        )
        for period, rate, fragments in IN_TURN
    ),
    *(
        arm(
            f"{faster(period, rate, fragments, '')} + {ONE_BIT}",
            f"{fragments} fragments, each every {period} steps, 1 bit, outer rate {rate:g}",
        )
        for period, rate, fragments in UNALIGNED
    ),
    *(
        arm(f"{aligned(4)} + {sparse(1 / largest)}", f"every 4 steps, largest 1/{largest}, 2 bits, momentum aligned")
        for largest in (32, 64)
    ),
    arm(diloco(1, 0.0, 2.0), "parameters averaged every step, outer rate 2"),
    arm(diloco(4), "DiLoCo 4"),
    arm(f"{diloco(4)} + {ONE_BIT}", "DiLoCo 4, 1 bit"),
    arm(diloco(20), "DiLoCo 20"),
    arm(diloco(20, 0.0, 2.0), "DiLoCo 20, outer rate 2 without momentum"),
    arm(diloco(20, 0.0, 1.0, ", averaging='radial'"), "DiLoCo 20, radial mean without momentum"),
    arm(diloco(20, 0.5, 1.0, ", averaging='radial'"), "DiLoCo 20, radial mean"),
    arm(diloco(20, 0.5, 1.0, ", second_moment='agreed'"), "DiLoCo 20, agreed second moment"),
    arm(SPARSELOCO, "SparseLoCo 30"),
    arm("DiLoCo(period=20)", "DiLoCo 20, outer 0.7 and 0.9"),
    arm(diloco(20, 0.9, 1.0), "DiLoCo 20, outer 1 and 0.9"),
    arm(f"{diloco(20)} + Float4()", "DiLoCo 20, 4 bits"),
    arm(f"{diloco(20)} + {ONE_BIT}", "DiLoCo 20, 1 bit"),
    arm(f"{diloco(30)} + {ONE_BIT}", "DiLoCo 30, 1 bit"),
    arm(f"{diloco(50)} + {ONE_BIT}", "DiLoCo 50, 1 bit"),
    arm(f"{diloco(100)} + {ONE_BIT}", "DiLoCo 100, 1 bit"),
]
MORE_STEPS = 1.25, 1.5, 2.0, 3.0, 4.0  # times those of the study, to reach the loss of lock step
LONGER = [
    Arm(name=f"{each.name}, {times:g} times the steps", recipe=each.recipe, share=times, rate_of=each.name)
    for each in [*EVERY_STEP, *LOCAL]
    for times in MORE_STEPS
]
ARMS = {each.name: each for each in [*RIVALS, *EVERY_STEP, *LOCAL, *LONGER]}
