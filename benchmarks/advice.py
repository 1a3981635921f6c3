"""Advice: time to a loss of `auto` over the best of fixed recipes, in virtual time.

Twenty pairs of a task and a network drawn at random, half of which fall to a tenth of their rate in mid-run. Workers
train for real, in one process (gossamer.plan.simulate); a step takes as long as forecast for the network of that
moment. A recipe's losses do not depend on the network, so the fixed ones are trained once and timed on each: that is
the exhaustive search. The target is what Dense() reaches after two thirds of its steps. Writes
docs/benchmarks/advice.md, with what two recipes make of it that never change.

    python benchmarks/advice.py --verify digits-conv    # train a task again, compare, note it on the page
    python benchmarks/advice.py [--pairs 20] [--steps 150] [--kept runs/advice.json] [--output FILE.md]
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf, isfinite
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.kept import verify_rows  # found only after the line above
from benchmarks.network_draws import Draw, draw
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import markdown
from benchmarks.simulated_curves import SCRIPT, Curve, Kept, SimulatedCurves, curve_of

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.network import read_network
from gossamer.plan.advise.advisor import Advisor
from gossamer.plan.advise.answer import Setting
from gossamer.plan.simulate import ForecastClock, NetworkSchedule, SimulatedJob

TASKS = ("bytelm-adamw", "digits-conv", "digits-resnet", "lstm", "embeddings")
UNSEEN = ("bytelm", "digits-conv-adamw")  # by who set the rule's numbers: with SGD and AdamW, the other way round
#: Of computing, in a step: about what an earlier writing of the page measured on two cores, so that pages compare and a
#: busy machine changes nothing
STEP_SECONDS = {
    "bytelm-adamw": 0.027,
    "bytelm": 0.027,
    "digits-conv": 0.0063,
    "digits-conv-adamw": 0.0063,
    "digits-resnet": 0.021,
    "lstm": 0.0122,
    "embeddings": 0.0103,
}
WORKERS = 4
DENSE, AUTO = "Dense()", "auto"
STATIC = "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5) + Float4()"
MILD = "LocalSGD(period=8) + Int8()"
ONE_BIT = "LocalSGD(period=4, optimizer_state='align') + OneBit()"  # no rung: it needs more rounds
PATIENCE = 3  # times the steps of others, within which auto, and recipes that train apart, may come to the target
SLICE = 10  # steps between two looks at the target
ADVISED = 5  # pairs, of a seed's, on which advise is asked: each takes it minutes
LONGER = 3  # times the steps, in which local steps are looked at once more
RACE_STEPS = 1000  # of all workers together, that advise may make for its choice
RACE_SECONDS = 1e5  # no limit: what it chooses should not follow from how busy a machine is
FIXED = (
    DENSE,
    "Dense(dtype='bfloat16')",
    "Int8()",
    "Float4()",
    "TopK(0.05)",
    "TopK(0.01)",
    "PowerSGD(rank=2)",
    "PowerSGD(rank=4)",
    "EveryStep(delay=1)",
    "EveryStep(delay=1) + Int8()",
    "LocalSGD(period=4)",
    "LocalSGD(period=16)",
    "LocalSGD(period=8) + Int8()",
    "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5) + Float4()",
    "DelayedAveraging(delay=4)",
)

ABOUT = """
How much longer than the best fixed recipe does `auto` take to a loss on random networks, and how good is the choice
of `gossamer advise`? Four workers train for real, in one process; time is virtual: a step takes its estimated time
on the current network. The estimates of `auto` and this clock use one model of networks; on real networks estimates
have errors. Compute times per step are fixed ({computing}), on any machine. Times are means of {trainings}
trainings with separate seeds, of fixed recipes as of `auto`, to the loss that `Dense()` reaches in two thirds of
{steps} steps: single trainings vary, with digits-resnet by a quarter. The best fixed recipe was found by trying
{recipes} recipes on every pair, so it is known only in hindsight.

**These tables are no prediction** for these tasks and networks, because parts of the rule were chosen after seeing
them: the start with local steps after networks of the seeds 0 and 1, the cost of a switch after trainings of seed
0, additional exchanges after slow steps with earlier tables of both seeds, and the step factor of local steps with
the last two tables. All of them show the beginning of a training, in which `auto` has to measure the network.

**The targets**, a median of 1.05 and 1.25 at worst, are missed:

- The step factor of `DiLoCo` is taken from tables, 1.25. On digits-resnet the true one is lower, so on some
  links of a few hundred Mbit/s `auto` switches to `Dense()` although local steps are better. The worst cases of `auto`
  are pairs of this task.
- If a message takes 50 ms or more, the exchanges of the first seconds are a tenth of a training of two seconds.
- If the link becomes slower, two slow steps pass before it is detected.

**One fixed recipe may be better than `auto`.** On these networks, with such small models and short trainings,
`{static}` was the best in {best} of {pairs} pairs, and its median and its worst case are below those of `auto`, which
has to measure first. This does not hold for loops that evaluate their own model, nor if each recipe has its own
learning rate ([retained benefit](ladder.md)).

**advised** is the choice of `gossamer advise` for the initial network, after {race_steps} steps of all workers
together, on the first {advised} networks of a seed. It is trained with the learning rate that it names; only this
column has that, so it may be below 1. The minutes of the race are not counted.

Recipes with local steps, and `auto`, may make {patience} times as many steps as the others to reach a target; -:
not reached.
""".strip()


def crossing(curve: Curve, target: float) -> float:
    """Where a curve is first at the target, between its points on a straight line; inf: it never is."""
    before: tuple[float, float] | None = None
    for at, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return at
            first, above = before
            return first + (at - first) * (above - target) / (above - loss)
        before = at, loss
    return inf


def target_of(dense: Curve) -> float:
    """The least that Dense() reaches in two thirds of its steps."""
    return min(loss for step, loss in dense if step <= 2 / 3 * dense[-1][0])


Times = tuple[float, ...]  # virtual seconds to the target, by training; inf: not in so many steps


def mean_of(times: Times) -> float:
    return statistics.fmean(times) if all(map(isfinite, times)) else inf


@dataclass(frozen=True)
class Pair:
    """A task on a network, and how long each fixed recipe takes to the target there."""

    task: str
    schedule: str
    fixed: dict[str, Times]  # by recipe

    @property
    def best(self) -> str:
        return min(self.fixed, key=lambda recipe: mean_of(self.fixed[recipe]))

    def ratio(self, times: Times) -> float:
        return mean_of(times) / mean_of(self.fixed[self.best])


class Search:
    """Times fixed recipes, `auto` and advise on the networks of pairs: in several trainings, each with its own seed and
    target."""

    def __init__(self, trainings: Sequence[SimulatedCurves]) -> None:
        self._trainings, self._first = trainings, trainings[0]

    def clock(self, task: str, schedule: str) -> ForecastClock:
        network = NetworkSchedule.read(schedule, WORKERS)
        return ForecastClock(lambda recipe: self._first.profile(task, recipe), network, WORKERS)

    def pair(self, task: str, network: Draw) -> Pair:
        steady = self._fixed(task, network.before)
        if not network.drops:
            return Pair(task, network.before, steady)
        usual = mean_of(steady[min(steady, key=lambda recipe: mean_of(steady[recipe]))])
        drop_at = self._first.once("drop", task, network.before, lambda: round(usual / 2, 6))
        schedule = f"{network.before}; {network.after} at {drop_at}s"
        return Pair(task, schedule, self._fixed(task, schedule))

    def _fixed(self, task: str, schedule: str) -> dict[str, Times]:
        return {recipe: self._times(task, schedule, recipe) for recipe in FIXED}

    def _times(self, task: str, schedule: str, recipe: str, rate_factor: float = 1.0) -> Times:
        clock, known = self.clock(task, schedule), resolve(recipe, WORKERS)
        patient = known.strategy.steady_stage.local_parameters
        steps = [self._steps(curves, task, recipe, rate_factor, patient=patient) for curves in self._trainings]
        return tuple(seconds_of(each, known, clock) if isfinite(each) else inf for each in steps)

    @staticmethod
    def _steps(curves: SimulatedCurves, task: str, recipe: str, rate_factor: float, *, patient: bool) -> float:
        target = target_of(curves.by_steps(task, DENSE))
        steps = crossing(curves.by_steps(task, recipe, rate_factor=rate_factor), target)
        if isfinite(steps) or not patient:
            return steps
        return crossing(curves.by_steps(task, recipe, PATIENCE * curves.steps, rate_factor), target)

    def auto(self, pair: Pair) -> tuple[Times, str]:
        """Virtual seconds to the target from the first step on, its learning about the network included; and the recipe
        that it came to in the first training."""
        found = [self._auto(curves, pair) for curves in self._trainings]
        return tuple(seconds for seconds, _ in found), found[0][1]

    def _auto(self, curves: SimulatedCurves, pair: Pair) -> tuple[float, str]:
        target = target_of(curves.by_steps(pair.task, DENSE))

        def train() -> Any:
            clock = self.clock(pair.task, pair.schedule)
            arguments = curves.arguments(pair.task, PATIENCE * curves.steps)
            job = SimulatedJob(SCRIPT, arguments, AUTO, WORKERS, clock=clock)
            try:
                for asked in count(SLICE, SLICE):
                    progress = job.advance(steps=asked)
                    if progress.ended or progress.failure or isfinite(crossing(curve_of(progress), target)):
                        break
                if progress.failure:
                    print(f"{pair}: {progress.failure}", file=sys.stderr)
                return {"curve": curve_of(progress), "recipe": progress.recipe}
            finally:
                job.close()

        found = curves.once("auto", pair.task, pair.schedule, train)
        return crossing(found["curve"], target), found["recipe"]

    def advised(self, pair: Pair) -> tuple[Times, str]:
        """Virtual seconds to the target with what `gossamer advise` says for the network at the beginning, its learning
        rate included; and that."""
        task, curves = pair.task, self._first

        def advise() -> Any:
            network = read_network(pair.schedule.split(";")[0], WORKERS)
            arguments = curves.arguments(task, RACE_STEPS)
            setting = Setting(script=str(SCRIPT), arguments=arguments, workers=WORKERS, network=network.text)
            advisor = Advisor(setting=setting, network=network, budget_seconds=RACE_SECONDS, most_steps=RACE_STEPS)
            advisor.check()
            advisor.measured = curves.paced(task, advisor.profile())
            advisor.pricer = curves.pricer(task)
            advisor.estimate_all()
            advisor.race()
            found = advisor.advice()
            return {"recipe": found.recipe, "rate": found.learning_rate_factor}

        found = curves.once("advised", task, pair.schedule, advise)
        recipe, rate = found["recipe"], found["rate"]
        times = self._times(task, pair.schedule, recipe, rate)
        return times, recipe + f", learning rate x {rate:g}" * (rate != 1.0)


def seconds_of(steps: float, recipe: Any, clock: ForecastClock) -> float:
    """Virtual seconds of so many steps, a fraction of the last one included."""
    now = 0.0
    for _ in range(int(steps)):
        now += clock.step(recipe, now).seconds
    return now + (steps - int(steps)) * clock.step(recipe, now).seconds


@dataclass(frozen=True)
class Row:
    """A pair, and what `auto` made of it."""

    pair: Pair
    auto: Times
    last: str
    advised: tuple[Times, str] | None  # likewise, of what advise says

    def texts(self) -> dict[str, str]:
        pair = self.pair
        return {
            "task": pair.task,
            "network": pair.schedule,
            "best fixed recipe": f"`{pair.best}`",
            "its time": f"{mean_of(pair.fixed[pair.best]):.3g} s",
            "`Dense()`": text(pair.ratio(pair.fixed[DENSE])),
            "always the same": text(pair.ratio(pair.fixed[STATIC])),
            "`auto`": text(pair.ratio(self.auto)),
            "`auto` ended with": f"`{self.last}`",
        }

    def advice(self) -> dict[str, str]:
        pair, (times, recipe) = self.pair, self.advised or ((inf,), "")
        return {
            "task": pair.task,
            "network": pair.schedule,
            "`Dense()`": text(pair.ratio(pair.fixed[DENSE])),
            "`auto`": text(pair.ratio(self.auto)),
            "advised": text(pair.ratio(times)),
            "choice": f"`{recipe}`",
        }


def spread(ratios: Sequence[float]) -> str:
    return f"{text(statistics.median(ratios))}, {text(max(ratios))}"


def text(ratio: float) -> str:
    return f"{ratio:.2f}" if isfinite(ratio) else "-"


def summary(name: str, rows: Sequence[Row]) -> dict[str, str]:
    """Median and worst of every way to go."""
    fixed = {
        f"always `{recipe}`": spread([row.pair.ratio(row.pair.fixed[recipe]) for row in rows])
        for recipe in (STATIC, MILD, DENSE)
    }
    advised = [row.pair.ratio(row.advised[0]) for row in rows if row.advised is not None]
    return {
        "networks": name,
        "`auto`": spread([row.pair.ratio(row.auto) for row in rows]),
        "`gossamer advise`": spread(advised) if advised else "",
        **fixed,
    }


def needs(trainings: Sequence[SimulatedCurves], recipe: str, task: str) -> str:
    """Steps to what Dense() reaches in a third and in two thirds of its steps, over those of Dense(): means."""
    ratios = [
        mean_of(tuple(_needs(each.by_steps(task, DENSE), each.by_steps(task, recipe), share) for each in trainings))
        for share in (1 / 3, 2 / 3)
    ]
    return ", ".join(map(text, ratios))


def _needs(dense: Curve, mine: Curve, share: float) -> float:
    target = min(loss for step, loss in dense if step <= share * dense[-1][0])
    return crossing(mine, target) / crossing(dense, target)


def page(args: argparse.Namespace, trainings: Sequence[SimulatedCurves], found: dict[str, list[Row]]) -> Iterator[str]:
    computing = ", ".join(f"{task} {1000 * STEP_SECONDS[task]:g} ms" for task in TASKS)
    yield "# Automatic choice compared with the best fixed recipe"
    numbers = {"recipes": len(FIXED), "steps": args.steps, "patience": PATIENCE, "trainings": len(trainings)}
    numbers |= {"race_steps": RACE_STEPS, "advised": ADVISED}
    best = [row.pair.best == STATIC for rows in found.values() for row in rows]
    numbers |= {"best": sum(best), "pairs": len(best)}
    yield f"\n{ABOUT.format(computing=computing, static=STATIC, **numbers)}\n"
    yield provenance()
    yield "\n## Summary\n"
    yield "Seconds to the target over those of the best fixed recipe of each pair: median, worst.\n"
    yield markdown([summary(name, rows) for name, rows in found.items()])
    for name, rows in found.items():
        yield f"\n## {len(rows)} networks, {name}\n"
        yield f"Always the same: `{STATIC}`.\n"
        yield markdown([row.texts() for row in rows])
    if advised := [row for rows in found.values() for row in rows if row.advised is not None]:
        yield "\n## The choice of `gossamer advise`\n"
        yield markdown([row.advice() for row in advised])
    yield "\n## Step factors\n"
    yield (
        "Steps to the losses that `Dense()` reaches in a third and in two thirds of its steps, relative to those of "
        "`Dense()`; the same learning rate for all, means of the trainings; -: not reached.\n"
    )
    tasks = (*TASKS, *UNSEEN) if args.unseen else TASKS
    yield markdown(
        [{"recipe": f"`{recipe}`", **{task: needs(trainings, recipe, task) for task in tasks}} for recipe in FIXED]
    )
    longer = replace(trainings[0], steps=LONGER * args.steps, evaluate_every=LONGER * args.evaluate_every)
    yield f"\n## In {longer.steps} steps\n"
    yield "The same in one longer training (one seed), to see if local steps lose little only at the beginning.\n"
    yield markdown(
        [
            {"recipe": f"`{recipe}`", **{task: needs([longer], recipe, task) for task in (*TASKS, *UNSEEN)}}
            for recipe in (STATIC, MILD, ONE_BIT)
        ]
    )


def rows(search: Search, networks: Sequence[Draw], tasks: Sequence[str], advised: int) -> Iterator[Row]:
    for number, network in enumerate(networks):
        pair = search.pair(tasks[number % len(tasks)], network)
        yield Row(pair, *search.auto(pair), search.advised(pair) if number < advised else None)


def verify(args: argparse.Namespace, search: Search) -> None:
    """Train and estimate the pairs of one task again, and compare them with those of the page."""
    made: dict[str, dict[str, str]] = {}
    for seed in args.draws:
        for number, network in enumerate(draw(args.pairs, seed)):
            if TASKS[number % len(TASKS)] == args.verify:
                pair = search.pair(args.verify, network)
                name = f"{args.pairs} networks, seed {seed} | {pair.task} | {pair.schedule}"
                made[name] = Row(pair, *search.auto(pair), None).texts()
    verify_rows(args.output, "", made, names=2)


def main(args: argparse.Namespace) -> None:
    kept = Kept(args.kept)
    trainings = [
        SimulatedCurves(kept, WORKERS, args.steps, seed, args.evaluate_every, STEP_SECONDS) for seed in args.seeds
    ]
    search, found = Search(trainings), dict[str, list[Row]]()
    if args.verify:
        verify(args, search)
        return
    plans: list[tuple[str, int, int, Sequence[str]]] = [
        (f"seed {seed}", seed, args.pairs, TASKS) for seed in args.draws
    ]
    plans += [(f"seed {seed}, other tasks", seed, args.pairs // 2, UNSEEN) for seed in args.unseen]
    for name, seed, pairs, tasks in plans:
        found[name] = []
        for row in rows(search, draw(pairs, seed), tasks, ADVISED * (seed in args.advised)):
            found[name].append(row)
            print(" | ".join(row.texts().values()), flush=True)
        print(summary(name, found[name]), flush=True)
    args.output.write_text("\n".join(page(args, trainings, found)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Time to a loss of auto and advise over the best fixed recipe.")
    options.add_argument("--pairs", type=int, default=20)
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the trainings")
    options.add_argument("--draws", type=int, nargs="+", default=[0, 3], help="seeds of networks")
    options.add_argument("--unseen", type=int, nargs="*", default=[], help="likewise, for other tasks, such as 4")
    options.add_argument("--advised", type=int, nargs="*", default=[3], help="of these, those on which advise is asked")
    options.add_argument("--evaluate-every", type=int, default=5)
    options.add_argument("--verify", choices=TASKS, metavar="TASK", help="compare its pairs with those of --output")
    options.add_argument("--kept", type=Path, default=ROOT / "runs" / "advice.json")
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "advice.md")
    main(options.parse_args())
