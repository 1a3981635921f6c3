"""Elastic membership in virtual time: thousands of random runs with faults, and the invariants that held in each.

    python -m benchmarks.membership_seeds --seeds 10000
    python -m benchmarks.membership_seeds --first 457 --seeds 1 --show

Ends with exit code 1 where an invariant did not hold, naming the seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from benchmarks.membership_invariants import INVARIANTS, TWINS, caught
from benchmarks.membership_runs import ElasticRun
from benchmarks.provenance import provenance


def broken_invariants(seed: int, counts: Counter[str]) -> list[str]:
    """The invariants that do not hold in one run, with what was found."""
    run = ElasticRun(seed)
    try:
        run.go()
    except AssertionError as error:
        return [f"bounded_progress: {error!s:.300}"]
    found = []
    for name, check in INVARIANTS.items():
        try:
            check(run)
        except AssertionError as error:
            found.append(f"{name}: {error!s:.300}")
    assert run.trace is not None
    assert run.coordinator is not None
    views = 0 if run.coordinator.rule.view is None else run.coordinator.rule.view.number
    counts.update(
        {
            "views": views,
            "messages": run.trace.messages,
            "starts of workers": len(run.processes),
            "transactions completed by somebody": len({each for one in run.processes for each in one.entries}),
            "runs that were completed": any(each.is_done for each in run.processes),
            "runs whose last worker with the parameters died": "nobody" in run.coordinator.rule.ended,
        }
    )
    return found


def show(seed: int) -> None:
    run = ElasticRun(seed)
    try:
        run.go(keep=True)
    finally:
        print(f"{run.count} machines, {run.initial} at first, {run.least} to {run.most}; {run.network().faults}")
        print("\n".join(run.notes))
        for each in run.processes:
            print(each.number, each.scripts.out or ("done" if each.is_done else "killed"), each.entries, each.agreed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--twin-seeds", type=int, default=50, help="in which each wrong rule must be found out")
    parser.add_argument("--show", action="store_true", help="show the first seed's run instead")
    options = parser.parse_args()
    if options.show:
        show(options.first)
        return 0
    print(provenance())
    began, counts, failed = time.perf_counter(), Counter[str](), Counter[str]()
    for seed in range(options.first, options.first + options.seeds):
        for each in broken_invariants(seed, counts):
            failed[each.partition(":")[0]] += 1
            print(f"seed {seed}: {each}")
    seconds = time.perf_counter() - began
    print(f"\n{options.seeds} seeds from {options.first} on, in {seconds:.0f} s\n")
    print("| invariant | runs in which it did not hold |\n|---|---|")
    for name in (*INVARIANTS, "bounded_progress"):
        print(f"| {name} | {failed[name]} |")
    print("\n| in all runs together | |\n|---|---|")
    for name, count in counts.items():
        print(f"| {name} | {count} |")
    print("\n| wrong rule | first seed that finds it out | by |\n|---|---|---|")
    missed = False
    for twin in TWINS:
        found = next(((seed, by) for seed in range(options.twin_seeds) if (by := caught(twin, seed))), None)
        missed |= found is None
        print(f"| {twin} | {'-' if found is None else found[0]} | {'nothing' if found is None else found[1]} |")
    return int(bool(failed) or missed)


if __name__ == "__main__":
    sys.exit(main())
