"""Partitions: who trains on while an emulated network is cut in two, and how soon the others are back after it heals.

Four workers on hosts of their own, the coordinator on the first. 3|1 cuts the last worker off; 2|2 the last two from
the first two, which are as many as the run needs. Who is put out ends, and is started again by --max-restarts.

    python benchmarks/partitions.py [--network 1gbit,1ms] [--cuts "3|1" "2|2"] [--cut-seconds 20] [--json FILE]
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import DrivenRun, WorkerProcess, committed, rate, read, run  # after the line above
from benchmarks.provenance import provenance
from benchmarks.report import markdown

WORKERS, LEAST = 4, 2
CUTS: dict[str, list[tuple[int, ...]]] = {
    "3|1": [(3,)],
    "2|2": [(0, 2), (0, 3), (1, 2), (1, 3)],
    "1|3": [(0,)],
}  # one host from all, or two of them
OTHERS = {"3|1": {3}, "2|2": {2, 3}, "1|3": {1, 2, 3}}  # on the side without the coordinator
BEGINS = 10.0  # seconds after training began
AFTERWARDS = 45.0  # seconds in which the others may come back
SETTLED = 7.0  # seconds after the cut by which views are settled: 5 s of silence, and some
MOMENT = re.compile(r"cut\(.*\) (begins|ends) ")


@dataclass(kw_only=True)
class Partition:
    """One cut, as it was found."""

    cut: str
    begin: float = 0.0
    heal: float = 0.0
    rate_before: float = 0.0
    gap: float | None = None  # the longest between two steps, at the coordinator's side
    steps_inside: dict[int, int] = field(default_factory=dict)  # after views had settled, by place
    sizes: list[int] = field(default_factory=list)  # how many workers those steps were made with
    back: dict[int, float] = field(default_factory=dict)  # seconds from heal until a step, by place that was cut off
    same_process: dict[int, bool] = field(default_factory=dict)
    hashes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""


def moments(running: DrivenRun) -> tuple[float, float]:
    """When the run said that its cut began and ended."""
    told = {found[1]: moment for moment, line in running.said if (found := MOMENT.search(line))}
    return told.get("begins", 0.0), told.get("ends", 0.0)


def all_back(running: DrivenRun, heal: float) -> bool:
    """Whether every worker has made a step since, or a process in its place."""
    return all(
        any(each.steps[-1].moment > heal for each in read(running.folder) if each.place == place and each.steps)
        for place in range(WORKERS)
    )


def judge(found: Partition, processes: Sequence[WorkerProcess]) -> None:
    steps = list(committed(processes).values())
    found.rate_before = rate(steps, found.begin - BEGINS / 2, found.begin)
    stayed = [each for each in processes if each.place not in OTHERS[found.cut]]
    gaps = [each.longest_gap(found.begin - 1, found.heal) for each in stayed]
    found.gap = max((gap for gap in gaps if gap is not None), default=None)
    for place in range(WORKERS):
        mine = [step for each in processes if each.place == place for step in each.steps]
        inside = [step for step in mine if found.begin + SETTLED < step.moment < found.heal]
        found.steps_inside[place] = len(inside)
        found.sizes = sorted({*found.sizes, *(step.size for step in inside)})
    for place in OTHERS[found.cut]:
        back = [
            (step.moment - found.heal, each.steps[0].moment < found.begin)
            for each in processes
            if each.place == place
            for step in each.steps
            if step.moment > found.heal
        ]
        if back:
            found.back[place], found.same_process[place] = min(back)
    found.hashes = [each.end["hash"] for each in processes if each.end is not None]


def measure(cut: str, args: argparse.Namespace) -> Partition:
    found = Partition(cut=cut)
    faults = [
        f"cut({', '.join(map(str, each))}, at={BEGINS:g}, for_seconds={args.cut_seconds:g})" for each in CUTS[cut]
    ]
    options = [word for each in faults for word in ("--fault", each)]
    options += ["--network", args.network, "--recipe", args.recipe, "--max-restarts", "1000"]
    with run(f"{LEAST}:{WORKERS}", options, ["--size", args.size], args.keep and args.keep / cut) as running:
        try:
            running.wait_for(WORKERS)
            deadline = time.monotonic() + BEGINS + args.cut_seconds + AFTERWARDS
            while not moments(running)[1] and time.monotonic() < deadline:
                running.sleep(0.5)
            found.begin, found.heal = moments(running)
            while time.monotonic() < deadline and not all_back(running, found.heal):
                running.sleep(0.5)
            running.sleep(5.0)
            code = running.stop()
            found.error = f"ended with {code}" if code else ""
        except SystemExit as problem:  # what broke is a result
            found.error = str(problem)
        found.begin, found.heal = moments(running)
        judge(found, read(running.folder))
        found.notes = [
            f"{moment - found.begin:+.1f} s: {line}" for moment, line in running.said if "steps/s" not in line
        ]
    return found


def row(found: Partition) -> dict[str, str]:
    back = [
        f"{place}: {seconds:.1f} s" + " (same process)" * found.same_process[place]
        for place, seconds in found.back.items()
    ]
    return {
        "": found.cut,
        "steps while cut, by worker": ", ".join(map(str, found.steps_inside.values())),
        "by how many": ", ".join(map(str, found.sizes)),
        "longest gap": "" if found.gap is None else f"{found.gap:.1f} s",
        "back after it healed": ", ".join(back) or "nobody",
        "hashes alike": "yes" if len(found.hashes) == WORKERS and len(set(found.hashes)) == 1 else "no",
    }


def main(args: argparse.Namespace) -> None:
    all_found = []
    for cut in args.cuts:
        all_found.append(found := measure(cut, args))
        print("\n".join([f"{cut}:", *found.notes, found.error]), file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in all_found], indent=1))
    print(
        f"{WORKERS} workers on a network of {args.network} learn bytes ({args.size}, {args.recipe}) by gossamer run "
        f"--workers {LEAST}:{WORKERS} --max-restarts 1000; the coordinator is on the first worker's host. The network "
        f"is cut for {args.cut_seconds:g} s. Steps while cut count from {SETTLED:g} s after it began.\n\n"
        f"{markdown([row(each) for each in all_found])}\n\n{provenance()}"
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--cuts", nargs="+", choices=CUTS, default=["3|1", "2|2"])
    options.add_argument("--network", default="1gbit,1ms", metavar="SPEC")
    options.add_argument("--cut-seconds", type=float, default=20.0)
    options.add_argument("--recipe", default="TopK(density=0.01)")
    options.add_argument("--size", default="tiny", help="of the model: tiny, small, base")
    options.add_argument("--json", type=Path, metavar="FILE", help="all that was found, too")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs there")
    main(options.parse_args())
