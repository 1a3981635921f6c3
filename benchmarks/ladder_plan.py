"""Plan of benchmarks/ladder.py: the next trainings, and the learning rates that follow from the known ones.

Every arm has its own learning rate on every rung. The search goes over half decades with the first tuning seed until
the best rate has a worse neighbor on both sides. The best rate is then trained with the second tuning seed, and the
search continues if that makes another rate the best.

The larger rungs have no search. Their learning rate is predicted: on every smaller rung of the family, the minimum of
a parabola through the loss over the logarithm of the rate; over rungs, a power law of the parameters. A smaller rung
counts once its best rate lies between two worse ones. Half and twice
the predicted rate are trained with the first tuning seed to confirm it, and replace it if they are better. The two best
are then trained with the second tuning seed, and the better mean counts. This comes first for the ends of the scale,
and for the other arms after the reported seeds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import exp, log
from typing import NamedTuple

import numpy as np
from benchmarks.ladder_arms import ARMS, ENDS, Arm
from benchmarks.ladder_tasks import RATES, Rung, rungs
from benchmarks.losses import number
from benchmarks.virtual_workers import APART, Run

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import GossamerError

TUNING_SEEDS = 100, 101  # no result is reported for these
DOUBLINGS = 3  # of a predicted rate, at most, up and down


class LadderRun(Run):
    """rung: name; arm: name; about: the task as it was; cpu_seconds: of all threads."""

    rung: str
    arm: str
    about: str
    cpu_seconds: float


class Job(NamedTuple):
    rung: str
    arm: str
    learning_rate: float
    seed: int


Losses = Mapping[float, Mapping[int, float]]  # by learning rate, then by seed


def key(run: LadderRun) -> Job:
    return Job(run["rung"], run["arm"], run["learning_rate"], run["seed"])


@cache
def meaning(recipe: str, workers: int) -> str | None:
    """The resolved recipe, or None where this version cannot read the text."""
    try:
        return APART if recipe == APART else repr(resolve(recipe, workers))
    except GossamerError:
        return None


def workers_of(arm: Arm, rung: Rung) -> int:
    return arm.workers or rung.workers


def steps_of(arm: Arm, rung: Rung) -> int:
    return max(1, round(rung.task.steps * arm.share * rung.workers / workers_of(arm, rung)))


def is_current(run: LadderRun, steps: int | None = None) -> bool:
    """Whether the run has the steps that are asked for, its task is unchanged, and its recipe still resolves to the one
    that was trained. steps: None for those of the rung."""
    arm, rung = ARMS.get(run["arm"]), rungs().get(run["rung"])
    if arm is None or rung is None or run["about"] != rung.about:
        return False
    return run["steps"] == (steps or steps_of(arm, rung)) and run["resolved"] == meaning(
        arm.recipe, workers_of(arm, rung)
    )


def tuning_losses(runs: Mapping[Job, LadderRun], rung: str, arm: str) -> dict[float, dict[int, float]]:
    found: dict[float, dict[int, float]] = {}
    for rate in RATES:
        for seed in TUNING_SEEDS:
            run = runs.get(Job(rung, arm, rate, seed))
            if run is not None:
                found.setdefault(rate, {})[seed] = number(run["held_out"])
    return found


def next_tries(losses: Losses, first: float) -> list[tuple[float, int]]:
    """(learning rate, seed) to train next; empty when the best rate is known."""
    seed, *others = TUNING_SEEDS
    if not losses:
        return [(first, seed)]
    best = best_rate(losses)
    at = RATES.index(best)
    around = [RATES[place] for place in (at - 1, at + 1) if 0 <= place < len(RATES)]
    missing = [rate for rate in around if rate not in losses]
    return [(rate, seed) for rate in missing] or [(best, other) for other in others if other not in losses[best]]


def best_rate(losses: Losses) -> float:
    """The rate with the lowest mean loss over the seeds that it was trained with."""
    means = {rate: sum(by_seed.values()) / len(by_seed) for rate, by_seed in losses.items()}
    return min(means, key=lambda rate: (means[rate], rate))


def tuned_rate(runs: Mapping[Job, LadderRun], rung: str, arm: str) -> float | None:
    """The learning rate of an arm whose search is finished, or whose rate is predicted; else None."""
    arm = ARMS[arm].rate_of or arm
    if rungs()[rung].predicts:
        tried = confirming_losses(runs, rung, arm)
        return best_confirmed(tried) if tried else predicted_rate(runs, rung, arm)
    losses = tuning_losses(runs, rung, arm)
    return best_rate(losses) if losses and not next_tries(losses, first_rate(runs, rung, arm)) else None


def smaller_rungs(rung: str) -> list[str]:
    """Names of the rungs of the same family with fewer parameters, small first."""
    mine = rungs()[rung]
    found = [other for other in rungs().values() if other.family == mine.family and other.parameters < mine.parameters]
    return [each.name for each in sorted(found, key=lambda each: each.parameters)]


def parabola_minimum(losses: Losses) -> float | None:
    """Learning rate at the minimum of the parabola through the best rate and its two neighbors.

    The loss is a function of the logarithm of the rate, with the first tuning seed. The neighbors are worse, so the
    minimum lies between them. None where the best rate has no neighbor on one side.
    """
    by_rate = {rate: by_seed[TUNING_SEEDS[0]] for rate, by_seed in losses.items() if TUNING_SEEDS[0] in by_seed}
    rates = sorted(by_rate)
    at = rates.index(min(by_rate, key=lambda rate: by_rate[rate])) if rates else 0
    if not 0 < at < len(rates) - 1:
        return None
    around = rates[at - 1 : at + 2]
    square, linear, _ = np.polyfit(np.log(around), [by_rate[rate] for rate in around], 2)
    return exp(-float(linear) / (2 * float(square)))


def predicted_rate(runs: Mapping[Job, LadderRun], rung: str, arm: str) -> float | None:
    """Learning rate c N^a of a model with N parameters, fitted to the smaller rungs; two significant digits.

    None where fewer than two smaller rungs have a best rate between two worse ones.
    """
    arm = ARMS[arm].rate_of or arm
    minima: dict[int, float] = {}  # by parameters
    for name in smaller_rungs(rung):
        losses = confirming_losses if rungs()[name].predicts else tuning_losses
        best = parabola_minimum(losses(runs, name, arm))
        if best is not None:
            minima[rungs()[name].parameters] = best
    if len(minima) < 2:
        return None
    power, scale = np.polyfit(np.log(list(minima)), np.log(list(minima.values())), 1)
    return float(f"{exp(float(scale) + float(power) * log(rungs()[rung].parameters)):.1e}")


def confirming_rates(runs: Mapping[Job, LadderRun], rung: str, arm: str) -> list[float]:
    """The predicted rate, in the middle of its multiples by powers of two; empty without a prediction."""
    predicted = predicted_rate(runs, rung, arm)
    if predicted is None:
        return []
    return [float(f"{predicted * 2.0**power:.1e}") for power in range(-DOUBLINGS, DOUBLINGS + 1)]


def confirming_losses(runs: Mapping[Job, LadderRun], rung: str, arm: str) -> dict[float, dict[int, float]]:
    """Tuning losses by learning rate, then by seed, of the predicted rate and its trained multiples."""
    found: dict[float, dict[int, float]] = {}
    for rate in confirming_rates(runs, rung, arm):
        jobs = [Job(rung, arm, rate, seed) for seed in TUNING_SEEDS]
        losses = {job.seed: number(runs[job]["held_out"]) for job in jobs if job in runs}
        if TUNING_SEEDS[0] in losses:
            found[rate] = losses
    return found


def best_confirmed(losses: Losses) -> float:
    """The best rate with the first tuning seed, or the second best if the mean of both seeds says so."""
    best, *others = _two_best(losses)
    second = TUNING_SEEDS[1]
    compared = {rate: losses[rate] for rate in (best, *others) if second in losses[rate]}
    return best_rate(compared) if len(compared) == 2 else best


def _two_best(losses: Losses) -> list[float]:
    return sorted(losses, key=lambda rate: losses[rate][TUNING_SEEDS[0]])[:2]


def confirmations(runs: Mapping[Job, LadderRun], rung: str, arm: str) -> list[Job]:
    """Trainings that confirm the predicted rate: itself, its double and its half, and further until the best rate has a
    worse neighbor on both sides; then the two best with the second tuning seed. Empty when it is confirmed."""
    grid, losses = confirming_rates(runs, rung, arm), confirming_losses(runs, rung, arm)
    if not grid:
        return []
    first, second = TUNING_SEEDS
    predicted = grid[DOUBLINGS]
    at = grid.index(_two_best(losses)[0]) if predicted in losses else DOUBLINGS
    around = [grid[place] for place in (at, at + 1, at - 1) if 0 <= place < len(grid)]
    missing = [Job(rung, arm, rate, first) for rate in around if rate not in losses]
    return missing or [Job(rung, arm, rate, second) for rate in _two_best(losses) if second not in losses[rate]]


def first_rate(runs: Mapping[Job, LadderRun], rung: str, arm: str) -> float:
    """Where the search starts: the arm's best rate on another rung of the same optimizer, or that of the first arm
    on this rung, as far as one is known."""
    mine = rungs()[rung]
    for other in rungs().values():
        if other.name != rung and other.optimizer == mine.optimizer:
            losses = tuning_losses(runs, other.name, arm)
            if losses:
                return best_rate(losses)
    first_arm, *_ = ARMS
    known = tuning_losses(runs, rung, first_arm)
    return best_rate(known) if known else mine.first_rate


def wanted(runs: Mapping[Job, LadderRun], names: Sequence[str], arms: Iterable[str], seeds: int) -> Iterator[Job]:
    """Jobs in the order of their importance: per rung, all searches, then all arms seed by seed, then confirmations."""
    chosen = list(arms)
    for rung in names:
        for only_first in () if rungs()[rung].predicts else (True, False):
            for arm in (each for each in chosen if not ARMS[each].rate_of):
                losses = tuning_losses(runs, rung, arm)
                for rate, seed in next_tries(losses, first_rate(runs, rung, arm)):
                    if not only_first or seed == TUNING_SEEDS[0]:
                        yield Job(rung, arm, rate, seed)
        searched = [arm for arm in chosen if not ARMS[arm].rate_of] if rungs()[rung].predicts else []
        for arm in searched:
            if arm in ENDS:
                yield from confirmations(runs, rung, arm)
        for seed in range(seeds):
            for arm in chosen:
                rate_or_none = tuned_rate(runs, rung, arm)
                if rate_or_none is not None and Job(rung, arm, rate_or_none, seed) not in runs:
                    yield Job(rung, arm, rate_or_none, seed)
        for arm in searched:
            yield from confirmations(runs, rung, arm)


def at_an_end(losses: Losses) -> bool:
    """Whether the best learning rate has no worse neighbor on one side, because the grid ends there."""
    best = best_rate(losses)
    return best in (min(losses), max(losses))
