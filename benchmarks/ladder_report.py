"""Report of benchmarks/ladder.py: retained benefit per arm and rung, its change with model size, and a prediction."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, pairwise
from math import exp, inf, isfinite, isnan, log, log2, nan, sqrt
from typing import Any

import numpy as np
from benchmarks.ladder_arms import ARMS, LOCK_STEP, SILENCE, Arm
from benchmarks.ladder_plan import (
    Job,
    LadderRun,
    at_an_end,
    confirming_losses,
    predicted_rate,
    smaller_rungs,
    steps_of,
    tuned_rate,
    tuning_losses,
)
from benchmarks.ladder_tasks import Rung, rungs
from benchmarks.losses import Losses, number
from benchmarks.report import markdown
from benchmarks.virtual_workers import APART

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.recipes.retained_benefit import MeasuredShare, bands, retained_benefit, rounds_of, text
from gossamer.base.intervals import ConfidenceInterval, student_quantile
from gossamer.base.units import bytes_text

FEW = 3  # seeds of a share that others may rely on
BUDGETS = 10, 30, 100, 300, 1000, 5000  # times fewer bytes than lock step
LEAST_GAP, LEAST_SPREADS = 0.15, 20.0  # of silence over lock step, for a task that can rank recipes
LEAST_TAU = 0.6  # of the ranking between rungs
ABOUT = (
    "`retained` is (L_silent - L) / (L_silent - L_dense) with a 95 % interval over paired seeds (Fieller): 100 % is "
    "uncompressed lock step, 0 % equals workers that never communicate. L is the held-out loss of the parameters that "
    "the workers agree on, after the same number of samples for all arms. Every arm has its own learning rate on every "
    "rung, tuned over half decades with two other seeds on other held-out files, or predicted from the smaller rungs "
    "(a parabola over the logarithm of the rate, then a power law of the parameters). Bytes are the payload that a "
    "worker sends, counted at the transport; `times fewer` compares with lock step in float32."
)


@dataclass(frozen=True)
class Results:
    """The reported runs of one rung, by arm and seed; rates: the tuned learning rate of each arm."""

    rung: Rung
    runs: Mapping[str, Mapping[int, LadderRun]]
    rates: Mapping[str, float]
    edges: frozenset[str]  # arms whose best learning rate is at an end of the grid
    confirmed: Mapping[str, Mapping[float, Mapping[int, float]]] = field(
        default_factory=dict
    )  # as by confirming_losses

    def losses(self, arm: str) -> dict[int, float]:
        return {seed: number(run["held_out"]) for seed, run in self.runs[arm].items()}

    def bytes_per_step(self, arm: str) -> float:
        """Mean payload bytes that one worker sends, over the steps of lock step."""
        return statistics.fmean(run["bytes_sent"] for run in self.runs[arm].values()) / self.rung.task.steps

    def times_fewer(self, arm: str) -> float:
        sent = self.bytes_per_step(arm)
        return self.bytes_per_step(LOCK_STEP) / sent if sent else inf

    def rounds(self, arm: str) -> float:
        """Steps over the recipe's period; 0 if the workers communicate in every step."""
        if ARMS[arm].recipe == APART:
            return 0.0
        return rounds_of(resolve(ARMS[arm].recipe, self.rung.workers), steps_of(ARMS[arm], self.rung))

    def retained(self, arm: str) -> ConfidenceInterval:
        return retained_benefit(self.losses(arm), silent=self.losses(SILENCE), dense=self.losses(LOCK_STEP))

    @property
    def compared(self) -> list[str]:
        """Arms with as many samples as lock step, without it and silence, from most bytes to fewest."""
        found = [arm for arm in self.runs if arm not in (LOCK_STEP, SILENCE) and not ARMS[arm].rate_of]
        return sorted(found, key=self.times_fewer)

    @property
    def gap(self) -> float:
        """L_silent / L_dense - 1."""
        return (
            Losses(tuple(self.losses(SILENCE).values())).mean / Losses(tuple(self.losses(LOCK_STEP).values())).mean - 1
        )

    @property
    def gap_in_spreads(self) -> float:
        """L_silent - L_dense in standard deviations of one arm's loss, without the part that a seed adds to both arms.

        A seed chooses the text, so it moves all arms alike, and the intervals of this page are paired. The deviation is
        that of the differences over the square root of 2: if the arms are independent, it is the deviation over seeds.
        nan with one seed.
        """
        silent, dense = self.losses(SILENCE), self.losses(LOCK_STEP)
        gaps = [silent[seed] - dense[seed] for seed in silent if seed in dense]
        if len(gaps) < 2:
            return nan
        spread = statistics.stdev(gaps) / sqrt(2)
        return statistics.fmean(gaps) / spread if spread else inf

    @property
    def is_admitted(self) -> bool:
        few = len(self.losses(LOCK_STEP)) < FEW
        return not few and self.gap >= LEAST_GAP and self.gap_in_spreads >= LEAST_SPREADS

    def best(self, factor: float) -> str | None:
        """The arm that retains most among those that send at least so many times fewer bytes."""
        cheap = [arm for arm in self.compared if self.times_fewer(arm) >= factor and isfinite(self.times_fewer(arm))]
        return max(cheap, key=lambda arm: self.retained(arm).value, default=None)


def results(runs: Mapping[Job, LadderRun], names: Sequence[str], seeds: int) -> list[Results]:
    """Rungs with at least one seed of both lock step and silence, each with the seeds that both have."""
    found: list[Results] = []
    for name in names:
        mine: dict[str, dict[int, LadderRun]] = {}
        rates: dict[str, float] = {}
        for arm in ARMS:
            rate = tuned_rate(runs, name, arm)
            jobs = [Job(name, arm, rate, seed) for seed in range(seeds)] if rate is not None else []
            if rate is not None and (known := {job.seed: runs[job] for job in jobs if job in runs}):
                mine[arm], rates[arm] = known, rate
        if LOCK_STEP in mine and SILENCE in mine and (both := {*mine[LOCK_STEP]} & {*mine[SILENCE]}):
            kept = {arm: {seed: run for seed, run in by_seed.items() if seed in both} for arm, by_seed in mine.items()}
            own = [arm for arm in rates if not ARMS[arm].rate_of]
            searched = {arm: tuning_losses(runs, name, arm) for arm in own if not rungs()[name].predicts}
            edges = frozenset(arm for arm, losses in searched.items() if at_an_end(losses))
            confirmed = {arm: confirming_losses(runs, name, arm) for arm in own if rungs()[name].predicts}
            trained = {arm: each for arm, each in kept.items() if each}
            found.append(Results(rungs()[name], trained, rates, edges, confirmed))
    return found


def measured(found: Sequence[Results]) -> list[dict[str, Any]]:
    """Shares for gossamer.algorithms.recipes.retained_benefit: of admitted rungs, and arms with FEW seeds or more."""
    return [
        asdict(
            MeasuredShare(
                recipe=ARMS[arm].recipe,
                task=each.rung.name,
                optimizer=each.rung.optimizer,
                workers=each.rung.workers,
                times_fewer=round(each.times_fewer(arm), 1),
                rounds=round(each.rounds(arm), 1),
                value=round(share.value, 3),
                low=round(share.low, 3),
                high=round(share.high, 3),
            )
        )
        for each in found
        if each.is_admitted
        for arm in each.compared
        if len(each.runs[arm]) >= FEW and _is_plain(ARMS[arm]) and isfinite((share := each.retained(arm)).low)
    ]


def _is_plain(arm: Arm) -> bool:
    """Whether the arm is its recipe alone, without another number of workers or steps."""
    return arm.workers == 0 and arm.share == 1


def page_part(found: Sequence[Results], about: Sequence[str], predicted: Sequence[Mapping[str, Any]] = ()) -> str:
    """predicted: of predictions(), written before the runs."""
    sections = (part for each in found for part in _sections(each))
    over = (*_over_rounds(found), *_over_size(found))
    return "\n\n".join([ABOUT, *about, *sections, *over, *_compared_with(found, predicted)])


def _sections(each: Results) -> Iterator[str]:
    silent, dense = (Losses(tuple(each.losses(arm).values())) for arm in (SILENCE, LOCK_STEP))
    yield f"## {each.rung.name}"
    verdict = "admitted" if each.is_admitted else "**not admitted: this task cannot rank recipes**"
    spreads = f"{each.gap_in_spreads:.0f} spreads" if not isnan(each.gap_in_spreads) else "one seed, spread unknown"
    yield (
        f"{each.rung.about}. L_silent {silent}, L_dense {dense}: silence is {100 * each.gap:.1f} % above lock step, "
        f"{spreads} over paired seeds ({verdict}; required: {100 * LEAST_GAP:.0f} %, {LEAST_SPREADS:.0f} spreads and "
        f"{FEW} seeds)."
    )
    yield markdown([_budget(each, factor) for factor in BUDGETS], texts=2)
    yield markdown([_row(each, arm) for arm in [LOCK_STEP, SILENCE, *each.compared]], texts=2)
    longer = [arm for arm in each.runs if ARMS[arm].rate_of]
    if longer:
        yield "Longer trainings, which see more samples, at the learning rates of the table above:"
        yield markdown([_longer_row(each, arm) for arm in longer])


def _budget(each: Results, factor: int) -> dict[str, str]:
    best = each.best(factor)
    cells = {"times fewer bytes": f"{factor:,} or more", "best arm": "none trained", "retained": "", "sends": ""}
    if best is None:
        return cells
    fewer = f"1/{each.times_fewer(best):,.0f}"
    return cells | {"best arm": f"{best}: `{ARMS[best].recipe}`", "retained": text(each.retained(best)), "sends": fewer}


def _row(each: Results, arm: str) -> dict[str, str]:
    sent, fewer = each.bytes_per_step(arm), each.times_fewer(arm)
    baseline = arm in (LOCK_STEP, SILENCE)
    return {
        "arm": arm,
        "recipe": _recipe(ARMS[arm], each.rung),
        "sent per step and worker": bytes_text(sent),
        "times fewer": f"{fewer:,.1f}" if isfinite(fewer) else "",
        "held-out loss": str(Losses(tuple(each.losses(arm).values()))),
        "retained": "" if baseline else text(each.retained(arm)),
        "seeds": str(len(each.runs[arm])),
        "learning rate": f"{each.rates[arm]:g}" + _rate_note(each, arm),
    }


def _longer_row(each: Results, arm: str) -> dict[str, str]:
    return {
        "arm": ARMS[arm].rate_of,
        "steps": f"{steps_of(ARMS[arm], each.rung):,}",
        "held-out loss": str(Losses(tuple(each.losses(arm).values()))),
        "retained": text(each.retained(arm)),
        "seeds": str(len(each.runs[arm])),
    }


def _rate_note(each: Results, arm: str) -> str:
    if arm in each.edges:
        return " (end of the grid)"
    if arm not in each.confirmed:
        return ""
    losses, rate = each.confirmed[arm], each.rates[arm]
    if rate not in losses or len(losses) < 2:
        return " (predicted, not confirmed)"
    others = ", ".join(f"{other:g}" for other in sorted(losses) if other != rate)
    return f" (tried: {others})"


def _recipe(arm: Arm, rung: Rung) -> str:
    steps = "" if steps_of(arm, rung) == rung.task.steps else f", {steps_of(arm, rung)} steps"
    workers = f", {arm.workers} worker" if arm.workers else ""
    return ("" if arm.name == SILENCE else f"`{arm.recipe}`") + workers + steps


# -- change with the number of rounds --------------------------------------------------------------------------------


def with_rounds(found: Sequence[Results]) -> list[MeasuredShare]:
    """Measured shares of recipes that average parameters."""
    return [share for each in measured(found) if (share := MeasuredShare(**each)).rounds]


def _over_rounds(found: Sequence[Results]) -> Iterator[str]:
    """Retained benefit by the number of rounds, over all rungs, and what orders the recipes better: rounds or bytes."""
    shares = with_rounds(found)
    if len(shares) < 2:
        return
    yield "## Change with the number of rounds"
    yield "![retained benefit over the number of rounds, a color for each task](ladder-rounds.png)"
    yield (
        "A round averages every parameter once: a training has its steps over the period as rounds. All recipes with "
        f"{FEW} seeds or more on all admitted rungs, with and without compression:"
    )
    by_band = bands((share.rounds, share.value) for share in shares)
    yield markdown([{"rounds": x.rounds, "retained": x.retained, "results": str(x.count)} for x in by_band])
    values = [share.value for share in shares]
    by_rounds = kendall([share.rounds for share in shares], values)
    by_bytes = kendall([-share.times_fewer for share in shares], values)
    yield (
        f"Kendall's tau of the retained benefit of these {len(shares)} results with the number of rounds: "
        f"{by_rounds:.2f}; with the bytes that were sent: {by_bytes:.2f}."
    )


# -- change with model size ------------------------------------------------------------------------------------------


def families(found: Sequence[Results]) -> Iterator[list[Results]]:
    """Rungs that differ in model size alone, small first; only admitted ones, and at least two of them."""
    by_kind: dict[str, list[Results]] = {}
    for each in found:
        model, *kind = each.rung.name.split("-", 2)[::2] if each.rung.name.startswith("bytelm-") else (each.rung.name,)
        by_kind.setdefault("-".join([model, *kind]), []).append(each)
    for mine in by_kind.values():
        admitted = sorted((each for each in mine if each.is_admitted), key=lambda each: each.rung.parameters)
        if len(admitted) > 1:
            yield admitted


def slope(family: Sequence[Results], arm: str) -> ConfidenceInterval | None:
    """Change of the retained benefit per doubling of the parameters: a line per shared seed, Student's interval over
    seeds; None where fewer than two rungs have the arm."""
    mine = [each for each in family if arm in each.runs]
    seeds = set.intersection(*({*each.runs[arm]} for each in mine)) if len(mine) > 1 else set[int]()
    if not seeds:
        return None
    doublings = [log2(each.rung.parameters) for each in mine]
    slopes = []
    for seed in sorted(seeds):
        benefit = [
            statistics.fmean(each.losses(SILENCE).values()) - statistics.fmean(each.losses(LOCK_STEP).values())
            for each in mine
        ]
        kept = [
            (each.losses(SILENCE)[seed] - each.losses(arm)[seed]) / whole
            for each, whole in zip(mine, benefit, strict=True)
        ]
        slopes.append(float(np.polyfit(doublings, kept, 1)[0]) if all(map(isfinite, kept)) else nan)
    value = statistics.fmean(slopes)
    if len(slopes) < 2:
        return ConfidenceInterval(value=value, low=-inf, high=inf)
    half = student_quantile(0.95, len(slopes) - 1) * statistics.stdev(slopes) / sqrt(len(slopes))
    return ConfidenceInterval(value=value, low=value - half, high=value + half)


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings, which may have ties: 1 equal, -1 reversed; nan where one has no order."""
    pairs = list(combinations(range(len(first)), 2))
    one, other = (np.array([np.sign(ranks[i] - ranks[j]) for i, j in pairs]) for ranks in (first, second))
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else nan


def predict(sizes: Sequence[int], losses: Sequence[float], size: int, irreducible: float = 0.0) -> float:
    """Loss at another model size by L = E + A N^a, fitted to the logarithms of L - E by least squares.

    Source: form of Hoffmann et al. 2022, arXiv:2203.15556; with E = 0 that of Kaplan et al. 2020, arXiv:2001.08361.
    Fitted per arm as by Charles et al. 2025, arXiv:2503.09799.

    Args:
        irreducible: E, below every loss.
    """
    power, scale = np.polyfit(np.log(sizes), np.log(np.subtract(losses, irreducible)), 1)
    return irreducible + exp(float(scale) + float(power) * log(size))


def irreducible_loss(sizes: Sequence[int], losses: Sequence[float]) -> float:
    """E of L = E + A N^a with the smallest squared error of log(L - E), on a grid of 1/1,000 of the lowest loss; 0 with
    fewer than three sizes, which do not determine it."""
    if len(sizes) < 3:
        return 0.0
    grid = np.arange(1000) / 1000 * min(losses)
    errors = [np.polyfit(np.log(sizes), np.log(np.subtract(losses, each)), 1, full=True)[1].sum() for each in grid]
    return float(grid[int(np.argmin(errors))])


def predictions(runs: Mapping[Job, LadderRun], target: str, seeds: int) -> list[dict[str, Any]]:
    """Learning rate and held-out loss of every arm on a larger rung, from the smaller rungs alone.

    All arms share the irreducible loss of lock step.
    """
    known = results(runs, smaller_rungs(target), seeds)
    found: list[dict[str, Any]] = []

    def by_size(arm: str) -> dict[int, float]:
        mine = [each for each in known if arm in each.runs]
        return {each.rung.parameters: statistics.fmean(each.losses(arm).values()) for each in mine}

    least = irreducible_loss([*by_size(LOCK_STEP)], [*by_size(LOCK_STEP).values()])
    for arm in ARMS:
        losses, rate = by_size(arm), predicted_rate(runs, target, arm)
        if rate is None or len(losses) < 2 or ARMS[arm].rate_of:
            continue
        loss = predict([*losses], [*losses.values()], rungs()[target].parameters, least)
        found.append({"rung": target, "arm": arm, "learning_rate": rate, "held_out": round(loss, 4)})
    return found


def _over_size(found: Sequence[Results]) -> Iterator[str]:
    for family in families(found):
        names = [each.rung.name for each in family]
        yield f"## Over model size: {', '.join(names)}"
        arms = [arm for arm in ARMS if sum(arm in each.compared for each in family) > 1]
        if not arms:
            continue
        yield markdown([_size_row(family, arm) for arm in arms])
        yield " ".join(_taus(family))


def _size_row(family: Sequence[Results], arm: str) -> dict[str, str]:
    found = slope(family, arm)
    cells = {"arm": arm}
    cells |= {each.rung.name: text(each.retained(arm)) if arm in each.runs else "" for each in family}
    if found is None:
        return cells | {"per doubling": "", "transfers": ""}
    points = f"{100 * found.value:+.1f} points"
    bounds = f" ({100 * found.low:+.1f} to {100 * found.high:+.1f})" if isfinite(found.low) else ""
    transfers = "unknown" if not isfinite(found.low) else "no" if found.high < 0 else "yes"
    return cells | {"per doubling": points + bounds, "transfers": transfers}


def _compared_with(found: Sequence[Results], predicted: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Predictions beside the results of the same rung and arm."""
    for each in found:
        rows = [_prediction_row(each, line) for line in predicted if _is_tested(each, line)]
        if rows:
            yield f"## Prediction: {each.rung.name}"
            yield (
                "The predicted losses follow from the smaller rungs (L = E + A N^a per arm; E is that of lock step, or "
                "0 with only two smaller rungs) and were stored before the first reported run of this rung."
            )
            yield markdown(rows)


def _is_tested(each: Results, line: Mapping[str, Any]) -> bool:
    return line["rung"] == each.rung.name and line["arm"] in each.runs


def _prediction_row(each: Results, line: Mapping[str, Any]) -> dict[str, str]:
    measured_losses = Losses(tuple(each.losses(line["arm"]).values()))
    error = measured_losses.mean / line["held_out"] - 1
    return {
        "arm": line["arm"],
        "predicted loss": f"{line['held_out']:.3f}",
        "held-out loss": str(measured_losses),
        "error": f"{100 * error:+.1f} %",
    }


def _taus(family: Sequence[Results]) -> Iterator[str]:
    for small, large in pairwise(family):
        arms = [arm for arm in small.compared if arm in large.runs]
        first, second = ([each.retained(arm).value for arm in arms] for each in (small, large))
        tau = kendall(first, second)
        said = f"Kendall's tau of {len(arms)} arms from {small.rung.name} to {large.rung.name}: {tau:.2f}."
        yield said if tau >= LEAST_TAU else f"{said} **Below {LEAST_TAU:g}: the ranking does not transfer.**"
