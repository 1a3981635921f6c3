"""Report of benchmarks/front.py: who is on the front, at what price, and what is best for so many times fewer bytes."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from benchmarks.front_families import DENSE, FAMILIES
from benchmarks.front_plan import TUNING_SEEDS, Job, Plan, TaskRun, at_the_end
from benchmarks.front_tasks import SGD
from benchmarks.ladder_tasks import ADAMW, MUON
from benchmarks.losses import Losses, number
from benchmarks.pareto import front
from benchmarks.report import markdown
from benchmarks.virtual_workers import APART

from gossamer.base.units import bytes_text

FACTORS = 10, 30, 100, 1000, 5000
FEW = 3  # seeds
SILENT = "never talking, mean of four"
ABOUT = (
    "Four workers; what counts is the loss, held out, of what they agree on after as many steps, so as many samples, "
    "for all. Mean over seeds ± standard deviation. A gap is the distance to `Dense()` of the same seeds, in percent "
    "of its loss and in spreads: standard deviations of `Dense()` over its seeds. Bytes are the payload of all that a "
    "worker says, counted where it leaves, over the steps of the training; `Dense()` sends float32. **On the front**: "
    "nothing that was tried sends as few bytes and loses less. Who is best of many is so by luck, too: differences "
    "below a spread say nothing. Learning rates were tuned with seeds that are not shown "
    f"({' and '.join(map(str, TUNING_SEEDS))}) and the same held-out samples, for `Dense()` and for one recipe of each "
    "family; the others of a family took its rate, and may be a little better with their own."
)


@dataclass(frozen=True)
class Front:
    """The runs of one task by recipe, in the order of seeds; tuned: losses by family, learning rate and seed."""

    plan: Plan
    runs: Mapping[str, Sequence[TaskRun]]
    tuned: Mapping[str, Mapping[float, Mapping[int, float]]]

    @property
    def talking(self) -> list[str]:
        """Those that send most first; Dense() is one of them."""
        return sorted((text for text in self.runs if text != APART), key=self.bytes_a_step, reverse=True)

    def losses(self, recipe: str, like: str | None = None) -> Losses:
        """like: only with the seeds of that recipe."""
        seeds = {run["seed"] for run in self.runs[like or recipe]}
        return Losses(tuple(number(run["held_out"]) for run in self.runs[recipe] if run["seed"] in seeds))

    def bytes_a_step(self, recipe: str) -> float:
        return statistics.fmean(run["bytes_sent"] / run["steps"] for run in self.runs[recipe])

    def fewer(self, recipe: str) -> float:
        """Than Dense() sends, how many times."""
        sent = self.bytes_a_step(recipe)
        return self.bytes_a_step(DENSE) / sent if sent else inf

    def above(self, recipe: str) -> float:
        """Loss above that of Dense() with the same seeds."""
        return self.losses(recipe).mean - self.losses(DENSE, like=recipe).mean

    def gap(self, recipe: str) -> float:
        """The same in percent."""
        return 100 * self.above(recipe) / self.losses(DENSE, like=recipe).mean

    @property
    def spread(self) -> float:
        """Of Dense(), in percent; nan of one seed."""
        dense = self.losses(DENSE)
        return 100 * dense.spread / dense.mean

    def spreads(self, recipe: str) -> float:
        return self.above(recipe) / self.losses(DENSE).spread

    def front(self) -> list[str]:
        """From those that send least on."""
        return front(self.talking, cost=self.bytes_a_step, loss=self.gap)

    def best(self, factor: float) -> str | None:
        """The least gap of those that send so many times fewer bytes, or fewer still."""
        return min((text for text in self.talking if self.fewer(text) >= factor), key=self.gap, default=None)

    def free(self) -> str | None:
        """Who sends least of those within one spread of Dense(), or better; None where a spread is not known."""
        within = [text for text in self.talking if self.gap(text) <= self.spread]
        return min(within, key=self.bytes_a_step, default=None)


def fronts(plans: Sequence[Plan], runs: Mapping[Job, TaskRun], seeds: int) -> list[Front]:
    """Of those tasks of which Dense() was trained, with the seeds that it was trained with."""
    found: list[Front] = []
    for plan in plans:
        known = [job for job in plan.shown(runs, seeds) if job in runs]
        yardsticks = {job.seed for job in known if job.recipe == DENSE}
        mine: dict[str, list[TaskRun]] = {}
        for job in known:
            if job.seed in yardsticks:
                mine.setdefault(job.recipe, []).append(runs[job])
        if yardsticks:
            tuned = {name: plan.losses(recipe, runs) for name, recipe in plan.representatives().items()}
            found.append(Front(plan, mine, tuned))
    return found


def page_part(found: Sequence[Front], about: Sequence[str]) -> str:
    return "\n\n".join([ABOUT, *about, *_summaries(found), *(section for each in found for section in _sections(each))])


def _summaries(found: Sequence[Front]) -> Iterator[str]:
    for optimizer in (ADAMW, SGD, MUON):
        mine = [each for each in found if each.plan.setting.optimizer == optimizer]
        if mine:
            yield f"## Which one, under {optimizer}"
            yield markdown([_summary(each, factor) for each in mine for factor in FACTORS], texts=2)
            yield " ".join(sentence for each in mine for sentence in within_spread(each))


def _summary(found: Front, factor: float) -> dict[str, str]:
    best = found.best(factor)
    cells = {"task": found.plan.task, "best that sends": "", "times fewer": f"{factor:,} or more"}
    cells |= {"gap": "", "in spreads": "", "sends": "", "seeds": ""}
    if best is None:
        return cells | {"best that sends": "nothing that was tried"}
    return cells | {
        "best that sends": f"`{best}`",
        "gap": _percent(found.gap(best)),
        "in spreads": _signed(found.spreads(best)),
        "sends": f"1/{found.fewer(best):,.0f}",
        "seeds": str(len(found.runs[best])),
    }


def within_spread(found: Front) -> Iterator[str]:
    """How many times fewer bytes cost no more than chance does."""
    task, seeds = found.plan.task, len(found.runs[DENSE])
    free = found.free()
    if free is None:
        yield f"{task}: one seed of `Dense()` has no spread, so nothing can be said about chance."
        return
    rough = f", a rough one of {seeds} seeds" if seeds < FEW else f", of {seeds} seeds"
    spread = f"`Dense()`'s own spread ({found.spread:.2f} %{rough})"
    if free == DENSE:
        yield f"{task}: nothing that was tried sends fewer bytes and stays within {spread}."
        return
    yield f"{task}: within {spread}: `{free}`, **{found.fewer(free):,.0f} times fewer bytes**."


def _sections(found: Front) -> Iterator[str]:
    plan, steps = found.plan, found.plan.steps
    counts = {len(runs) for runs in found.runs.values()}
    seeds = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    missing = [text for text in plan.recipes() if text not in found.runs]
    yield f"## {plan.task}"
    yield f"{plan.setting.about}. {steps} steps; seeds: {seeds}."
    best = set(found.front())
    rows = [_row(found, text, best) for text in found.talking]
    if APART in found.runs:
        rows.append(_row(found, APART, best) | {"recipe": SILENT})
    yield markdown(rows)
    if missing:
        yield f"Not trained yet: {', '.join(f'`{text}`' for text in missing if text != APART)}."
    yield "Learning rates, and the held-out losses they were chosen by (an arrow: the best stands at the end):"
    yield markdown([_rates(found, name) for name in plan.representatives() if found.tuned[name]], texts=2)


def _row(found: Front, text: str, best: set[str]) -> dict[str, str]:
    is_dense = text == DENSE
    return {
        "recipe": f"`{text}`",
        "sent a step and worker": bytes_text(found.bytes_a_step(text)),
        "times fewer": f"{found.fewer(text):,.1f}" if isfinite(found.fewer(text)) else "",
        "held-out loss": str(found.losses(text)),
        "seeds": str(len(found.runs[text])),
        "gap": "" if is_dense else _percent(found.gap(text)),
        "in spreads": "" if is_dense else _signed(found.spreads(text)),
        "on the front": "yes" if text in best else "",
        "lr": f"{found.runs[text][0]['learning_rate']:g}",
    }


def _rates(found: Front, name: str) -> dict[str, str]:
    losses, used = found.tuned[name], found.plan.rates_of(found.tuned)
    tried = "; ".join(f"{rate:g}: {Losses(tuple(by_seed.values()))}" for rate, by_seed in sorted(losses.items()))
    end = " ↔" if name in used and at_the_end(losses) else ""
    about = FAMILIES[name].about if name in FAMILIES else name
    recipe = found.plan.representatives()[name]
    return {
        "family": {APART: SILENT, DENSE: "every step, everything"}.get(name, about),
        "tuned for": "" if recipe == APART else f"`{recipe}`",
        "chosen": f"{used[name]:g}{end}" if name in used else "not yet",
        "tried": tried,
    }


def _percent(gap: float) -> str:
    return f"{gap:+.2f} %" if isfinite(gap) else ""


def _signed(gap: float) -> str:
    return f"{gap:+.1f}" if isfinite(gap) else ""
