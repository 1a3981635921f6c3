"""Retained benefit of local steps by speed (balance=True), for workers with speeds 1, 1, 1 and 0.2.

Every arm sees as many samples as lock step on the rung of benchmarks/ladder.py that gives the ends of the scale. The
workers are threads with real sessions and a virtual clock each, so the number of their local steps is reproducible.
Rates are tuned over half decades with another seed and other held-out files. Every run is one line of --runs; the same
command continues where the last one stopped. Writes docs/benchmarks/unequal-speeds.md.

    python benchmarks/unequal_speeds.py [--seeds 3]
    python benchmarks/unequal_speeds.py --report     # train nothing, write the page
    python benchmarks/unequal_speeds.py --verify 2   # train 2 stored runs again, compare, note it on the page
    python benchmarks/unequal_speeds.py --quick      # one short run, to see that it runs
"""

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import kept  # found only after the line above
from benchmarks.ladder import RUNS as LADDER
from benchmarks.ladder import read
from benchmarks.ladder_arms import ARMS, LOCK_STEP, ONE_BIT, SILENCE
from benchmarks.ladder_plan import TUNING_SEEDS, tuned_rate
from benchmarks.ladder_report import results
from benchmarks.ladder_tasks import RATES, WORKERS, rungs
from benchmarks.losses import number
from benchmarks.provenance import QUICK, ROOT, provenance, scratch
from benchmarks.virtual_workers import PATIENCE_SECONDS, Counting, Worker, quiet, settle, work_in
from torch import nn
from torch.optim import Optimizer

from gossamer.algorithms.recipes.retained_benefit import retained_benefit, text
from gossamer.algorithms.strategies.shares_by_speed import steps_by_speed
from gossamer.comm.simulated import SimulatedGroup
from gossamer.train.session.session import Session
from gossamer.train.synchronizers import speed_balance

RUNG = "bytelm-57k-b2"
SPEEDS = 1.0, 1.0, 1.0, 0.2
PAGE = ROOT / "docs" / "benchmarks" / "unequal-speeds.md"
RUNS = ROOT / "benchmarks" / "results" / "unequal_speeds.jsonl"
M = "1 bit, momentum aligned"


@dataclass(frozen=True)
class Unequal:
    """equal_count: the arm of the ladder with equal numbers of steps. by_samples: weight of a worker's parameters."""

    name: str
    recipe: str
    period: int
    equal_count: str
    by_samples: bool = True


def balanced(recipe: str) -> str:
    """The recipe with balance=True in its strategy."""
    strategy, plus, rest = recipe.partition(" + ")
    return f"{strategy[:-1]}, balance=True){plus}{rest}"


UNEQUAL = [
    Unequal("every 4 steps", balanced(ARMS[f"every 4 steps, {M}"].recipe), 4, f"every 4 steps, {M}"),
    Unequal(
        "every 16 steps, outer rate 1.5",
        balanced(ARMS[f"every 16 steps, {M}, outer rate 1.5"].recipe),
        16,
        f"every 16 steps, {M}, outer rate 1.5",
    ),
    Unequal(
        "every 16 steps, outer rate 1.5, equal weights",
        balanced(ARMS[f"every 16 steps, {M}, outer rate 1.5"].recipe),
        16,
        f"every 16 steps, {M}, outer rate 1.5",
        by_samples=False,
    ),
    Unequal("DiLoCo 20", balanced(ARMS["DiLoCo 20, 1 bit"].recipe), 20, "DiLoCo 20, 1 bit"),
]


class VirtualTime(threading.local):
    now = 0.0


CLOCK = VirtualTime()


def local_steps(period: int) -> tuple[int, ...]:
    """Of each worker, per period, once speeds are known."""
    return steps_by_speed([1 / speed for speed in SPEEDS], period)


@dataclass
class UnequalWorker(Worker):
    """Trains until all workers together have seen the samples of the rung."""

    arm: Unequal = field(default=UNEQUAL[0])

    def _train(self, model: nn.Module, optimizer: Optimizer, session: Session | None) -> None:
        assert session is not None
        made = local_steps(self.arm.period)
        total = self.arm.period * round(self.steps * WORKERS / sum(made))  # positions in the common schedule
        rank, lanes = self.transport.rank, sum(made)
        batches, row, used = self.task.batches(lanes, self.seed), [], 0
        first = sum(made[:rank])
        while session.steps < total:
            if not used % made[rank]:
                row = next(batches)[first : first + made[rank]]
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * self.task.pace(session.steps / total)
            if not self.arm.by_samples:
                session.set_batch_weight(1 / made[rank] if session.steps >= 2 * self.arm.period else 1.0)
            self.task.loss(model, *row[used % made[rank]]).backward()
            CLOCK.now += 1 / SPEEDS[rank]
            optimizer.step()
            optimizer.zero_grad()
            used += 1
        self._look(session.steps, model, session)
        settle(session)
        self.own = float(used)


def train(arm: Unequal, rate: float, seed: int, steps: int | None = None) -> dict[str, Any]:
    rung = rungs()[RUNG]
    exam = rung.tuning_exam() if seed in TUNING_SEEDS else rung.exam()
    rung.task.samples()
    group, finished = SimulatedGroup(WORKERS, PATIENCE_SECONDS), threading.Barrier(WORKERS)
    team = [
        UnequalWorker(
            rung.task, exam, arm.recipe, rate, seed, steps or rung.task.steps, Counting(each), finished, arm=arm
        )
        for each in group.transports
    ]
    speed_balance.now = lambda: CLOCK.now
    with quiet(), ThreadPoolExecutor(WORKERS) as pool:
        for future in [pool.submit(partial(work_in, each, group)) for each in team]:
            future.result()
    return {
        "arm": arm.name,
        "recipe": arm.recipe,
        "learning_rate": rate,
        "seed": seed,
        "steps": steps or rung.task.steps,
        "batches": [int(each.own or 0) for each in team],
        "bytes_sent": statistics.fmean(each.transport.bytes_sent - each.merging_bytes for each in team),
        "held_out": team[0].losses[-1][2],
    }


def stored(path: Path) -> dict[tuple[str, float, int], dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = map(json.loads, lines)
    return {(run["arm"], run["learning_rate"], run["seed"]): run for run in found}


def tuned(runs: Mapping[tuple[str, float, int], dict[str, Any]], arm: Unequal) -> tuple[float | None, list[float]]:
    """The best rate of the tuning seed, None while its neighbors are missing; and the rates to train for it."""
    losses = {rate: number(run["held_out"]) for (name, rate, seed), run in runs.items() if name == arm.name
              and seed == TUNING_SEEDS[0]}  # fmt: skip
    if not losses:
        known = tuned_rate(read(LADDER, None), RUNG, arm.equal_count)
        return None, [known or rungs()[RUNG].first_rate]
    best = min(losses, key=lambda rate: losses[rate])
    at = RATES.index(best)
    missing = [rate for rate in (RATES[at - 1], RATES[at + 1]) if rate not in losses]
    return (None if missing else best), missing


def train_all(args: argparse.Namespace) -> None:
    args.runs.parent.mkdir(parents=True, exist_ok=True)
    while True:
        runs, wanted = stored(args.runs), list[tuple[Unequal, float, int]]()
        for arm in UNEQUAL:
            best, missing = tuned(runs, arm)
            wanted += [(arm, rate, TUNING_SEEDS[0]) for rate in missing]
            if best is not None:
                wanted += [(arm, best, seed) for seed in range(args.seeds) if (arm.name, best, seed) not in runs]
        if not wanted:
            return
        arm, rate, seed = wanted[0]
        run = train(arm, rate, seed)
        with args.runs.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
        print(f"{arm.name}, rate {rate:g}, seed {seed}: {run['held_out']}, batches {run['batches']}", file=sys.stderr)


def report(args: argparse.Namespace) -> str:
    runs, (ladder, *_) = stored(args.runs), results(read(LADDER, None), [RUNG], 5)
    silent, dense = ladder.losses(SILENCE), ladder.losses(LOCK_STEP)
    lines = [
        "# Retained benefit at unequal speeds\n",
        "What do unequal numbers of local steps retain?\n",
        f"{WORKERS} workers with speeds {', '.join(f'{speed:g}' for speed in SPEEDS)} train the task `{RUNG}` of [the "
        "ladder](ladder.md), which has the ends of the scale, the definition of `retained` and the arms with equal "
        "numbers of steps. With `balance=True` every worker makes local steps in proportion to its speed. All arms see "
        "as many samples in all. `Useful share`: the samples of a round, divided by those that all workers could "
        "compute in its time without waiting. `Weights`: of a worker's parameters in the mean, by its samples or "
        "equal.\n",
        provenance(["python", "benchmarks/unequal_speeds.py", "--report"]) + "\n",
        *(f"{line}\n" for line in kept.lines_again(args.output)),
        "| recipe | local steps per round | weights | useful share | retained | held-out loss | rate | seeds |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    shown = set[str]()
    for arm in UNEQUAL:
        if arm.equal_count not in shown and arm.equal_count in ladder.runs:
            shown.add(arm.equal_count)
            used = sum([arm.period] * WORKERS) / (sum(SPEEDS) * arm.period / min(SPEEDS))
            losses = ladder.losses(arm.equal_count)
            lines.append(
                f"| `{ARMS[arm.equal_count].recipe.replace(ONE_BIT, '1 bit')}` | {arm.period} each | equal "
                f"| {used:.2f} | {text(ladder.retained(arm.equal_count))} | {statistics.fmean(losses.values()):.3f} | "
                f"{ladder.rates[arm.equal_count]:g} | {len(losses)} |"
            )
        best, _ = tuned(runs, arm)
        losses = {seed: number(run["held_out"]) for (name, rate, seed), run in runs.items() if name == arm.name
                  and rate == best and seed not in TUNING_SEEDS}  # fmt: skip
        if best is None or not losses:
            continue
        made = local_steps(arm.period)
        seconds = max(steps / speed for steps, speed in zip(made, SPEEDS, strict=True))
        lines.append(
            f"| `{arm.recipe.replace(ONE_BIT, '1 bit')}` | {', '.join(map(str, made))} | "
            f"{'samples' if arm.by_samples else 'equal'} | {sum(made) / (sum(SPEEDS) * seconds):.2f} | "
            f"{text(retained_benefit(losses, silent=silent, dense=dense))} | {statistics.fmean(losses.values()):.3f} | "
            f"{best:g} | {len(losses)} |"
        )
    return "\n".join(lines) + "\n"


def verify(args: argparse.Namespace) -> None:
    arms = {arm.name: arm for arm in UNEQUAL}
    runs = [run for run in stored(args.runs).values() if run["arm"] in arms]
    kept.verify_runs(
        args.output,
        "",
        runs,
        args.verify,
        lambda run: train(arms[run["arm"]], run["learning_rate"], run["seed"], run["steps"]),
        name=lambda run: f"{run['arm']}, learning rate {run['learning_rate']:g}, seed {run['seed']}",
        kind=lambda run: run["arm"],
        seconds=lambda run: sum(run["batches"]),
    )


def main(args: argparse.Namespace) -> None:
    if args.quick:
        run = train(UNEQUAL[0], 0.01, 0, steps=48)
        (QUICK / RUNS.name).parent.mkdir(parents=True, exist_ok=True)
        scratch(PAGE).write_text(json.dumps(run) + "\n", encoding="utf-8")
        print(json.dumps(run))
        return
    if args.verify:
        verify(args)
        return
    if not args.report:
        train_all(args)
    page = report(args)
    print(page)
    args.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--runs", type=Path, default=RUNS)
    options.add_argument("--output", type=Path, default=PAGE)
    options.add_argument("--report", action="store_true", help="train nothing, write the page")
    options.add_argument("--verify", type=int, metavar="N", help="train N stored runs again and compare their losses")
    options.add_argument("--quick", action="store_true", help="one short run, in files of its own")
    main(options.parse_args())
