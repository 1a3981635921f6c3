"""Time to a loss: hours on a slow network until a recipe reaches the final loss of lock step.

The time is steps times seconds per step, and both are measured apart. Steps: benchmarks/ladder.py trains every arm at
its own best learning rate and follows the held-out loss; this program reads its runs. Seconds per step: real workers on
emulated hosts train examples/bytelm.py, and plain DDP without a network limit takes turns with them. Writes
docs/benchmarks/time-to-loss.md.

    python benchmarks/ladder.py --rungs bytelm-237k-b16         # first: the losses
    python benchmarks/time_to_loss.py --rung bytelm-237k-b16 [--networks SPEC ...] [--arms NAME ...] [--rounds 2]
    python benchmarks/time_to_loss.py --quick                   # a minute, into runs/quick, to see that it runs
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.ladder import RUNS, read  # found only after the line above
from benchmarks.ladder_arms import ARMS
from benchmarks.ladder_report import LOCK_STEP, SILENCE, Results, results
from benchmarks.ladder_tasks import ADAMW, Rung, rungs, size
from benchmarks.network import today
from benchmarks.pace import ddp_seconds, seconds
from benchmarks.provenance import ROOT, provenance, scratch
from benchmarks.report import markdown, write_page
from examples.bytelm import SIZES, ByteLM

from gossamer.plan.retained_benefit import text

NO_LIMIT, DDP, HOOK = "plain DDP, no limit", "plain DDP", "DDP + PowerSGD hook"
STEPS_AS = {NO_LIMIT: LOCK_STEP, DDP: LOCK_STEP, HOOK: "rank 2"}  # arm with the same number of steps
PEERS = {DDP: "DDP", HOOK: "DDP + PowerSGD hook, one bucket"}  # as benchmarks/network.py calls them
TIMED = [name for name, arm in ARMS.items() if name != SILENCE and not arm.workers and arm.share == 1]
BYTE_RUNGS = [name for name, rung in rungs().items() if name.startswith("bytelm-") and rung.optimizer == ADAMW]

Curve = Sequence[tuple[int, float, float | None]]  # (steps made, bytes sent, held-out loss)


def steps_to(loss: float, curve: Curve) -> float | None:
    """Steps until the curve first reaches the loss, linear between its points; None if it never does."""
    before: tuple[int, float] | None = None
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


def steps(found: Results, arm: str) -> list[float | None]:
    """Steps to the final loss of lock step with the same seed, for every seed of the arm."""
    dense, mine = found.losses(LOCK_STEP), found.runs.get(arm, {})
    return [steps_to(dense[seed], run["curve"]) for seed, run in sorted(mine.items())]


def measure(network: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per step, by row and round."""
    model = ["--size", args.size, "--batch", str(rungs()[args.rung].task.batch)]
    found: dict[str, list[float]] = {name: [] for name in (NO_LIMIT, *PEERS, *args.arms)}
    for number in range(args.rounds):
        for name, taken in found.items():
            if name == NO_LIMIT:
                taken.append(ddp_seconds(args, model))
            elif name in PEERS:
                result = today(network, PEERS[name], args, model)
                if result.error:
                    print(f"{network}: {name}: {result.error}", file=sys.stderr, flush=True)
                    continue
                taken.append(result.median)
            else:
                taken.append(seconds(ARMS[name].recipe, network, args, model))
            shown = f"{network}: round {number + 1} of {args.rounds}: {name}: {1000 * taken[-1]:.0f} ms"
            print(shown, file=sys.stderr, flush=True)
    return found


def table(taken: dict[str, list[float]], found: Results) -> str:
    """One row per arm; time: steps times seconds per step, over those of plain DDP without a limit."""
    plain = found.rung.task.steps * statistics.median(taken[NO_LIMIT])
    return markdown([_row(name, rounds, plain, found) for name, rounds in taken.items()], texts=2)


def _row(name: str, rounds: Sequence[float], plain: float, found: Results) -> dict[str, str]:
    arm = STEPS_AS.get(name, name)
    needed = steps(found, arm)
    known = [each for each in needed if each is not None]
    row = {"arm": name, "recipe": "" if name in STEPS_AS else f"`{ARMS[name].recipe}`", "step": "failed"}
    if rounds:
        step = statistics.median(rounds)
        row["step"] = f"{1000 * step:.0f} ms ({1000 * min(rounds):.0f} to {1000 * max(rounds):.0f})"
    row["steps"] = f"{statistics.fmean(known):.0f}" if known else "not trained"
    if len(known) < len(needed):
        row["steps"] = f"not within {found.rung.task.steps} ({len(needed) - len(known)} of {len(needed)} seeds)"
    elif known and rounds:
        row["time"] = f"**{statistics.fmean(known) * step / plain:.2f}**"
    row.setdefault("time", "")
    row["retained"] = "" if arm == LOCK_STEP or not needed else text(found.retained(arm))
    row["learning rate"] = f"{found.rates[arm]:g}" if needed else ""
    row["seeds"] = str(len(needed))
    return row


def timed_model(name: str, rung: Rung) -> str:
    """Which model the step times are of, and whether it is the model of the losses."""
    width, blocks, heads = SIZES[name]
    count = size(lambda: ByteLM(width, blocks, heads))
    model = f"Step times: examples/bytelm.py --size {name} ({count:,} parameters) with AdamW, batch {rung.task.batch}."
    if count == rung.parameters:
        return f"{model} That is the model of the losses."
    return f"{model} The losses are of a model with {rung.parameters:,} parameters, so the times mix two models."


def quick(args: argparse.Namespace) -> None:
    """One arm, a few steps of one round, in a file of its own."""
    args.rung, args.arms, args.networks = "bytelm-57k-b16", ["DiLoCo 20"], ["100mbit,5ms"]
    args.steps, args.rounds, args.output = 20, 1, scratch(args.output)


def main(args: argparse.Namespace) -> None:
    if args.quick:
        quick(args)
    found = losses(args.runs, args.rung, args.seeds)
    parts = [
        "# Time to a loss",
        f"Losses: {args.rung} of [retained benefit](ladder.md); {found.rung.about}. Every arm has its own best "
        f"learning rate. {timed_model(args.size, found.rung)}",
        f"{args.workers} workers, each an emulated host on the network of the heading. `step` is the median over "
        "rounds (least to most). `steps` is the mean over seeds of the steps until the held-out loss first reaches the "
        "final loss of lock step with the same seed. `time` is steps times step, over those of plain DDP without a "
        "network limit: 1.00 would be a network that costs nothing. The PowerSGD hook has rank 4; its steps, and its "
        f"retained benefit, are those of `{ARMS[STEPS_AS[HOOK]].recipe}`, an approximation.",
        provenance(),
        *(f"## {network}\n\n{table(measure(network, args), found)}" for network in args.networks),
    ]
    write_page(args.output, parts)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time to a loss on slow networks.")
    parser.add_argument("--rung", choices=BYTE_RUNGS, default="bytelm-237k-b16", metavar="NAME", help="of the losses")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model that is timed")
    parser.add_argument("--networks", nargs="+", default=["100mbit,20ms", "10mbit,100ms"], metavar="SPEC")
    parser.add_argument("--arms", nargs="+", choices=TIMED, default=["DiLoCo 20, 1 bit"], metavar="NAME")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="FILE", help="of benchmarks/ladder.py")
    parser.add_argument("--seeds", type=int, default=3, help="reported seeds, from 0 on")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--patience-seconds", type=float, default=300, help="for a peer's run")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "time-to-loss.md")
    parser.add_argument("--quick", action="store_true", help="a few steps, in a file of its own")
    return parser


if __name__ == "__main__":
    main(options().parse_args())
