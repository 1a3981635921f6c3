"""Race: successive halving of recipes that train the same script, compared at equal virtual seconds.

    16 -> 8 -> 4 -> 2 -> 2 and the learning rates x 0.5, x 2 of the first and of the baseline

Every rung has the same share of the budget, and all remaining recipes reach the same virtual second in it; the half
with the higher loss is eliminated. A virtual second of one recipe may take this machine many times as long as one of
another: a recipe that is so expensive, and in the half to be eliminated, is eliminated at once, which leaves more time
for the best ones. The baseline, Dense(), always remains. All have the same seed and the same batches. Learning rates
are not scaled by recipe, since a step of every candidate is comparable with Dense()'s: the mean of all workers'
batches, or of their steps. Other learning rates are tried in the last rung, for the best recipe and for the baseline
alike, because otherwise the recipe would win by tuning.

source: Jamieson & Talwalkar 2016, AISTATS, "Non-stochastic best arm identification and hyperparameter optimization";
        Li et al. 2018, JMLR 18(185), "Hyperband"
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isfinite, log2, nan
from typing import Protocol

from gossamer.errors import GossamerError
from gossamer.plan.advise.advice_file import candidate_name
from gossamer.plan.advise.curves import (
    LOOKS,
    WINDOW,
    AgainstBaseline,
    LossCurve,
    Point,
    Target,
    against_baseline,
    paired_difference,
    seconds_to,
)

LOSSES = ("loss", "validation_loss")  # the comparison uses the first one that all log


class RaceProgress(Protocol):
    """Progress of a job; see simulate.JobProgress."""

    @property
    def steps(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, Sequence[Point]]: ...
    @property
    def bytes_sent(self) -> float: ...
    @property
    def ended(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...


class RaceJob(Protocol):
    """All workers of a script with one recipe, on a virtual clock; see simulate.SimulatedJob."""

    def advance(self, *, steps: int | None = None, seconds: float | None = None) -> RaceProgress: ...
    def close(self) -> None: ...


StartJob = Callable[[str, float], RaceJob]  # (recipe, learning rate factor)


@dataclass(kw_only=True)
class Contender:
    """A recipe in the race. starting, spent: seconds of this machine before its steps, and for them."""

    recipe: str
    learning_rate_factor: float = 1.0
    steps: int = 0
    seconds: float = 0.0  # virtual
    bytes_sent: float = 0.0  # mean per worker, total
    metrics: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    ended: bool = False
    failure: str | None = None
    starting: float = 0.0
    spent: float = 0.0
    out: str | None = None  # why it was eliminated; None for finalists
    against: AgainstBaseline | None = None  # at the latest common time

    @property
    def name(self) -> str:
        return candidate_name(self.recipe, self.learning_rate_factor)

    def curve(self, metric: str) -> LossCurve:
        return LossCurve.of(self.metrics.get(metric, ()))

    def record_progress(self, progress: RaceProgress, spent: float) -> None:
        """Update from the progress of its job."""
        self.steps, self.seconds, self.bytes_sent = progress.steps, progress.seconds, progress.bytes_sent
        self.metrics, self.ended = progress.metrics, progress.ended
        self.spent += spent
        if progress.failure is not None:
            self.fails(progress.failure)

    def fails(self, reason: str) -> None:
        self.failure, self.out = reason, f"failed: {reason}"


# -- elimination -------------------------------------------------------------------------------------------------------


FINALISTS = 2  # in addition to the baseline
FIRST_STEPS = 8  # of each challenger before it can be eliminated
DEAR = 2.0  # times its equal share of the cost of a virtual second


def kept_of(challengers: int) -> int:
    """Number of challengers that remain after a halving."""
    return max(FINALISTS, ceil(challengers / 2))


def dear_and_behind(ranked: Sequence[Contender], pace: Callable[[Contender], float]) -> Contender | None:
    """The most expensive recipe in the worse half, if it costs more than DEAR times its equal share.

    ranked: the best first. pace: fraction of the budget per virtual second. An expensive recipe in the better half
    remains, since it may win.
    """
    dearest = DEAR * sum(map(pace, ranked)) / max(1, len(ranked))
    behind = [each for each in ranked[kept_of(len(ranked)) :] if each.steps >= FIRST_STEPS and pace(each) > dearest]
    return max(behind, key=pace, default=None)


# -- the race ----------------------------------------------------------------------------------------------------------


RETUNED = (0.5, 2.0)
LAST_SHARES = 4  # shares of the last rung, in which other learning rates start again; other rungs have one
OVERRUN = 0.1  # of the budget, since the duration of a step is known only afterwards
ENOUGH_STEPS = 256  # of the baseline before a race can be decided early
SURE = 0.99  # confidence of an early decision, which is tested repeatedly
FEWEST_STEPS = 16  # of the baseline; fewer are not conclusive
NO_TIME = "not in the race: it would need more --minutes"
NO_LOSS = (
    "the script logs no loss, so recipes can only be compared by step time, which does not include their progress per "
    "step. Add to its loop: session.log(loss=loss.item())"
)


class RaceError(GossamerError):
    """A race that cannot be run, or without a result."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One round of the halving. seconds: virtual, reached by all. out: names of the eliminated ones."""

    seconds: float
    names: tuple[str, ...]
    losses: tuple[float, ...]
    out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """seconds: virtual, of the last comparison. contenders: the baseline first, then from the best to the first out."""

    metric: str
    seconds: float
    contenders: tuple[Contender, ...]
    rungs: tuple[Rung, ...]
    confidence: float  # of every contender's interval
    remarks: tuple[str, ...]

    reference: Contender  # the baseline at its best learning rate, which the others are compared with

    @property
    def baseline(self) -> Contender:
        """The script as it is, with Dense()."""
        return self.contenders[0]

    def losses(self, contender: Contender) -> LossCurve:
        """Its metric up to the last comparison."""
        return contender.curve(self.metric).until(self.seconds)

    def last_loss(self, contender: Contender) -> float | None:
        """Mean loss over the last quarter of its virtual seconds, at most the race's."""
        until = min(self.seconds, contender.seconds)
        late = contender.curve(self.metric).between_seconds((1 - WINDOW) * until, until).values
        return float(late.mean()) if len(late) else None


@dataclass(kw_only=True)
class Race:
    """Runs a race.

    Args:
        start: makes a job from (recipe, learning rate factor).
        baseline: recipe of the baseline.
        budget_seconds: wall time on this machine.
        most_steps: limit of steps of all jobs together.
        now: clock of this machine in seconds.
        `print_text`: called with progress.

    Raises:
        RaceError: the race has no result.
    """

    start: StartJob
    baseline: str
    challengers: Sequence[str]
    budget_seconds: float
    most_steps: float = inf
    target: Target | None = None
    now: Callable[[], float] = time.monotonic
    print_text: Callable[[str], None] = lambda sentence: None
    _jobs: dict[str, RaceJob] = field(default_factory=dict, init=False)
    _everyone: list[Contender] = field(default_factory=list, init=False)
    _rungs: list[Rung] = field(default_factory=list, init=False)
    _remarks: list[str] = field(default_factory=list, init=False)
    _seconds: float = field(default=0.0, init=False)  # virtual, reached by all
    _metric: str = field(default="", init=False)

    def run(self) -> RaceResult:
        try:
            return self._run()
        finally:
            for job in self._jobs.values():
                job.close()

    def _run(self) -> RaceResult:
        self._began = self.now()
        first, *others = self._everyone = [Contender(recipe=each) for each in (self.baseline, *self.challengers)]
        shares = _rungs(len(others)) + LAST_SHARES
        self._first_step(first, others, 1 / shares)
        field_ = [each for each in others if each.out is None]
        rungs = _rungs(len(field_))
        for rung in range(rungs):
            self._advance_until((rung + 1) / shares, FIRST_STEPS)
            field_ = self._halve(first, field_)
        self._advance_until(1.0, last=True, again=self._retuned)
        field_ = self._halve(first, field_, keep=FINALISTS)
        if not self._retune(field_):
            self._advance_until(1.0, last=True)
        return self._result(first)

    # -- progress ----------------------------------------------------------------------------------

    def _first_step(self, first: Contender, others: Sequence[Contender], share: float) -> None:
        """Advance all to the end of the baseline's first step, which gives the metric and the cost of a virtual second.

        Only as many recipes enter, in their order, as can reach the first halving within this share of the budget.
        """
        self._advance(first, steps=1)
        self._check_baseline(first)
        logged = [name for name in (*LOSSES, *([self.target.metric] if self.target else [])) if first.metrics.get(name)]
        if not logged:
            raise RaceError(NO_LOSS)
        self._metric = logged[0]
        ahead = self._cost(first)
        for place, each in enumerate(others):
            if place >= FINALISTS and self._spent() + ahead > share:
                each.out = NO_TIME
                continue
            self._bring([each], first.seconds)
            if each.steps:
                ahead += self._cost(each) * max(0.0, FIRST_STEPS / each.steps - 1)
        self._seconds = first.seconds
        if left_out := sum(each.out == NO_TIME for each in others):
            self._remarks.append(
                f"{left_out} of {len(others)} recipes were not in the race: it would need more --minutes"
            )

    def _advance_until(
        self, share: float, fewest: int = 0, last: bool = False, again: Callable[[], Sequence[Contender]] = tuple
    ) -> None:
        """Advance all remaining recipes, slice by slice, until this share of the budget is spent, and all except the
        baseline have made the fewest steps.

        Args:
            share: of the budget.
            fewest: minimum of steps.
            last: whether it is the last rung, which may be decided early, and in which the baseline keeps up.
            again: contenders with other learning rates to try up to there; budget is reserved for them.
        """
        first = self._everyone[0]
        if last:  # even if another of its steps exceeds the budget: without it there is no result
            self._keep_up(first)
        while not (self._ended() or (last and self._decided())):
            slice_seconds = self._next_slice(share, again(), last)
            step_seconds = first.seconds / max(1, first.steps)
            if slice_seconds < step_seconds and self._fewest_steps() >= fewest:
                return
            slice_seconds = max(slice_seconds, step_seconds)
            self._bring(self._left(), self._seconds + slice_seconds)
            self._check_baseline(first)
            self._seconds = min([self._seconds + slice_seconds, *(each.seconds for each in self._left() if each.ended)])
            if last:
                self._keep_up(first)
            else:
                self._spare()

    def _spare(self) -> None:
        """Eliminate expensive recipes that are behind, after enough steps."""
        left = [each for each in self._left()[1:] if each.seconds]
        while (each := dear_and_behind(sorted(left, key=self._place), self._pace_of)) is not None:
            left.remove(each)
            self._goes(each, f"behind after {self._seconds:.3g} virtual seconds, and slow on this machine")

    def _pace_of(self, contender: Contender) -> float:
        return self._pace(contender, last=False)

    def _goes(self, contender: Contender, why: str) -> None:
        contender.out = why
        self._compare(contender, self._everyone[0])
        self._close(contender)

    def _keep_up(self, first: Contender) -> None:
        """Advance the baseline to the steps at which it is compared: if its steps are the longest, the race's seconds
        contain few of them."""
        steps = max((each.steps for each in self._left()), default=0) // LOOKS[0]
        if steps > first.steps and not first.ended:
            self._advance(first, steps=steps)
            self._check_baseline(first)

    def _fewest_steps(self) -> int:
        return min((each.steps for each in self._left()[1:]), default=FIRST_STEPS)

    def _next_slice(self, share: float, retuned: Sequence[Contender], last: bool) -> float:
        """Virtual seconds of the next slice: as long as all so far, or limited by this share of the budget."""
        again = [each for each in retuned for _ in RETUNED]
        pace = sum(self._pace(each, last) for each in (*self._left(), *again) if each.seconds)
        affordable = share - self._spent() - sum(self._cost(each) + self._starting(each) for each in again)
        return min(self._seconds, affordable / pace if pace else self._seconds)

    def _pace(self, contender: Contender, last: bool) -> float:
        """Fraction of the budget per virtual second of the race for one recipe. last: whether the baseline keeps up."""
        steps_per_second = contender.steps / contender.seconds
        if last and contender is self._everyone[0]:
            others = [each.steps / each.seconds / LOOKS[0] for each in self._left()[1:] if each.seconds]
            steps_per_second = max([steps_per_second, *others])
        return self._cost(contender) / max(1, contender.steps) * steps_per_second

    def _bring(self, contenders: Sequence[Contender], seconds: float) -> None:
        """Advance to `seconds` virtual seconds in total. Step times differ, so some are up to a step earlier."""
        for each in contenders:
            self._advance(each, seconds=seconds)
            if each.out is not None:
                self.print_text(f"{each.name} {each.out}")
                self._close(each)

    def _advance(self, contender: Contender, **limit: float) -> None:
        """limit: steps or seconds, as for jobs. An error of the job is the failure of its recipe."""
        began, name = self.now(), contender.name
        try:
            if name not in self._jobs:
                self._jobs[name] = self.start(contender.recipe, contender.learning_rate_factor)
                self._jobs[name].advance(steps=0)
                began, contender.starting = self.now(), self.now() - began
            progress = self._jobs[name].advance(**limit)  # type: ignore[arg-type]
        except GossamerError as refusal:
            contender.fails(str(refusal))
        else:
            contender.record_progress(progress, self.now() - began)

    def _close(self, contender: Contender) -> None:
        if contender.name in self._jobs:
            self._jobs.pop(contender.name).close()

    # -- the budget --------------------------------------------------------------------------------

    def _spent(self) -> float:
        """Spent fraction of the budget, of time or steps, whichever is more."""
        steps = sum(each.steps for each in self._everyone)
        return max((self.now() - self._began) / self.budget_seconds, steps / self.most_steps)

    def _cost(self, contender: Contender) -> float:
        """Fraction of the budget spent on one contender's steps."""
        return max(contender.spent / self.budget_seconds, contender.steps / self.most_steps)

    def _starting(self, contender: Contender) -> float:
        """Fraction of the budget spent on starting one contender."""
        return contender.starting / self.budget_seconds

    def _left(self) -> list[Contender]:
        return [each for each in self._everyone if each.out is None]

    def _ended(self) -> bool:
        """Whether a script has ended, so that later comparisons are impossible."""
        return any(each.ended and each.seconds <= self._seconds * (1 + 1e-9) for each in self._left())

    # -- comparison --------------------------------------------------------------------------------

    def _halve(self, first: Contender, contenders: Sequence[Contender], keep: int | None = None) -> list[Contender]:
        """The remaining recipes, the best first."""
        ranked = sorted((each for each in contenders if each.out is None), key=self._place)
        kept = kept_of(len(ranked)) if keep is None else keep
        for each in ranked[kept:]:
            self._goes(each, f"behind after {self._seconds:.3g} virtual seconds")
        names = [each.name for each in (first, *ranked)]
        losses = tuple(self._loss(each) for each in (first, *ranked))
        out = tuple(each.name for each in ranked[kept:])
        self._rungs.append(Rung(seconds=self._seconds, names=tuple(names), losses=losses, out=out))
        self.print_text(
            f"{len(ranked)} recipes after {self._seconds:.3g} virtual seconds: {len(ranked[:kept])} continue"
        )
        return ranked[:kept]

    def _place(self, contender: Contender) -> tuple[float, float]:
        """Order by the time to the target, then by loss."""
        curve = contender.curve(self.target.metric).until(self._seconds) if self.target else None
        reached = seconds_to(curve, self.target) if curve is not None and self.target and len(curve) else None
        loss = self._loss(contender)
        return (inf if reached is None else reached, loss if isfinite(loss) else inf)

    def _loss(self, contender: Contender) -> float:
        """Mean loss in the last quarter of the race so far; lower is better."""
        curve = self._losses(contender)
        late = curve.between_seconds((1 - WINDOW) * self._seconds, self._seconds).values
        return float(late.mean()) if len(late) else float(curve.values[-1]) if len(curve) else nan

    def _losses(self, contender: Contender) -> LossCurve:
        """Losses of the race so far."""
        return self._oriented(contender.curve(self._metric).until(self._seconds))

    def _oriented(self, curve: LossCurve) -> LossCurve:
        """The curve with a sign such that lower is better, for a metric that should rise."""
        rising = self.target is not None and self.target.metric == self._metric and not self.target.below
        return LossCurve(curve.steps, curve.seconds, -curve.values) if rising else curve

    def _compare(self, contender: Contender, first: Contender, confidence: float = 0.95) -> None:
        everything = self._oriented(first.curve(self._metric))  # also if the baseline is ahead of the race
        contender.against = against_baseline(self._losses(contender), everything, self._seconds, confidence)

    def _decided(self) -> bool:
        """Whether the best remaining recipe is significantly faster than the baseline, or all are slower."""
        first, *others = self._left()
        if first.steps < ENOUGH_STEPS or not others:
            return not others
        best = min(others, key=self._place)
        sure = SURE ** (1 / max(1, len(self.challengers)))
        self._compare(best, first, sure)
        assert best.against is not None
        speedup = best.against.speedup
        return (speedup.low > 1 and speedup.high - speedup.low < 0.1 * speedup.value) or speedup.high < 1

    # -- the last rung -----------------------------------------------------------------------------

    def _retuned(self) -> list[Contender]:
        """The baseline and the best other recipe."""
        first, *others = self._left()
        return [first, *sorted(others, key=self._place)[:1]]

    def _retune(self, finalists: Sequence[Contender]) -> bool:
        """Try other learning rates of the best recipe and the baseline. Return whether the budget was sufficient."""
        if not finalists:
            return False
        retuned = self._retuned()
        needed = len(RETUNED) * sum(self._cost(each) + self._starting(each) for each in retuned)
        if self._spent() + needed > 1 + OVERRUN:
            self._remarks.append("no other learning rate was tried: it would need more --minutes")
            return False
        for each in retuned:
            others = [Contender(recipe=each.recipe, learning_rate_factor=factor) for factor in RETUNED]
            self._everyone += others
            self._bring(others, self._seconds)
        first, tuned = retuned[0], [each for each in self._left() if each.recipe == retuned[0].recipe]
        for each in tuned:
            if each.steps < first.steps and not each.ended:  # the baseline is ahead, and is compared at that step
                self._advance(each, steps=first.steps)
        return True

    def _result(self, first: Contender) -> RaceResult:
        others = [each for each in self._everyone if each is not first]
        left = [each for each in others if each.out is None]
        reference = self._reference(first, [each for each in left if each.recipe == first.recipe])
        confidence = 1 - 0.05 / max(1, len(left))  # Bonferroni, since the best of several is reported
        for each in left:
            self._compare(each, reference, confidence)
        gone = [each for each in others if each.out is not None]
        if first.steps < FEWEST_STEPS:
            self._remarks.append(
                f"Dense() made only {first.steps} steps, too few for a reliable comparison. Use more --minutes, or a "
                "smaller model in the script"
            )
        if self._ended():
            self._remarks.append(
                f"a script ended after {self._seconds:.3g} virtual seconds, so recipes are compared up to there. Pass "
                "it arguments for more steps for a longer race"
            )
        return RaceResult(
            metric=self._metric,
            seconds=self._seconds,
            contenders=(
                first,
                *sorted(left, key=self._place),
                *sorted(gone, key=lambda each: (-each.seconds, self._place(each))),
            ),
            rungs=tuple(self._rungs),
            confidence=confidence,
            remarks=tuple(self._remarks),
            reference=reference,
        )

    def _reference(self, first: Contender, retuned: Sequence[Contender]) -> Contender:
        """The baseline at its significantly best learning rate, otherwise the script's own."""
        curves = {each.name: self._oriented(each.curve(self._metric)) for each in (first, *retuned)}
        confidence = 1 - 0.05 / len(RETUNED)
        lower = [
            (difference.value, place)
            for place, each in enumerate(retuned)
            if (difference := paired_difference(curves[each.name], curves[first.name]).interval(confidence)).high < 0
        ]
        return retuned[min(lower)[1]] if lower else first

    def _check_baseline(self, first: Contender) -> None:
        if first.failure is not None:
            raise RaceError(f"{first.name}, the baseline, failed after {first.steps} steps: {first.failure}")


def _rungs(challengers: int) -> int:
    """Number of halvings until two remain."""
    return max(0, ceil(log2(max(1, challengers) / FINALISTS)))
