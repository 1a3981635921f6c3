"""Plan of benchmarks/front.py: which training comes next, and which learning rate follows from those that are known."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import NamedTuple

from benchmarks.front_families import DENSE, FAMILIES
from benchmarks.front_tasks import RATES, SETTINGS, Setting
from benchmarks.losses import number
from benchmarks.virtual_workers import APART, Run

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import GossamerError

WORKERS = 4
TUNING_SEEDS = 100, 101  # of which nothing is shown
TRIED = 4  # learning rates, at most
FINALISTS = 2  # of them, which the second seed decides between


class TaskRun(Run):
    """about: the task as it was; cpu_seconds: of all threads, which a busy machine does not lengthen."""

    task: str
    about: str
    cpu_seconds: float


class Job(NamedTuple):
    task: str
    recipe: str
    learning_rate: float
    seed: int
    steps: int


def key(run: TaskRun) -> Job:
    return Job(run["task"], run["recipe"], run["learning_rate"], run["seed"], run["steps"])


@cache
def meaning(recipe: str) -> str | None:
    """The resolved recipe; None where this version cannot read it."""
    try:
        return APART if recipe == APART else repr(resolve(recipe, WORKERS))
    except GossamerError:
        return None


def is_current(run: TaskRun) -> bool:
    """Whether the task is as it was, and the recipe still means what was trained."""
    known = SETTINGS.get(run["task"])
    return known is not None and run["about"] == known.about and run["resolved"] == meaning(run["recipe"])


@dataclass(frozen=True)
class Plan:
    """What is trained on one task. families: names of those that are wanted; steps: of every training."""

    task: str
    families: Sequence[str]
    steps: int
    setting: Setting = field(repr=False)

    def recipes(self) -> dict[str, str]:
        """The family of each recipe. Dense() and workers who never talk are families of their own, and come first."""
        found = {DENSE: DENSE, APART: APART}
        for name in self._served():
            found |= {self._written(text): name for text in FAMILIES[name].recipes.values()}
        return {text: name for text, name in found.items() if self._can(text)}

    def unreadable(self) -> list[str]:
        texts = [self._written(text) for name in self._served() for text in FAMILIES[name].recipes.values()]
        return [text for text in texts if meaning(text) is None]

    def labels(self) -> dict[str, str]:
        """Names in the picture, by recipe."""
        return {self._written(text): each for name in self.families for each, text in FAMILIES[name].recipes.items()}

    def representatives(self) -> dict[str, str]:
        """The recipe for which a family's learning rate is tuned; another of its own where that one cannot be had."""
        found: dict[str, str] = {}
        for text, name in self.recipes().items():
            wanted = self._written(FAMILIES[name].representative) if name in FAMILIES else text
            found.setdefault(name, wanted if self._can(wanted) else text)
        return found

    def tuning(self, runs: Mapping[Job, TaskRun]) -> list[Job]:
        """What can be tried next for the learning rates, as far as it follows from the runs that there are."""
        found: list[Job] = []
        for recipe in self.representatives().values():
            losses = self.losses(recipe, runs)
            tries = next_tries(losses, self.setting.rate)
            found += [Job(self.task, recipe, rate, seed, self.steps) for rate, seed in tries]
        return sorted(found, key=lambda job: job.seed)

    def losses(self, recipe: str, runs: Mapping[Job, TaskRun]) -> dict[float, dict[int, float]]:
        """Of tuning: by learning rate and seed."""
        found: dict[float, dict[int, float]] = {}
        for rate in RATES:
            for seed in TUNING_SEEDS:
                run = runs.get(Job(self.task, recipe, rate, seed, self.steps))
                if run is not None:
                    found.setdefault(rate, {})[seed] = number(run["held_out"])
        return found

    def rates(self, runs: Mapping[Job, TaskRun]) -> dict[str, float]:
        """The learning rate of each family whose tuning is done."""
        return self.rates_of({name: self.losses(recipe, runs) for name, recipe in self.representatives().items()})

    def rates_of(self, tuned: Mapping[str, Mapping[float, Mapping[int, float]]]) -> dict[str, float]:
        done = {name for name, losses in tuned.items() if losses and not next_tries(losses, self.setting.rate)}
        return {name: best_rate(losses) for name, losses in tuned.items() if name in done}

    def shown(self, runs: Mapping[Job, TaskRun], seeds: int) -> Iterator[Job]:
        """All trainings that the page shows; those of families whose learning rate is not known are left out."""
        rates = self.rates(runs)
        for seed in range(seeds):
            for recipe, name in self.recipes().items():
                if name in rates:
                    yield Job(self.task, recipe, rates[name], seed, self.steps)

    def _served(self) -> list[str]:
        return [name for name in self.families if self.setting.optimizer in FAMILIES[name].optimizers]

    def _written(self, text: str) -> str:
        return text.format(twentieth=max(1, self.steps // 20))

    def _can(self, text: str) -> bool:
        """Whether it can be read, and its workers meet twice at least."""
        if text == APART:
            return True
        return meaning(text) is not None and 2 * getattr(resolve(text, WORKERS).strategy, "period", 1) <= self.steps


def plan(task: str, families: Sequence[str], steps: int | None) -> Plan:
    return Plan(task, families, steps or SETTINGS[task].task.steps, SETTINGS[task])


def next_tries(losses: Mapping[float, Mapping[int, float]], middle: float) -> list[tuple[float, int]]:
    """(learning rate, seed) to train next; nothing where enough is known.

    With the first seed three neighbors on the ladder, and a fourth beyond where the best stands at the end; then, with
    the other seeds, the best of them.
    """
    first, *others = TUNING_SEEDS
    at = RATES.index(middle)
    missing = [rate for rate in RATES[max(0, at - 1) : at + 2] if first not in losses.get(rate, {})]
    if missing:
        return [(rate, first) for rate in missing]
    seen = {rate: by_seed[first] for rate, by_seed in losses.items() if first in by_seed}
    ranked = sorted(seen, key=lambda rate: (seen[rate], rate))
    if len(seen) < TRIED and (beyond := _beyond(ranked[0], seen)) is not None:
        return [(beyond, first)]
    finalists = ranked[:FINALISTS]
    return [(rate, seed) for seed in others for rate in finalists if seed not in losses[rate]]


def _beyond(best: float, seen: Mapping[float, float]) -> float | None:
    """The next step of the ladder, where the best stands at one end of those that were tried."""
    at = RATES.index(best)
    if best == min(seen):
        return RATES[at - 1] if at > 0 else None
    return RATES[at + 1] if best == max(seen) and at + 1 < len(RATES) else None


def best_rate(losses: Mapping[float, Mapping[int, float]]) -> float:
    """The least mean loss of those that were trained with every tuning seed; the smallest where all diverge."""
    whole = {rate: list(by_seed.values()) for rate, by_seed in losses.items() if len(by_seed) == len(TUNING_SEEDS)}
    return min(whole, key=lambda rate: (sum(whole[rate]) / len(whole[rate]), rate), default=min(losses, default=inf))


def at_the_end(losses: Mapping[float, Mapping[int, float]]) -> bool:
    """Whether the best of those tried stands at their end, so that one beyond might be better still."""
    return best_rate(losses) in (min(losses), max(losses))
