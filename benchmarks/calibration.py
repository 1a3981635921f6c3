"""Calibration: estimates short trainings on networks drawn at random, runs them, and keeps both for the intervals.

Each recipe and task is profiled once, in as many copies as there are workers; its step is estimated for each network,
then measured there by `gossamer run --network`. Writes src/gossamer/plan/estimate/calibration.json, from which
`gossamer explain` takes its intervals, and docs/benchmarks/calibration.md. Needs root for the emulated networks, and a
machine that has nothing else to do: what else runs is told while it profiles.

    python benchmarks/calibration.py [--seconds-budget 1500] [--runs runs/calibration.json]
    python benchmarks/calibration.py --only-report       # from runs that were made, or the shipped ones
    python benchmarks/calibration.py --quick             # three runs, into runs/quick, to see that it runs

What was run is kept in --runs; the same command goes on where it was stopped, or where its time was over.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import calibration_report  # found only after the line above
from benchmarks.calibration_plan import WORKERS, Case, DrawnNetwork, Subject, cases, spread_out
from benchmarks.provenance import QUICK, ROOT, commit, provenance

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.kernels.library import library
from gossamer.comm.environment.host_info import machine
from gossamer.comm.network import Network, read_network
from gossamer.errors import GossamerError
from gossamer.plan.estimate.calibration import (
    COVERAGE,
    FILE,
    Calibration,
    PastForecast,
    fewest_pairs,
    network_class,
    recipe_family,
)
from gossamer.plan.estimate.step_time import StepTimeEstimate, estimate_step_time
from gossamer.plan.estimate.workload_profile import WorkloadProfile
from gossamer.plan.profile.profile_runs import profile_script

WORKER = Path(__file__).with_name("calibration_worker.py")
SHIPPED = ROOT / "src" / "gossamer" / "plan" / "estimate" / FILE
PAGE = ROOT / "docs" / "benchmarks" / "calibration.md"
NETWORKS, EACH, SEED = 22, 3, 1
PATIENCE_SECONDS = 120  # of a run
ENDLESS = 10**9  # steps; the profiler ends them


class Runs:
    """What was profiled and run so far, in a file that is written after each."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.told: dict[str, Any] = {"profiles": {}, "rows": {}}
        if file.exists():
            self.told = json.loads(file.read_text(encoding="utf-8"))
        self.told.setdefault("machine", machine())
        self.told.setdefault("commit", commit())

    def use_shipped(self) -> None:
        """Take the runs of the file that `gossamer explain` reads."""
        told = json.loads(SHIPPED.read_text(encoding="utf-8"))
        made = {name: told["provenance"][name] for name in ("commit", "machine")}
        self.told |= {"rows": {str(place): {"pair": pair} for place, pair in enumerate(told["pairs"])}, **made}

    def refuse_other_commit(self) -> None:
        """Runs of two commits do not go together."""
        if self.told["commit"] != commit():
            sys.exit(
                f"{self.file} holds runs of commit {self.told['commit']}, and this is {commit()}. Begin another: --runs"
            )

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        before = self.file.with_suffix(".part")
        before.write_text(json.dumps(self.told, indent=1) + "\n", encoding="utf-8")
        before.replace(self.file)

    def profile(self, subject: Subject) -> WorkloadProfile:
        key = f"{subject.task} | {subject.recipe}"
        if key not in self.told["profiles"]:
            arguments = ["--task", subject.task, "--steps", str(ENDLESS)]
            found = profile_script(WORKER, arguments, resolve(subject.recipe, WORKERS), WORKERS, copies=WORKERS)
            self.told["profiles"][key] = found.to_json()
            self.save()
            if found.other_load.is_much:
                say(f"profiling {key}: {found.other_load.other:.1f} cores were busy with something else")
        return WorkloadProfile.from_json(self.told["profiles"][key])

    def estimated(self, subject: Subject, network: DrawnNetwork) -> StepTimeEstimate:
        with tempfile.TemporaryDirectory() as folder:
            there = described(network, Path(folder))
        return estimate_step_time(resolve(subject.recipe, WORKERS), self.profile(subject), there, WORKERS)

    @property
    def pairs(self) -> list[PastForecast]:
        return [PastForecast(**row["pair"]) for row in self.told["rows"].values() if "pair" in row]


def described(network: DrawnNetwork, folder: Path) -> Network:
    return read_network(written(network, folder), WORKERS)


def written(network: DrawnNetwork, folder: Path) -> str:
    """As --network takes it."""
    if not network.toml:
        return network.spec
    file = folder / "network.toml"
    file.write_text(network.toml)
    return str(file)


def run(case: Case, runs: Runs) -> dict[str, Any]:
    """One row: the pair, or why there is none."""
    told = runs.estimated(case.subject, case.network)
    assert told.interval is not None
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [sys.executable, "-m", "gossamer", "run", "--workers", str(WORKERS), "--logs", f"{folder}/logs"]
        command += ["--network", written(case.network, Path(folder)), "--recipe", case.subject.recipe]
        command += ["--json", str(record), str(WORKER), "--task", case.subject.task, "--steps", str(case.steps)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            return {"failure": f"not done after {PATIENCE_SECONDS} s"}
        if done.returncode or not record.exists():
            return {"failure": (done.stderr or done.stdout)[-500:]}
        measured = json.loads(record.read_text(encoding="utf-8"))
        network = described(case.network, Path(folder))
    pair = {
        "recipe": case.subject.recipe,
        "family": recipe_family(resolve(case.subject.recipe, WORKERS)),
        "network": case.network.name,
        "network_class": network_class(network),
        "workers": WORKERS,
        "estimated_seconds": told.step_seconds,
        "measured_seconds": measured["seconds_per_step"]["median"],
        "spread": told.interval.spread,
    }
    return {
        "pair": pair,
        "task": case.subject.task,
        "steps": case.steps,
        "emulation": measured["emulation"],
        "seconds_per_step": measured["seconds_per_step"],
        "compute_seconds_per_step": measured["compute_seconds_per_step"],
        "communication_seconds_per_step": measured["communication_seconds_per_step"],
        "estimate": {"waiting": told.waiting_seconds, "wire": told.wire_seconds, "codec": told.codec_seconds},
        "other_load": told.inputs["other_load"],
    }


def measure(runs: Runs, budget_seconds: float, networks: int) -> None:
    if library() is None:
        sys.exit("The compiled kernels are missing, and nobody trains without them: `make kernels` first.")
    began = time.monotonic()
    planned = spread_out([*cases(networks, EACH, SEED, lambda *what: runs.estimated(*what).step_seconds)])
    for number, case in enumerate(planned, start=1):
        if case.key in runs.told["rows"]:
            continue
        if time.monotonic() - began > budget_seconds:
            say(f"the budget of {budget_seconds:.0f} s is used up; the same command goes on with the rest")
            break
        row = runs.told["rows"][case.key] = run(case, runs)
        runs.save()
        pair = row.get("pair")
        said = (
            f"{pair['measured_seconds']:.4f} s, estimated {pair['estimated_seconds']:.4f}" if pair else row["failure"]
        )
        say(f"{number} of {len(planned)}: {case.key}: {said}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(runs: Runs, shipped: Path, where: Path, command: str) -> None:
    """Writes the intervals' file, the page and its picture."""
    pairs, failed = runs.pairs, [key for key, row in runs.told["rows"].items() if "failure" in row]
    if len(pairs) < 2 * fewest_pairs(COVERAGE):
        sys.exit(f"{len(pairs)} runs are too few for a report; it takes {2 * fewest_pairs(COVERAGE)}")
    picture = where.with_suffix(".png")
    text = calibration_report.page(pairs, provenance(), picture.name)
    text += f"\nThe runs were made at commit `{runs.told['commit']}`.\n"
    if failed:
        text += f"\nRuns without a record, left out: {', '.join(failed)}.\n"
    print(text)
    where.write_text(text, encoding="utf-8")
    calibration_report.plot(calibration_report.one_network_out(pairs), picture)
    about = {"commit": runs.told["commit"], "machine": runs.told["machine"], "command": command}
    write(Calibration(pairs, about), shipped)


def write(calibration: Calibration, file: Path) -> None:
    """A line for each pair."""
    told = calibration.to_json()
    lines = ",\n  ".join(json.dumps(pair) for pair in told["pairs"])
    about = json.dumps(told["provenance"], indent=2)
    file.write_text(f'{{"provenance": {about},\n "pairs": [\n  {lines}\n]}}\n', encoding="utf-8")


def main(args: argparse.Namespace) -> None:
    shipped, where, networks = SHIPPED, PAGE, NETWORKS
    if args.quick:
        QUICK.mkdir(parents=True, exist_ok=True)
        args.runs, networks, shipped, where = QUICK / "calibration.json", 1, QUICK / FILE, QUICK / PAGE.name
    runs = Runs(args.runs)
    if args.only_report and not args.runs.exists():
        runs.use_shipped()
    if not args.only_report:
        runs.refuse_other_commit()
        measure(runs, args.seconds_budget, networks)
    if not args.quick:
        report(runs, shipped, where, "python benchmarks/calibration.py")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Forecasts beside what is measured, on networks drawn at random.")
    options.add_argument("--seconds-budget", type=float, default=1500.0, help="no run begins later")
    options.add_argument("--runs", type=Path, default=ROOT / "runs" / "calibration.json", help="what was run so far")
    options.add_argument("--only-report", action="store_true", help="run nothing")
    options.add_argument("--quick", action="store_true", help="three runs, whose numbers mean nothing")
    try:
        main(options.parse_args())
    except GossamerError as problem:
        sys.exit(str(problem))
