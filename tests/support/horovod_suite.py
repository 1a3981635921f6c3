"""Runs Horovod's own tests, from a copy that is fetched and never committed, on gossamer.horovod.

    python tests/support/horovod_suite.py PATH [--workers 2 4] [--module test_torch] [--only NAME ...] [--hide-muon]
    python tests/support/horovod_suite.py PATH --module test_tensorflow test_tensorflow2_keras [--keras-2]

PATH is a checkout of Horovod. Prints, for each number of workers: passed, runnable (not skipped by the suite), the
reasons of skipped tests, and each failure with its reason. A run of all tests is one `gossamer run`; after a failure
the rest are run by another. The tests of Keras are written for Keras 2: --keras-2 runs them on the package tf_keras.
They need the package parameterized.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
import unittest
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast

SECONDS_PER_TEST = 400  # some tests run hundreds of sessions of growing graphs


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("path", type=Path)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    options.add_argument("--module", nargs="+", default=["test_torch"])
    options.add_argument(
        "--hide-muon", action="store_true", help="leave out torch.optim.Muon, which takes matrices only"
    )
    options.add_argument("--keras-2", action="store_true", help="let tf.keras be the package tf_keras")
    options.add_argument("--only", nargs="+")
    options.add_argument("--seconds", type=float, default=SECONDS_PER_TEST, help="limit of a test")
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        work(given.path, given.module[0], given.worker, given.hide_muon)
        return
    if given.keras_2:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    for module in given.module:
        for workers in given.workers:
            results = run_suite(given, module, workers)
            report(module, workers, results)


def names_in(path: Path, module: str) -> list[str]:
    """The tests of a module, as CLASS.test_NAME, in the order of the file."""
    source = (path / "test" / "parallel" / f"{module}.py").read_text()
    found, owner, copies = [], "", 0  # copies of a parameterized test, one for each line of its list
    for line in source.splitlines():
        if match := re.match(r"class (\w+)\(", line):
            owner = match[1]
        elif re.match(r"        \[.*\],?$", line):
            copies += 1
        elif re.match(r"    @parameterized", line):
            copies = 0
        elif match := re.match(r"    def (test_\w+)\(", line):
            found += [f"{owner}.{match[1]}_{n}" for n in range(copies)] if copies else [f"{owner}.{match[1]}"]
            copies = 0
    return found


def run_suite(given: argparse.Namespace, module: str, workers: int) -> dict[str, tuple[str, str]]:
    """Status and reason of each test: passed on all ranks, skipped, or failed."""
    names = names_in(given.path, module)
    left = [name for name in names if not given.only or name.split(".")[1] in given.only]
    results: dict[str, tuple[str, str]] = {}
    while left:
        with tempfile.TemporaryDirectory() as folder:
            tests = Path(folder, "tests.json")
            tests.write_text(json.dumps(left))
            run_tests(given, module, workers, tests)
            by_rank = [read(Path(folder, f"rank-{rank}.jsonl")) for rank in range(workers)]
        done = 0
        for name in left:
            here = [each.get(name, ("failed", "the process ended, or the test hung")) for each in by_rank]
            if not all(name in each for each in by_rank) and (done or not any(name in each for each in by_rank)):
                break  # a rank stopped before, and others failed for want of it: the next run repeats this test
            worst = next((each for each in here if each[0] == "failed"), here[0])
            results[name] = worst
            print(f"{workers} workers: {name} {worst[0]} {worst[1]}", flush=True)
            done += 1
        if not done:
            results[left[0]] = ("failed", "no rank came to its end")
            done = 1
        left = left[done:]
    return results


def run_tests(given: argparse.Namespace, module: str, workers: int, tests: Path) -> None:
    """Run tests by one `gossamer run`, until one fails."""
    command = [sys.executable, "-m", "gossamer", "run", "--as-horovod", "--workers", str(workers)]
    command += ["--logs", str(tests.parent / "logs"), __file__, str(given.path), "--module", module]
    command += ["--worker", str(tests), *(["--hide-muon"] if given.hide_muon else [])]
    environ = {**os.environ, "GOSSAMER_TIMEOUT": "60", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ["TF_NUM_INTEROP_THREADS"] = "64"  # calls of one tf.compat.v1.Session wait for other ranks beside each other
    with (tests.parent / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=tests.parent)
        before, waited = -1, 0
        while process.poll() is None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                size = sum(file.stat().st_size for file in tests.parent.glob("rank-*.jsonl"))
                waited, before = (0, size) if size != before else (waited + 5, before)
                if waited > given.seconds:
                    process.terminate()
                    process.wait()


def read(file: Path) -> dict[str, tuple[str, str]]:
    """A test that runs in several modes is skipped where all of them are."""
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    order = ["skipped", "passed", "failed"]
    return {name: (status, reason) for name, status, reason in sorted(lines, key=lambda line: order.index(line[1]))}


def report(module: str, workers: int, results: dict[str, tuple[str, str]]) -> None:
    counts = Counter(status for status, _ in results.values())
    runnable = counts["passed"] + counts["failed"]
    print(
        f"\n{module}, {workers} workers: {counts['passed']} passed of {runnable} runnable; {counts['skipped']} skipped"
    )
    for reason, count in Counter(reason for status, reason in results.values() if status == "skipped").items():
        print(f"  skipped: {count} {reason}")
    for name, (status, reason) in results.items():
        if status == "failed":
            print(f"  {name}: {reason}", flush=True)


# -- in a worker -------------------------------------------------------------------------------------------------------


class RecordedResult(unittest.TestResult):
    """Writes the result of each test to a file, and stops where only some ranks fail: their calls differ then."""

    def __init__(self, output: Path, names: list[str]) -> None:
        super().__init__()
        self.output, self.names = output, names

    def record(self, name: str, status: str, reason: str = "") -> None:
        with self.output.open("a") as file:
            print(json.dumps([name, status, reason[:300]]), file=file)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 (unittest's name)
        self.record(named(test), "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 (unittest's name)
        self.record(named(test), "skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802 (unittest's name)
        if err[0].__name__ == "Skipped":  # pytest's
            self.addSkip(test, str(err[1]))
            return
        text = "".join(traceback.format_exception(*err))
        print(text, flush=True)
        reason = f"{err[0].__name__}: {err[1]}".strip().replace("\n", " ")
        whole = getattr(test, "test_case", test)  # of a subtest
        for name in [named(test)] if hasattr(whole, "_testMethodName") else self.names:
            self.record(name, "failed", reason)
        if not failed_on_all_ranks(str(test)):
            self.stop()

    addFailure = addError  # noqa: N815 (unittest's name)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if err is None:
            self.addSuccess(test)
        else:
            self.addError(test, err)


def failed_on_all_ranks(name: str) -> bool:
    """Whether all ranks call this now, so that the next test may run."""
    from gossamer.horovod import basics
    from gossamer.horovod.calls import BarrierCall

    try:
        call = basics.context().lane(basics.global_process_set).submit(BarrierCall(), f"failed {name}")
        call.future.result(timeout=20)
    except Exception:
        return False
    return True


def named(test: Any) -> str:
    whole = getattr(test, "test_case", test)  # of a subtest
    return f"{type(whole).__name__}.{whole._testMethodName}"


def work(path: Path, module: str, tests: Path, hide_muon: bool) -> None:
    """Run tests until one fails on some ranks."""
    stand_in_for_what_the_suite_imports()
    compare_as_numpy_1_does()
    if module != "test_torch":
        stand_in_for_private_names_of_tensorflow()
    if hide_muon:
        import torch

        torch.optim.Muon.__module__ = "hidden"  # the suite takes optimizers by the name of their module
    sys.path.insert(0, str(path / "test" / "parallel"))
    names = json.loads(tests.read_text())
    result = RecordedResult(tests.parent / f"rank-{os.environ['RANK']}.jsonl", names)
    home = import_module(module)
    suite = unittest.TestSuite()
    for name in names:
        owner, method = name.split(".")
        marks = [mark for mark in getattr(getattr(home, owner), "pytestmark", []) if mark.name == "skipif"]
        if reasons := [mark.kwargs["reason"] for mark in marks if mark.args[0]]:
            result.record(name, "skipped", reasons[0])
        else:
            suite.addTest(getattr(home, owner)(method))
    suite.run(result)
    if result.shouldStop:
        sys.exit(3)


def stand_in_for_what_the_suite_imports() -> None:
    """Modules that the suite's helpers name and its tests do not use."""
    import unittest.mock

    with suppress(ImportError):
        import_module("parameterized")  # before it finds the stand-in for mock
    sys.modules["mock"] = unittest.mock
    for name in ("", ".util", ".util.threads", ".common", ".common.util", ".common.util.env"):
        sys.modules[f"horovod.runner{name}"] = types.ModuleType(f"horovod.runner{name}")
    threads: Any = sys.modules["horovod.runner.util.threads"]
    threads.in_thread = None
    environment: Any = sys.modules["horovod.runner.common.util.env"]
    environment.get_env_rank_and_size = lambda: (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def compare_as_numpy_1_does() -> None:
    """The suite compares errors in float16 with 1e-8, which NumPy 2 rounds to zero in float16."""
    less = unittest.TestCase.assertLess

    def widened(self: unittest.TestCase, a: Any, b: Any, *args: Any) -> None:
        less(self, float(a) if getattr(a, "dtype", None) == "float16" else a, b, *args)

    unittest.TestCase.assertLess = widened  # type: ignore[assignment, method-assign]


def stand_in_for_private_names_of_tensorflow() -> None:
    import tensorflow as tf

    import gossamer.horovod.tensorflow as hvd
    from gossamer.horovod import basics

    home, common = cast(Any, hvd), cast(Any, basics)
    home.util = cast(Any, types.ModuleType("horovod.tensorflow.util"))
    home.util._executing_eagerly = home._executing_eagerly = tf.executing_eagerly
    sys.modules["horovod.tensorflow.util"] = home.util
    common.is_version_greater_equal_than = lambda found, least: version(found) >= version(least)
    home.mpi_ops = types.SimpleNamespace(_basics=common)
    common._get_process_set_ids_and_ranks = lambda: {
        number: each.ranks for number, each in sorted(basics.context()._sets.items())
    }


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


if __name__ == "__main__":
    main()
