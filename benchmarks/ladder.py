"""Retained benefit of recipes over model size: (L_silent - L) / (L_silent - L_dense), every arm at its own best rate.

Workers are threads of one process with a model, an optimizer and a real session each. Every run is one line of
--runs as soon as it is done; the same command continues where the last one stopped. Writes
docs/benchmarks/ladder.md, and the shares that `gossamer explain` shows.

    python benchmarks/ladder.py --processes 2 --minutes 120
    python benchmarks/ladder.py --rungs bytelm-57k-b16 --arms "lock step" silence "DiLoCo 20" --seeds 3
    python benchmarks/ladder.py --predict bytelm-237k-b2        # before it is trained: its rates and losses
    python benchmarks/ladder.py --report                        # train nothing, write the page
    python benchmarks/ladder.py --verify 4                      # train 4 stored runs again, and note it on the page
    python benchmarks/ladder.py --verify 4 --tenths 1           # the first tenth of each
    python benchmarks/ladder.py --quick                         # a few steps, in files of their own

Rungs: benchmarks/ladder_tasks.py. Arms: benchmarks/ladder_arms.py.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from difflib import get_close_matches
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import kept  # found only after the line above
from benchmarks.ladder_arms import ARMS
from benchmarks.ladder_picture import plot, plot_rounds
from benchmarks.ladder_plan import TUNING_SEEDS, Job, LadderRun, is_current, key, steps_of, wanted, workers_of
from benchmarks.ladder_report import measured, page_part, predictions, results, with_rounds
from benchmarks.ladder_tasks import rungs
from benchmarks.page import around, put_between
from benchmarks.provenance import QUICK, ROOT, provenance, scratch
from benchmarks.side_by_side import one_thread
from benchmarks.virtual_workers import POINTS, train

RUNS, PAGE = ROOT / "benchmarks" / "results" / "ladder.jsonl", ROOT / "docs" / "benchmarks" / "ladder.md"
PREDICTIONS = ROOT / "benchmarks" / "results" / "ladder_predictions.json"
SHARES = ROOT / "src" / "gossamer" / "algorithms" / "recipes" / "retained_benefit.json"
QUICK_STEPS = 8
ALT = "retained benefit of every arm with its interval, a panel for each model size"


def do(job: Job, steps: int | None, tenths: int = 0) -> LadderRun | str:
    """A run, or the reason why this arm cannot be trained on this rung. tenths: of its steps that are made; 0: all."""
    rung, arm = rungs()[job.rung], ARMS[job.arm]
    exam = rung.tuning_exam if job.seed in TUNING_SEEDS else rung.exam
    began = time.process_time()
    try:
        count = steps or steps_of(arm, rung)
        until = tenths * (count // POINTS)
        run = train(rung.task, exam(), arm.recipe, job.learning_rate, job.seed, count, workers_of(arm, rung), until)
    except Exception as problem:  # one recipe that an optimizer cannot serve does not end a study of hours
        return f"{type(problem).__name__}: {problem}"
    used = time.process_time() - began
    return {**run, "rung": job.rung, "arm": job.arm, "about": rung.about, "cpu_seconds": used}


def read(path: Path, steps: int | None) -> dict[Job, LadderRun]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {key(run): run for run in map(json.loads, lines) if is_current(run, steps)}


def train_all(args: argparse.Namespace) -> None:
    """Train what is wanted and missing, the most important first, until the time is up."""
    runs, refused = read(args.runs, args.steps), dict[Job, str]()
    args.runs.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * args.minutes
    working: dict[Future[LadderRun | str], Job] = {}
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn"), initializer=one_thread) as pool:
        while True:
            known = {*refused, *working.values()}
            left = [job for job in dict.fromkeys(wanted(runs, args.rungs, args.arms, args.seeds)) if job not in known]
            for job in left[: args.processes - len(working)] if time.monotonic() < until else []:
                working[pool.submit(partial(do, steps=args.steps), job)] = job
            if not working:
                return
            for future in wait(working, return_when=FIRST_COMPLETED).done:
                job = working.pop(future)
                outcome = future.result()
                shown = f"{job.rung}, {job.arm}, learning rate {job.learning_rate:g}, seed {job.seed}"
                if isinstance(outcome, str):
                    refused[job] = outcome
                    print(f"{shown}: left out, {outcome}", file=sys.stderr, flush=True)
                    continue
                runs[job] = outcome
                with args.runs.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(outcome) + "\n")
                text = f"held-out loss {outcome['held_out']}, {outcome['cpu_seconds']:.0f} s of a processor"
                print(f"{shown}: {text}; {len(left) - 1} more known", file=sys.stderr, flush=True)


def predict(args: argparse.Namespace) -> None:
    """Add predictions for a rung to the file, without those of the same rung and arm that it has."""
    runs = read(args.runs, args.steps)
    if any(job.rung == args.predict and job.seed not in TUNING_SEEDS for job in runs):
        sys.exit(f"{args.predict} has reported runs already. A prediction must be written before them.")
    fresh = predictions(runs, args.predict, args.seeds)
    kept = [each for each in json.loads(PREDICTIONS.read_text()) if each["rung"] != args.predict]
    lines = ",\n".join(f"  {json.dumps(each)}" for each in [*kept, *fresh])
    PREDICTIONS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(lines)


def report(args: argparse.Namespace) -> None:
    found = results(read(args.runs, args.steps), args.rungs, args.seeds)
    if not found:
        sys.exit(f"{args.runs} has no rung with a tuned run of both lock step and silence. Train without --report.")
    command = ["python", "benchmarks/ladder.py", "--report", *(["--quick"] if args.quick else [])]
    about = [provenance(command), *kept.lines_again(args.page, "ladder")]
    text = page_part(found, about, json.loads(PREDICTIONS.read_text()))
    print(text)
    plot(found, args.page.with_suffix(".png"))
    if shares := with_rounds(found):
        plot_rounds(shares, args.page.with_name(f"{args.page.stem}-rounds.png"))
    if not args.quick and args.page == PAGE:
        lines = ",\n".join(f"  {json.dumps(each)}" for each in measured(found))
        SHARES.write_text(f"[\n{lines}\n]\n" if lines else "[]\n", encoding="utf-8")
    put_between(args.page, "ladder", f"![{ALT}]({args.page.stem}.png)\n\n{text}")


def verify(args: argparse.Namespace) -> None:
    """Train some of the stored runs again, of each kind of strategy in turn, and compare them.

    With --tenths, runs are left early, and the curves until then are compared: bit for bit, over hundreds of steps.
    """

    def again(stored: LadderRun) -> LadderRun:
        made = do(key(stored), args.steps, args.tenths)
        return made if not isinstance(made, str) else sys.exit(f"{key(stored)} cannot be trained any more: {made}")

    one_thread()
    runs: list[Any] = [
        run for run in read(args.runs, args.steps).values() if run["rung"] in args.rungs and run["arm"] in args.arms
    ]
    if args.tenths:
        whole = {"held_out", "alone", "bytes_sent"}
        runs = [
            {name: value for name, value in run.items() if name not in whole} | {"curve": run["curve"][: args.tenths]}
            for run in runs
            if len(run["curve"]) >= POINTS
        ]
    kept.verify_runs(
        args.page,
        "ladder",
        runs,
        args.verify,
        again,
        name=lambda run: f"{run['rung']}, {run['arm']}, learning rate {run['learning_rate']:g}, seed {run['seed']}",
        kind=lambda run: run["resolved"].partition("(")[0],
        seconds=lambda run: run["cpu_seconds"],
        extent=f"{10 * args.tenths} % of the steps of " if args.tenths else "",
    )


def main(args: argparse.Namespace) -> None:
    if args.quick:  # the numbers mean nothing
        args.rungs, args.arms, args.seeds, args.steps = (
            ["digits-conv"],
            ["lock step", "silence", "4 bits"],
            2,
            QUICK_STEPS,
        )
        args.runs, args.page = QUICK / args.runs.name, scratch(PAGE)
    if args.predict:
        predict(args)
        return
    around(args.page, "ladder")  # a missing place for the text is found before the work, not after it
    if args.verify:
        verify(args)
        return
    if not args.report:
        train_all(args)
    report(args)


def arm_name(text: str) -> str:
    """A name of ARMS, which are too many to list in an error."""
    if text not in ARMS:
        near = get_close_matches(text, ARMS, n=3, cutoff=0) or list(ARMS)[:3]
        raise argparse.ArgumentTypeError(f"no arm is named {text!r}. Write one of benchmarks/ladder_arms.py: {near}")
    return text


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rungs", nargs="+", choices=rungs(), default=list(rungs()), metavar="NAME")
    own = [name for name, arm in ARMS.items() if not arm.rate_of]  # longer trainings of an arm on request only
    parser.add_argument("--arms", nargs="+", type=arm_name, default=own, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, help="reported seeds, from 0 on")
    parser.add_argument("--steps", type=int, help="of every training; default: the rung's")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="trainings at once")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no training begins")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="FILE", help="one line per training")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="with the markers around the text")
    parser.add_argument("--predict", choices=rungs(), metavar="RUNG", help="write its predicted rates and losses")
    parser.add_argument("--report", action="store_true", help="train nothing, write the page")
    parser.add_argument("--verify", type=int, metavar="N", help="train N stored runs again and compare their losses")
    parser.add_argument("--tenths", type=int, default=0, metavar="T", help="with --verify: of the steps; 0: all")
    parser.add_argument("--quick", action="store_true", help="a few steps of three arms, in files of their own")
    return parser


if __name__ == "__main__":
    main(options().parse_args())
