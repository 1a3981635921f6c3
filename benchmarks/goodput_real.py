"""Goodput with workers that are killed, measured: eight processes on this machine, one killed every ten seconds.

A sample is useful once it is part of the parameters with which training continues: steps that a killed worker made
alone and had not sent are lost. The run has a control group of its own, which goes before other programs of the
machine, so that a new process starts as it would on an idle one. Needs root.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.elastic_runs import DrivenRun, WorkerProcess, rate, read, run
from benchmarks.goodput_worker import STEP_SECONDS
from benchmarks.stragglers import Group

WORKERS, LEAST, EVERY_SECONDS, CALM_SECONDS, LOSSES = 8, 4, 10.0, 40.0, 8
CORES = 2.0
RESTARTS = ["--max-restarts", "1000"]
ELASTIC, SERVED = f"{LEAST}:{WORKERS}", str(WORKERS)
SHOWN_CHARACTERS = 3000


@dataclass(frozen=True)
class Arm:
    """A recipe, with the number of workers and options of its command. period: steps between a worker's messages."""

    recipe: str
    workers: str
    options: Sequence[str]
    period: int = 1
    elastic: bool = True


ARMS = [
    Arm("Dense()", ELASTIC, RESTARTS),
    Arm("LocalSGD(period=8)", ELASTIC, RESTARTS, 8),
    Arm("AsyncDiLoCo(period=8)", SERVED, ["--servers", "1", *RESTARTS], 8, elastic=False),
]


@dataclass
class Measured:
    """One run. Rates are useful steps of all workers per second."""

    recipe: str
    calm: float = 0.0
    killed: float = 0.0
    losses: int = 0
    away: list[float] = field(default_factory=list)  # by loss, seconds until the new process begins its first step
    pauses: list[float] = field(default_factory=list)  # by loss and survivor, seconds above the usual time of its steps
    lost_steps: int = 0

    @property
    def goodput(self) -> float:
        return self.killed / self.calm


def measure_all(path: Path, arms: Sequence[Arm] = ARMS) -> None:
    """Run all arms, and append their results to `path` as lines of JSON."""
    for arm in arms:
        found = measure(arm)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        print(f"{arm.recipe}: goodput {found.goodput:.3f}", file=sys.stderr, flush=True)


def stored(path: Path) -> list[Measured]:
    """The newest result of each recipe."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return list({each.recipe: each for each in (Measured(**json.loads(line)) for line in lines)}.values())


def measure(arm: Arm, calm_seconds: float = CALM_SECONDS, losses: int = LOSSES) -> Measured:
    """Calm, then a loss every ten seconds."""
    group = Group.make(f"gossamer-goodput-{os.getpid()}", CORES)
    group.join()
    try:
        return _measure(arm, calm_seconds, losses)
    finally:
        group.leave()
        group.remove()


def _measure(arm: Arm, calm_seconds: float, losses: int) -> Measured:
    with run(arm.workers, ["--recipe", arm.recipe, *arm.options], [], program="goodput_worker.py") as running:
        running.wait_for(WORKERS, steps=2 * arm.period + 5)
        begin = time.monotonic()
        running.sleep(calm_seconds)
        troubled = time.monotonic()
        victims = dict[int, float]()
        for number in range(losses):
            running.sleep(troubled + number * EVERY_SECONDS - time.monotonic())
            if (victim := next_victim(running, number)) is not None:
                victims[victim.pid] = running.kill(victim)
        end = troubled + losses * EVERY_SECONDS
        running.sleep(end - time.monotonic())
        code = running.stop()
        if code:
            print(f"{arm.recipe} ended with {code}: {running.text[-SHOWN_CHARACTERS:]}", file=sys.stderr)
        processes = read(running.folder)
    moments, lost_steps = useful(processes, arm, victims)
    return Measured(
        recipe=arm.recipe,
        calm=rate(moments, begin, troubled),
        killed=rate(moments, troubled, end),
        losses=len(victims),
        away=[successor.steps[0].moment - STEP_SECONDS - victims[each.pid] for each in processes
              if each.pid in victims and (successor := next_process(each, processes))],
        pauses=list(pauses(processes, [troubled, *victims.values()])),
        lost_steps=lost_steps,
    )  # fmt: skip


def next_victim(running: DrivenRun, number: int) -> WorkerProcess | None:
    """Places take turns; a worker that is not back yet is not killed again."""
    return running.training().get(number % WORKERS)


def next_process(victim: WorkerProcess, processes: Sequence[WorkerProcess]) -> WorkerProcess | None:
    """The process that took the place of a killed one, if it has made a step."""
    later = [each for each in processes if each.place == victim.place and each.steps
             and each.steps[0].moment > victim.steps[-1].moment]  # fmt: skip
    return min(later, key=lambda each: each.steps[0].moment, default=None)


def useful(processes: Sequence[WorkerProcess], arm: Arm, victims: Mapping[int, float]) -> tuple[list[float], int]:
    """The moments of useful steps of all workers, and the number of lost ones. victims: moments of death by pid."""
    moments, lost = list[float](), 0
    for each in processes:
        kept = kept_until(each, arm, processes) if each.pid in victims and each.steps else sys.maxsize
        lost += sum(step.number > kept for step in each.steps)
        moments += [step.moment for step in each.steps if step.number <= kept]
    return sorted(moments), lost


def kept_until(victim: WorkerProcess, arm: Arm, processes: Sequence[WorkerProcess]) -> int:
    """The last step of a killed worker that counts: that of its last round, or where its next process began."""
    last = victim.steps[-1].number
    if arm.elastic:
        return last // arm.period * arm.period
    successor = next_process(victim, processes)
    return successor.steps[0].number - 1 if successor else last


def pauses(processes: Sequence[WorkerProcess], moments: Sequence[float]) -> Iterator[float]:
    """By survivor of each loss, the seconds that its steps until the next loss took above the usual time. moments: the
    end of the calm part, and the losses."""
    gaps = [
        (each, late.moment, late.moment - early.moment) for each in processes for early, late in pairwise(each.steps)
    ]
    usual = statistics.median(gap for _, moment, gap in gaps if moment <= moments[0])
    for loss in moments[1:]:
        end = loss + EVERY_SECONDS
        for each in processes:
            if each.steps and each.steps[0].moment < loss and each.steps[-1].moment > end:
                yield sum(gap - usual for of, moment, gap in gaps if of is each and loss < moment <= end)


def row(found: Measured) -> dict[str, str]:
    """A line of the page's table."""
    away = f"{statistics.median(found.away):.1f} s (at most {max(found.away):.1f})" if found.away else ""
    return {
        "recipe": f"`{found.recipe}`",
        "steps/s without losses": f"{found.calm:.1f}",
        "with losses": f"{found.killed:.1f}",
        "goodput": f"{found.goodput:.3f}",
        "losses": str(found.losses),
        "a lost worker is back after": away,
        "pause of the others per loss": f"{statistics.fmean(found.pauses):.2f} s" if found.pauses else "",
        "lost steps": str(found.lost_steps),
    }
