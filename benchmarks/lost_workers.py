"""Lost workers: what training comes to where every few seconds one of four workers is killed and started again.

Every seed's run has a calm stretch before and one after its losses, to which its rate is compared; a run without any
loss goes as many steps. Victims are drawn by the seed, rank 0 among them; with even seeds one worker is spared, whose
memory and open files are looked at. A loss is left out while fewer than three workers train.

    python benchmarks/lost_workers.py [--minutes 10] [--every 10] [--seeds 0 1 2] [--recipes RECIPE ...] [--json FILE]
    python benchmarks/lost_workers.py --quick       # one recipe and seed, two minutes, to see that it runs

Restarted workers read their script again, and one that was edited meanwhile is refused: leave the sources alone.
"""

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import DrivenRun, WorkerProcess, committed, rate, read, run, spread  # after the line above
from benchmarks.provenance import provenance
from benchmarks.report import markdown

RECIPES = ["TopK(density=0.01)", "DiLoCo(period=20) + Int8()", "Dense()"]
WORKERS, LEAST, ENOUGH = 4, 2, 3  # a loss is left out while fewer than ENOUGH train
DEAD_AFTER_SECONDS = 5.0
BEGINNING_SECONDS, ENDING_SECONDS = 5.0, 60.0
UNEXPECTED = re.compile(r"nobody killed| failed: |Error\b")
SHOWN_NOTES = 8
SAID = 3000  # last characters of what a failed run said

Start = Callable[[Sequence[str], Path | None], AbstractContextManager[DrivenRun]]  # by the script's options


@dataclass(kw_only=True)
class Losses:
    """One run with losses, as it was found."""

    seed: int
    killed: list[tuple[float, int, int]] = field(default_factory=list)  # when, place, rank
    left_out: int = 0
    calm: list[tuple[float, float]] = field(default_factory=list)  # intervals
    troubled: tuple[float, float] = (0.0, 0.0)
    calm_rate: float = 0.0  # committed steps a second
    troubled_rate: float = 0.0
    gaps: list[float] = field(default_factory=list)  # the longest at each survivor of each loss
    calm_gaps: list[float] = field(default_factory=list)  # the longest at each worker, of intervals as long
    steps: int = 0
    loss: float = float("nan")
    undisturbed: float = float("nan")  # loss after as many steps without losses
    undisturbed_rate: float = float("nan")
    hashes: list[str] = field(default_factory=list)
    spared: dict[str, float] = field(default_factory=dict)
    launcher: dict[str, float] = field(default_factory=dict)
    made_again: int = 0  # steps that had been made, and were lost with all who had made them
    notes: list[str] = field(default_factory=list)  # what the run said of processes that nobody killed
    error: str = ""

    @property
    def kept(self) -> float:
        return self.troubled_rate / self.calm_rate if self.calm_rate else float("nan")


def draws(seed: int) -> Callable[[dict[int, WorkerProcess]], WorkerProcess]:
    """Who is next: with an even seed never the last worker."""
    drawn, spared = random.Random(seed), WORKERS - 1 if seed % 2 == 0 else None

    def draw(training: dict[int, WorkerProcess]) -> WorkerProcess:
        return training[drawn.choice(sorted(set(training) - {spared}))]

    return draw


def lose(running: DrivenRun, found: Losses, args: argparse.Namespace) -> None:
    """Calm, then losses, then calm, with all workers."""
    draw = draws(found.seed)
    running.wait_for(WORKERS)
    before = running.held()
    begin = time.monotonic()
    running.sleep(args.calm)
    found.calm.append((begin, begin + args.calm))
    begin = time.monotonic()
    while (due := begin + args.every * (len(found.killed) + found.left_out)) < begin + 60 * args.minutes:
        running.sleep(due - time.monotonic())
        training = running.training()
        if len(training) < ENOUGH:
            found.left_out += 1
            continue
        victim = draw(training)
        found.killed.append((running.kill(victim), victim.place, victim.steps[-1].rank))
    running.sleep(args.every)
    found.troubled = (begin, time.monotonic())
    running.wait_for(WORKERS)
    begin = time.monotonic()
    running.sleep(args.calm)
    found.calm.append((begin, begin + args.calm))
    after = running.held()
    found.launcher = {"MB": before[0], "MB at the end": after[0], "files": before[1], "files at the end": after[1]}


def judge(found: Losses, processes: Sequence[WorkerProcess], every: float) -> None:
    """Fill in what the workers wrote down."""
    moments = list(committed(processes).values())
    found.made_again = made_again(processes)
    found.calm_rate = statistics.fmean(rate(moments, *each) for each in found.calm)
    found.troubled_rate = rate(moments, *found.troubled)
    found.gaps = list(gaps(processes, [(when, when + every) for when, _, _ in found.killed]))
    stretches = [
        (begin + number * every, begin + (number + 1) * every)
        for begin, end in found.calm
        for number in range(int((end - begin) / every))
    ]
    found.calm_gaps = list(gaps(processes, stretches))
    ends = [each.end for each in processes if each.end is not None]
    found.hashes = [end["hash"] for end in ends]
    found.loss = statistics.fmean(end["loss"] for end in ends) if ends else float("nan")
    found.steps = max((end["step"] for end in ends), default=0)
    oldest = max(processes, key=lambda each: each.steps[-1].moment - each.steps[0].moment if each.steps else 0.0)
    first, last = oldest.steps[min(len(oldest.steps) - 1, 100)], oldest.steps[-1]  # what is made once, is made by then
    found.spared = {
        "losses": sum(first.moment < when < last.moment for when, _, _ in found.killed),
        "MB": first.megabytes,
        "MB at the end": last.megabytes,
        "files": first.files,
        "files at the end": last.files,
    }


def made_again(processes: Sequence[WorkerProcess]) -> int:
    """The highest step before one that is the first again, made long after the run's first."""
    highest, lost = 0, 0
    steps = sorted((step for each in processes for step in each.steps), key=lambda step: step.moment)
    for step in steps:
        if step.number == 1 and step.moment > steps[0].moment + BEGINNING_SECONDS and highest > 1:
            lost, highest = lost + highest, 0
        highest = max(highest, step.number)
    return lost


def gaps(processes: Sequence[WorkerProcess], intervals: Sequence[tuple[float, float]]) -> Iterator[float]:
    """The longest of each process that was there, by interval."""
    for begin, end in intervals:
        yield from (gap for each in processes if (gap := each.longest_gap(begin, end)) is not None)


def with_losses(start: Start, seed: int, args: argparse.Namespace, keep: Path | None) -> Losses:
    found = Losses(seed=seed)
    with start(["--seed", str(seed), "--size", args.size], keep) as running:
        try:
            lose(running, found, args)
            code = running.stop()
            found.error = f"ended with {code}: {running.text[-SAID:]}" if code else ""
        except SystemExit as problem:  # what broke is a result
            found.error = str(problem)
        processes = read(running.folder)
        found.notes = [line for _, line in running.said if UNEXPECTED.search(line)]
        if len(found.calm) == 2:
            judge(found, processes, args.every)
    return found


def without_losses(start: Start, found: Losses, args: argparse.Namespace) -> None:
    with start(["--seed", str(found.seed), "--size", args.size, "--steps", str(found.steps)], None) as running:
        code = running.wait(ENDING_SECONDS + 10 * found.steps / max(found.calm_rate, 0.1))
        processes = read(running.folder)
        ends = [each.end for each in processes if each.end is not None]
        if code or len(ends) != WORKERS:
            raise SystemExit(f"the run without losses ended with {code}:\n{running.text[-SAID:]}")
        found.undisturbed = statistics.fmean(end["loss"] for end in ends)
        moments = sorted(committed(processes).values())
        found.undisturbed_rate = (len(moments) - 1) / (moments[-1] - moments[0])


def row(recipe: str, runs: Sequence[Losses]) -> dict[str, str]:
    """A line of the table: over seeds the median, the least and the most; of gaps over all losses."""
    whole = [each for each in runs if not each.error]
    gaps, calm = [gap for each in whole for gap in each.gaps], [gap for each in whole for gap in each.calm_gaps]
    agreed = sum(len(each.hashes) == WORKERS and len(set(each.hashes)) == 1 for each in runs)
    spared = max((each.spared for each in whole), key=lambda each: each["losses"], default={})
    held = "{losses:g} losses: {MB:.0f} to {MB at the end:.0f} MB, {files:g} to {files at the end:g} files"
    return {
        "": recipe,
        "losses": str(sum(len(each.killed) for each in runs)),
        "steps/s": spread([each.troubled_rate for each in whole], 1),
        "calm": spread([each.calm_rate for each in whole], 1),
        "over calm": spread([each.kept for each in whole]),
        "made again": str(sum(each.made_again for each in runs)),
        "gap: median, most": f"{statistics.median(gaps):.2f}, {max(gaps):.2f} s" if gaps else "",
        "calm gap": f"{statistics.median(calm):.2f}, {max(calm):.2f} s" if calm else "",
        "loss": spread([each.loss for each in whole], 3),
        "without losses": spread([each.undisturbed for each in whole], 3),
        "hashes alike": f"{agreed} of {len(runs)}",
        "a survivor": held.format(**spared) if spared else "",
    }


def about(by: str, args: argparse.Namespace) -> str:
    return (
        f"{WORKERS} workers learn bytes ({args.size}, benchmarks/elastic_worker.py) by {by}. Every "
        f"{args.every:g} s for {args.minutes:g} minutes one that was drawn by the seed is killed (SIGKILL), and "
        f"another is started in its place; "
        f"{args.calm:g} s before and after are calm. Rates are of committed steps. Made again: steps that all workers "
        "had lost. Gap: the longest between two steps at each survivor, from each loss to the next; the target is "
        f"{DEAD_AFTER_SECONDS + 1:g} s. Loss: of held-out bytes at the end, and after as many steps without losses. Of "
        f"seeds {', '.join(map(str, args.seeds))} the median (the least to the most)."
    )


def measure(starts: Mapping[str, Start], by: str, args: argparse.Namespace) -> None:
    """Print the table of runs that take turns; those without losses, of which only the end counts, come last."""
    all_runs: dict[str, list[Losses]] = {name: [] for name in starts}
    for seed in args.seeds:
        for number, (name, start) in enumerate(starts.items()):
            found = with_losses(start, seed, args, args.keep and args.keep / f"{number}-{seed}")
            all_runs[name].append(found)
            shown = f"{len(found.killed)} losses, {found.kept:.2f} of the calm rate, {found.left_out} left out"
            print(f"{name}, seed {seed}: {shown}\n{found.error}".strip(), file=sys.stderr, flush=True)
            write(args.json, by, all_runs, args)
    for name, runs in all_runs.items():
        for each in runs:
            if not each.error:
                without_losses(starts[name], each, args)
                print(
                    f"{name}, seed {each.seed}: {each.loss:.4f}, without losses {each.undisturbed:.4f}", file=sys.stderr
                )
                write(args.json, by, all_runs, args)
    print(f"{about(by, args)}\n\n{markdown([row(name, runs) for name, runs in all_runs.items()])}\n\n{provenance()}")
    for name, runs in all_runs.items():
        for each in runs:
            print(f"\n{name}, seed {each.seed} broke: {each.error}" if each.error else "", end="")
            print("".join(f"\n{name}, seed {each.seed}: {note}" for note in each.notes[:SHOWN_NOTES]))


def write(file: Path | None, by: str, all_runs: Mapping[str, Sequence[Losses]], args: argparse.Namespace) -> None:
    """What was found so far, so that a measurement that is cut short has its figures."""
    if file:
        file.write_text(json.dumps(described(about(by, args), all_runs), indent=1))


def described(text: str, all_runs: Mapping[str, Sequence[Losses]]) -> dict[str, Any]:
    return {
        "about": text,
        "runs": {recipe: [asdict(each) for each in runs] for recipe, runs in all_runs.items()},
    }


def read_options(title: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=title)
    options.add_argument("--minutes", type=float, default=10.0, help="of losses")
    options.add_argument("--calm", type=float, default=60.0, metavar="SECONDS", help="before, and again after")
    options.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="between losses")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--size", default="tiny", help="of the model: tiny, small, base")
    options.add_argument("--json", type=Path, metavar="FILE", help="all that was found, too, after every run")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs of runs with losses there")
    options.add_argument("--quick", action="store_true", help="one recipe and seed, two minutes")
    return options


def shorten(args: argparse.Namespace) -> None:
    args.minutes, args.calm, args.every, args.seeds = 0.75, 15.0, 15.0, [0]


def main(args: argparse.Namespace) -> None:
    if args.quick:
        shorten(args)
        args.recipes = args.recipes[:1]
    restarts, workers = ["--max-restarts", "1000"], f"{LEAST}:{WORKERS}"
    starts = {recipe: partial(run, workers, ["--recipe", recipe, *restarts]) for recipe in args.recipes}
    measure(starts, f"gossamer run --workers {workers} {' '.join(restarts)}", args)


if __name__ == "__main__":
    options = read_options(__doc__.split("\n")[0])
    options.add_argument("--recipes", nargs="+", default=RECIPES)
    main(options.parse_args())
