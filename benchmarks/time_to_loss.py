"""Time to a loss: hours on a slow network until a recipe reaches the final loss of lock step.

The time is steps times seconds per step, and both are measured apart. Steps: benchmarks/ladder.py trains every arm at
its own best learning rate, also for more steps than lock step; this program reads its runs. Seconds per step: real
workers on emulated hosts train examples/bytelm.py, and DistributedDataParallel takes turns with them. Every measurement
is one line of --times; a page consists of all of them. On a grid of further networks the seconds are estimates, as
`gossamer explain` makes them. Writes docs/benchmarks/time-to-loss.md.

    python benchmarks/ladder.py --rungs bytelm-57k-b2           # first: the losses
    python benchmarks/time_to_loss.py --rung bytelm-57k-b2 [--networks SPEC ...] [--arms NAME ...] [--rounds 2]
    python benchmarks/time_to_loss.py --report                  # measure nothing, write the page
    python benchmarks/time_to_loss.py --quick                   # a minute, into runs/quick, to see that it runs
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from math import exp, log
from pathlib import Path
from typing import TypedDict

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.ladder import RUNS, read  # found only after the line above
from benchmarks.ladder_arms import ARMS, LOCK_STEP, SILENCE
from benchmarks.ladder_plan import steps_of
from benchmarks.ladder_report import Results, results
from benchmarks.ladder_tasks import ADAMW, rungs, size
from benchmarks.network import UNLIMITED, today
from benchmarks.pace import seconds
from benchmarks.provenance import QUICK, ROOT, commit, provenance, scratch
from benchmarks.report import markdown, write_page
from examples.bytelm import SIZES, ByteLM

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.recipes.retained_benefit import text
from gossamer.comm.network import read_network
from gossamer.plan.advise.prices import StepPricer
from gossamer.plan.profile.profile_runs import profile_script

TIMES = ROOT / "benchmarks" / "results" / "step_times.jsonl"
DDP, FP16, HOOK = "DDP", "DDP + fp16 hook", "DDP + PowerSGD hook"
STEPS_AS = {DDP: LOCK_STEP, FP16: LOCK_STEP, HOOK: "rank 2"}  # arm with the same number of steps
PEERS = {DDP: "DDP", FP16: "DDP + fp16 hook", HOOK: "DDP + PowerSGD hook, one bucket"}  # names of benchmarks/network.py
TIMED = [
    name for name, arm in ARMS.items() if name != SILENCE and not arm.workers and arm.share == 1 and not arm.rate_of
]
BEST = [
    "4 bits",
    "every 4 steps, 1 bit, momentum aligned",
    "4 fragments, each every 4 steps, 1 bit, momentum aligned, outer rate 1",
    "4 fragments, each every 16 steps, 1 bit, momentum aligned, outer rate 1.5",
]
RATES, LATENCIES = ("1mbit", "10mbit", "100mbit", "1gbit"), ("1ms", "10ms", "100ms")
GRID = [f"{rate},{latency}" for rate in RATES for latency in LATENCIES]
BYTE_RUNGS = [name for name, rung in rungs().items() if name.startswith("bytelm-") and rung.optimizer == ADAMW]

Curve = Sequence[tuple[float, float, float | None]]  # (steps made, bytes sent, held-out loss)


class StepTime(TypedDict):
    """One measurement or estimate. row: a peer or an arm; recipe: "" for a peer; seconds: of a step."""

    network: str
    row: str
    recipe: str
    size: str
    batch: int
    workers: int
    steps: int
    seconds: float
    estimated: bool
    commit: str


# -- steps -----------------------------------------------------------------------------------------------------------


def steps_to(loss: float, curve: Curve) -> float | None:
    """Steps until the curve first reaches the loss, linear between its points; None if it never does."""
    before: tuple[float, float] | None = None
    for step, _, here in curve:
        if here is None:
            return None
        if here <= loss:
            if before is None or before[1] == here:
                return float(step)
            first, above = before
            return first + (step - first) * (above - loss) / (above - here)
        before = step, here
    return None


def losses(path: Path, rung: str, seeds: int) -> Results:
    """The reported runs of a rung, every arm at its best tuned learning rate."""
    found = results(read(path, None), [rung], seeds)
    if not found:
        sys.exit(
            f"{path} has no tuned runs of {LOCK_STEP} and {SILENCE} on {rung}, so there is no loss to reach. Train "
            f"them: python benchmarks/ladder.py --rungs {rung}"
        )
    return found[0]


def trainings(found: Results, arm: str, seed: int) -> list[tuple[int, float]]:
    """(steps, final loss) of the complete trainings of an arm with this seed, by length."""
    lengths = [arm, *(name for name in found.runs if ARMS[name].rate_of == arm)]
    mine = [(steps_of(ARMS[name], found.rung), found.losses(name)) for name in lengths if seed in found.runs[name]]
    return sorted((length, by_seed[seed]) for length, by_seed in mine)


def steps(found: Results, arm: str) -> list[float | None]:
    """Steps to the final loss of lock step with the same seed, for every seed of the arm.

    A training as long as that of lock step reaches it on its curve. If it does not, longer trainings have a learning
    rate schedule of their own; the length between two of them is interpolated over the logarithm of the steps.
    """
    dense = found.losses(LOCK_STEP)
    needed: list[float | None] = []
    for seed, run in sorted(found.runs.get(arm, {}).items()):
        on_curve = steps_to(dense[seed], run["curve"])
        ends = [(log(length), 0.0, loss) for length, loss in trainings(found, arm, seed)]
        by_length = steps_to(dense[seed], ends) if on_curve is None else None
        needed.append(on_curve if by_length is None else exp(by_length))
    return needed


# -- seconds ---------------------------------------------------------------------------------------------------------


def measure(network: str, args: argparse.Namespace) -> None:
    """Append the seconds of a step of every row, a round of all rows after the other."""
    batch = rungs()[args.rung].task.batch
    model = ["--size", args.size, "--batch", str(batch)]
    for number in range(args.rounds):
        for row in [*PEERS, *args.arms] if network != UNLIMITED else [DDP]:
            if row in PEERS:
                result = today(network, PEERS[row], args, model)
                if result.error:
                    print(f"{network}: {row}: {result.error}", file=sys.stderr, flush=True)
                    continue
                taken = result.median
            else:
                taken = seconds(ARMS[row].recipe, network, args, model)
            store(network, row, taken, args)
            shown = f"{network}: round {number + 1} of {args.rounds}: {row}: {1000 * taken:.0f} ms"
            print(shown, file=sys.stderr, flush=True)


def estimate(args: argparse.Namespace) -> None:
    """Append the estimated seconds of a step of every arm, on the grid and on the measured networks.

    The model's step is profiled with as many copies as workers, because the measured workers share the machine too.
    """
    batch = rungs()[args.rung].task.batch
    script = ["--size", args.size, "--batch", str(batch), "--steps", "1000"]
    example = ROOT / "examples" / "bytelm.py"
    pricer = StepPricer(profile_script(example, script, resolve(None), args.workers, args.workers), args.workers)
    for network in dict.fromkeys([*args.networks, *GRID]):
        for row in [LOCK_STEP, *args.arms]:
            there = read_network(network, args.workers)
            found = pricer.step_time(resolve(ARMS[row].recipe, args.workers), there)
            store(network, row, found.step_seconds, args, estimated=True)
            shown = f"{network}: {row}: {1000 * found.step_seconds:.0f} ms, estimated"
            print(shown, file=sys.stderr, flush=True)


def store(network: str, row: str, taken: float, args: argparse.Namespace, estimated: bool = False) -> None:
    line = StepTime(
        network=network,
        row=row,
        recipe="" if row in PEERS else ARMS[row].recipe,
        size=args.size,
        batch=rungs()[args.rung].task.batch,
        workers=args.workers,
        steps=args.steps,
        seconds=taken,
        estimated=estimated,
        commit=commit(),
    )
    with args.times.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_times(args: argparse.Namespace) -> list[StepTime]:
    """The measurements of this model, batch and number of workers."""
    lines = args.times.read_text(encoding="utf-8").splitlines() if args.times.exists() else []
    wanted = args.size, rungs()[args.rung].task.batch, args.workers
    found: list[StepTime] = [json.loads(line) for line in lines]
    return [each for each in found if (each["size"], each["batch"], each["workers"]) == wanted]


def by_row(times: Iterable[StepTime], network: str, estimated: bool = False) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in times:
        if each["network"] == network and each["estimated"] == estimated:
            found.setdefault(each["row"], []).append(each["seconds"])
    return found


# -- page ------------------------------------------------------------------------------------------------------------


def table(times: Sequence[StepTime], network: str, found: Results) -> str:
    """One row per arm; `sooner` compares with DDP on the same network."""
    free = by_row(times, UNLIMITED).get(DDP, [])
    taken = by_row(times, network)
    if DDP not in taken:
        sys.exit(f"No time of {DDP} on {network} is stored. Measure it: python benchmarks/time_to_loss.py")
    baseline = found.rung.task.steps * statistics.median(taken[DDP])
    rows = [_row(name, each, baseline, found) for name, each in taken.items()]
    if free:
        rows = [{**_row(DDP, free, baseline, found), "arm": f"{DDP}, no network limit"}, *rows]
    return markdown(rows, texts=2)


def grid(times: Sequence[StepTime], found: Results) -> str:
    """For each rate and round trip, the arm that reaches the loss first by its estimate."""
    needed = {name: _mean_steps(found, name) for name in {each["row"] for each in times if each["estimated"]}}
    rows = []
    for rate in RATES:
        row = {"": rate}
        for latency in LATENCIES:
            taken = by_row(times, f"{rate},{latency}", estimated=True)
            ends = {
                name: steps * statistics.median(taken[name])
                for name, steps in needed.items()
                if name in taken and steps is not None
            }
            if LOCK_STEP not in ends:
                row[latency] = "not estimated"
                continue
            first = min(ends, key=lambda name: ends[name])
            row[latency] = f"{first}: {ends[LOCK_STEP] / ends[first]:.1f} times"
        rows.append(row)
    return markdown(rows)


def _mean_steps(found: Results, arm: str) -> float | None:
    """None unless every seed reaches the loss."""
    needed = steps(found, arm)
    known = [each for each in needed if each is not None]
    return statistics.fmean(known) if known and len(known) == len(needed) else None


def accuracy(times: Sequence[StepTime], networks: Sequence[str]) -> str:
    """Estimates beside measurements, on networks that have both. DDP is estimated as lock step."""
    rows = []
    for network in networks:
        measured, guessed = by_row(times, network), by_row(times, network, estimated=True)
        for name in guessed:
            other = DDP if name == LOCK_STEP else name
            if other in measured:
                here, there = statistics.median(guessed[name]), statistics.median(measured[other])
                line = {"network": network, "arm": other, "estimated": f"{1000 * here:.0f} ms"}
                rows.append(line | {"measured": f"{1000 * there:.0f} ms", "ratio": f"{here / there:.2f}"})
    return markdown(rows, texts=2)


def _row(name: str, rounds: Sequence[float], baseline: float, found: Results) -> dict[str, str]:
    arm = STEPS_AS.get(name, name)
    needed = steps(found, arm)
    known = [each for each in needed if each is not None]
    step = statistics.median(rounds)
    spread = f" ({1000 * min(rounds):.0f} to {1000 * max(rounds):.0f})" if len(rounds) > 1 else ""
    row = {"arm": name, "recipe": "" if name in STEPS_AS else f"`{ARMS[name].recipe}`"}
    row["step"] = f"{1000 * step:.0f} ms{spread}"
    row["steps"] = f"{statistics.fmean(known):,.0f}" if known else "not trained"
    row["time to the loss"], row["sooner than DDP"] = "", ""
    if len(known) < len(needed):
        row["steps"] = f"reached by {len(known)} of {len(needed)} seeds"
    elif known:
        whole = statistics.fmean(known) * step
        row["time to the loss"], row["sooner than DDP"] = _duration(whole), f"**{baseline / whole:.1f} times**"
    row["retained after as many steps"] = "" if arm == LOCK_STEP or not needed else text(found.retained(arm))
    row["seeds"] = str(len(needed))
    return row


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def timed_model(args: argparse.Namespace, found: Results) -> str:
    """Which model the step times are of, and whether it is the model of the losses."""
    width, blocks, heads = SIZES[args.size]
    count = size(lambda: ByteLM(width, blocks, heads))
    batch = found.rung.task.batch
    model = f"Step times: examples/bytelm.py --size {args.size} ({count:,} parameters) with AdamW, batch {batch}."
    if count == found.rung.parameters:
        return f"{model} That is the model of the losses."
    return f"{model} The losses are of a model with {found.rung.parameters:,} parameters, so the times mix two models."


def quick(args: argparse.Namespace) -> None:
    """One arm, a few steps of one round, in files of its own."""
    args.output = scratch(args.output)  # makes the folder
    args.times = QUICK / args.times.name
    args.times.unlink(missing_ok=True)
    args.arms, args.networks, args.steps, args.rounds = BEST[:1], ["100mbit,5ms"], 20, 1


def main(args: argparse.Namespace) -> None:
    if args.quick:
        quick(args)
    found = losses(args.runs, args.rung, args.seeds)
    for network in [UNLIMITED, *args.networks] if not args.report else []:
        measure(network, args)
    if not args.report and not args.quick:
        estimate(args)
    times = read_times(args)
    measured = dict.fromkeys(each["network"] for each in times if not each["estimated"])
    networks = [name for name in measured if name != UNLIMITED]
    timed_at = dict.fromkeys(f"commit `{each['commit']}`" for each in times)
    parts = [
        "# Time to a loss",
        "How long until a recipe reaches the final loss of DDP on a slow network?",
        f"Losses: {args.rung} of [retained benefit](ladder.md); {found.rung.about}. Every arm has its own best "
        f"learning rate. {timed_model(args, found)}",
        f"{args.workers} workers, each an emulated host on the network of the heading. `step` is the median over "
        "rounds (least to most). `steps` is the mean over seeds of the steps to the final loss of lock step with the "
        "same seed: on the curve of a training of equal length, or else between complete trainings of 1.25 to 4 times "
        "as many steps and samples. Time is step times steps. DDP is torch's DistributedDataParallel on Gloo, whose "
        f"steps are those of lock step. The PowerSGD hook has rank 4; its steps are those of "
        f"`{ARMS[STEPS_AS[HOOK]].recipe}`, an approximation. torch refuses its bfloat16 hook on CPUs.",
        provenance(["python", "benchmarks/time_to_loss.py", "--rung", args.rung, "--size", args.size]),
        f"Step times are from {', '.join(timed_at)}.",
        *(f"## {network}\n\n{table(times, network, found)}" for network in networks),
    ]
    if any(each["estimated"] for each in times):
        parts += [
            "## Other networks, by estimate",
            "The arm that reaches the loss first, and how many times sooner than lock step (`Dense()`), by link rate "
            "and round trip. Steps are as above, seconds per step are estimates of `gossamer explain`. An arm is left "
            "out unless all its seeds reach the loss.",
            grid(times, found),
            "Estimates and measurements. DDP is compared with the estimate of `Dense()`, whose collectives are faster "
            "than Gloo's:",
            accuracy(times, networks),
        ]
    write_page(args.output, parts)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time to a loss on slow networks.")
    parser.add_argument("--rung", choices=BYTE_RUNGS, default="bytelm-57k-b2", metavar="NAME", help="of the losses")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model that is timed")
    networks = ["10mbit,100ms", "100mbit,20ms", "1gbit,1ms"]
    parser.add_argument("--networks", nargs="+", default=networks, metavar="SPEC")
    parser.add_argument("--arms", nargs="+", choices=TIMED, default=BEST, metavar="NAME")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="FILE", help="of benchmarks/ladder.py")
    parser.add_argument("--times", type=Path, default=TIMES, metavar="FILE", help="one line per measurement")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--seeds", type=int, default=3, help="reported seeds, from 0 on")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--patience-seconds", type=float, default=300, help="for a peer's run")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "time-to-loss.md")
    parser.add_argument("--quick", action="store_true", help="a few steps, in a file of its own")
    return parser


if __name__ == "__main__":
    main(options().parse_args())
