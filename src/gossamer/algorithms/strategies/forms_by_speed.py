"""Forms by speed: the part of the sum of all workers' speeds that a strategy uses, and forms that use more of it.

seconds per part 1, 1, 1, 5     EveryStep()                                            0.25
                                EveryStep(global_batch=256, batch=8, balance=True)     1.00
                                LocalSGD(period=20, balance=True)                      1.00
                                AsyncDiLoCo(period=24)                                 1.00
                                Gossip(mixing='pairwise')                              1.00
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo
from gossamer.algorithms.strategies.base import Strategy
from gossamer.algorithms.strategies.every_step import EveryStep
from gossamer.algorithms.strategies.gossip import PAIRWISE, Gossip
from gossamer.algorithms.strategies.local_sgd import LocalSGD
from gossamer.algorithms.strategies.shares_by_speed import enough_parts, enough_steps, useful_share

BATCH, PARTS, PERIOD, ASYNC_PERIOD = 8, 32, 20, 24  # of the proposals: samples of a pass, passes of a step, local steps


def speed_use(strategy: Strategy, seconds: Sequence[float]) -> float:
    """Return the useful samples per second, as a part of those of the same workers without communication, in (0, 1].

    Messages take no time here. A strategy with several stages counts by its last one.

    Args:
        strategy: of all workers.
        seconds: compute time of one batch, by rank, above 0.

    Example:
        >>> speed_use(EveryStep(), [1, 1, 1, 5])
        0.25
    """
    parts = strategy.steady_stage.parts_at(seconds)
    return 1.0 if parts is None else useful_share(parts, seconds)


def forms_by_speed(seconds: Sequence[float]) -> Mapping[Strategy, float]:
    """Return strategies for workers with these compute times per batch, and the `speed_use` of each.

    Steps and periods are so long that the slowest worker has its part. Their batch is an example.
    """
    balanced = (
        EveryStep(global_batch=BATCH * enough_parts(seconds, PARTS), batch=BATCH, balance=True),
        LocalSGD(period=enough_steps(seconds, PERIOD), balance=True),
        AsyncDiLoCo(period=ASYNC_PERIOD),
        Gossip(mixing=PAIRWISE),
    )
    return {strategy: speed_use(strategy, seconds) for strategy in balanced}


def proposal(seconds: Sequence[float]) -> str:
    """Return the use of the workers' speeds by equal shares and by other forms, and how to compare their losses."""
    lock_step, local_steps, asynchronous, pairwise = forms_by_speed(seconds).items()
    return (
        f"equal shares use {speed_use(EveryStep(), seconds):.2f} of what these ranks can compute; with balance=True "
        f"{lock_step[0]!r} would use {lock_step[1]:.2f} and {local_steps[0]!r} {local_steps[1]:.2f}, and "
        f"{asynchronous[0]!r}, on servers, {asynchronous[1]:.2f} and {pairwise[0]!r} {pairwise[1]:.2f}. gossamer "
        "advise --speeds with the folder of this run compares their losses in virtual time"
    )
