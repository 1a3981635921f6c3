"""Runs Horovod's own tests, from a copy that is fetched and never committed, on gossamer.horovod.

    python tests/support/horovod_suite.py PATH [--workers 2 4] [--module test_torch] [--hide-muon] [--only NAME ...]

PATH is a checkout of Horovod. Prints, for each number of workers: passed, runnable (not skipped by the suite), and each
failure with its reason. A run of all tests is one `gossamer run`; after a failure the rest are run by another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from collections import Counter
from pathlib import Path

SECONDS_PER_TEST = 150


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("path", type=Path)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    options.add_argument("--module", default="test_torch")
    options.add_argument(
        "--hide-muon", action="store_true", help="leave out torch.optim.Muon, which takes matrices only"
    )
    options.add_argument("--only", nargs="+")
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        work(given.path, given.module, given.worker, given.hide_muon)
        return
    for workers in given.workers:
        results = run_suite(given.path, given.module, workers, given.only, given.hide_muon)
        report(given.module, workers, results)


def names_in(path: Path, module: str) -> list[str]:
    """The tests of a module, as CLASS.test_NAME, in the order of the file."""
    source = (path / "test" / "parallel" / f"{module}.py").read_text()
    found, owner = [], ""
    for line in source.splitlines():
        if match := re.match(r"class (\w+)\(", line):
            owner = match[1]
        elif match := re.match(r"    def (test_\w+)\(", line):
            found.append(f"{owner}.{match[1]}")
    return found


def run_suite(
    path: Path, module: str, workers: int, only: list[str] | None, hide_muon: bool
) -> dict[str, tuple[str, str]]:
    """Status and reason of each test: passed on all ranks, skipped, or failed."""
    left = [name for name in names_in(path, module) if not only or name.split(".")[1] in only]
    results: dict[str, tuple[str, str]] = {}
    while left:
        with tempfile.TemporaryDirectory() as folder:
            tests = Path(folder, "tests.json")
            tests.write_text(json.dumps(left))
            started(path, module, workers, tests, hide_muon)
            told = [read(Path(folder, f"rank-{rank}.jsonl")) for rank in range(workers)]
        done = 0
        for name in left:
            here = [each.get(name, ("failed", "the process ended, or the test hung")) for each in told]
            if not any(name in each for each in told):
                break
            worst = next((each for each in here if each[0] == "failed"), here[0])
            results[name] = worst
            print(f"{workers} workers: {name} {worst[0]} {worst[1]}", flush=True)
            done += 1
            if worst[0] == "failed":
                break
        if not done:
            results[left[0]] = ("failed", "no rank came to its end")
            done = 1
        left = left[done:]
    return results


def started(path: Path, module: str, workers: int, tests: Path, hide_muon: bool) -> None:
    """Run tests by one `gossamer run`, until one fails."""
    command = [sys.executable, "-m", "gossamer", "run", "--as-horovod", "--workers", str(workers)]
    command += ["--logs", str(tests.parent / "logs"), __file__, str(path), "--module", module, "--worker", str(tests)]
    command += ["--hide-muon"] if hide_muon else []
    environ = {**os.environ, "GOSSAMER_TIMEOUT": "60", "OMP_NUM_THREADS": "1"}
    with (tests.parent / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=tests.parent)
        before, waited = -1, 0
        while process.poll() is None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                size = sum(file.stat().st_size for file in tests.parent.glob("rank-*.jsonl"))
                waited, before = (0, size) if size != before else (waited + 5, before)
                if waited > SECONDS_PER_TEST:
                    process.terminate()
                    process.wait()


def read(file: Path) -> dict[str, tuple[str, str]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: (status, reason) for name, status, reason in map(json.loads, lines)}


def report(module: str, workers: int, results: dict[str, tuple[str, str]]) -> None:
    counts = Counter(status for status, _ in results.values())
    runnable = counts["passed"] + counts["failed"]
    print(
        f"\n{module}, {workers} workers: {counts['passed']} passed of {runnable} runnable; {counts['skipped']} skipped"
    )
    for name, (status, reason) in results.items():
        if status == "failed":
            print(f"  {name}: {reason}")


# -- in a worker -------------------------------------------------------------------------------------------------------


def work(path: Path, module: str, tests: Path, hide_muon: bool) -> None:
    """Run tests one by one; exit after the first that fails, since other ranks may be elsewhere then."""
    stand_in_for_what_the_suite_imports()
    if hide_muon:
        import torch

        torch.optim.Muon.__module__ = "hidden"  # the suite takes optimizers by the name of their module
    sys.path.insert(0, str(path / "test" / "parallel"))
    output = tests.parent / f"rank-{os.environ['RANK']}.jsonl"
    for name in json.loads(tests.read_text()):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromName(f"{module}.{name}").run(result)
        trouble = [*result.failures, *result.errors]
        status = "failed" if trouble else "skipped" if result.skipped or not result.testsRun else "passed"
        reason = trouble[0][1].strip().splitlines()[-1] if trouble else result.skipped[0][1] if result.skipped else ""
        with output.open("a") as file:
            print(json.dumps([name, status, reason[:300]]), file=file)
        if trouble:
            print(trouble[0][1], flush=True)
            sys.exit(3)


def stand_in_for_what_the_suite_imports() -> None:
    """Modules that the suite's helpers name and its tests do not use."""
    import unittest.mock

    sys.modules["mock"] = unittest.mock
    for name in ("horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["horovod.runner.util.threads"].in_thread = None  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
