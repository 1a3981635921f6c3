"""Overhead of being watched: the step of a run with `--watch`, whose page somebody looks at, over that of one without.

The same script on the same machine in runs that take turns; who is first alternates. The viewer is a client that
follows the page's stream of news and asks for its pictures once a second, as an open tab does. Beside both, the same
script under torchrun, where nobody collects anything.

    python benchmarks/watch_overhead.py [--pairs 5] [--steps 300] [--sizes small base] [--recipe RECIPE]
    python benchmarks/watch_overhead.py --quick         # one round of one size, to see that it runs
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import DrivenRun, command, committed, read, spread  # found only after the line above
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import markdown

WORKERS = 2
WARM_UP = 20
TARGET = 1.01
SLOWEST_SECONDS = 5.0  # of a step
LINK = re.compile(r"http://\S+")
PICTURES = "time", "heat", "workers"
TORCHRUN, PLAIN, WATCHED = "torchrun", "gossamer run", "gossamer run --watch"


class Steps(NamedTuple):
    """Seconds of one run's steps."""

    median: float
    processor: float  # on average, of one worker


class Viewer:
    """Looks at a page as a tab does, until it is closed; counts what it was answered."""

    def __init__(self, running: DrivenRun) -> None:
        self._running, self._over = running, threading.Event()
        self.answers = 0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(1.0):
            found = LINK.search(self._running.text)
            if found is None:
                continue
            page, _, token = found[0].partition("?")
            with suppress(OSError):
                (run,) = json.loads(ask(f"{page}api/runs?{token}"))
                for picture in PICTURES:
                    self.answers += bool(ask(f"{page}api/{run['key']}/{picture}?{token}"))


def ask(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=5) as answer:
        body: bytes = answer.read()
    return body


@contextmanager
def started(way: str, recipe: str, script: list[str]) -> Iterator[DrivenRun]:
    with tempfile.TemporaryDirectory() as temporary:
        logs = Path(temporary)
        (logs / "steps").mkdir()
        line = command(str(WORKERS), ["--watch"] if way == WATCHED else [], logs, script)
        if way == TORCHRUN:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
            line = [*torchrun, *line[line.index(str(ROOT / "benchmarks" / "elastic_worker.py")) :]]
        running = DrivenRun(line, logs / "steps", {"GOSSAMER_RECIPE": recipe})
        try:
            yield running
        finally:
            running.end()


def steps_of(way: str, size: str, args: argparse.Namespace) -> Steps:
    script = ["--steps", str(WARM_UP + args.steps), "--size", size]
    with started(way, args.recipe, script) as running:
        viewer = Viewer(running)
        code = running.wait(60.0 + SLOWEST_SECONDS * (WARM_UP + args.steps))
        viewer.close()
        processes = read(running.folder)
        if code or len(processes) != WORKERS or (way == WATCHED) != (viewer.answers > 0):
            said = f"{viewer.answers} answers of the page"
            raise SystemExit(f"{way} of {size} ended with {code}, {said}:\n{running.text[-3000:]}")
    moments = sorted(committed(processes).values())[WARM_UP:]
    processor = statistics.fmean(each.end["processor_seconds"] for each in processes if each.end is not None)
    return Steps(statistics.median(late - early for early, late in pairwise(moments)), processor)


def row(size: str, found: dict[str, list[Steps]]) -> dict[str, str]:
    over = {way: [a.median / b.median for a, b in zip(found[way], found[PLAIN], strict=True)] for way in found}
    busy = [a.processor / b.processor for a, b in zip(found[WATCHED], found[PLAIN], strict=True)]
    return {
        "": size,
        **{f"{way}, ms": spread([1000 * each.median for each in steps], 1) for way, steps in found.items()},
        "--watch over without": spread(over[WATCHED], 3),
        "processor time of a worker, likewise": spread(busy, 3),
        "torchrun over gossamer run": spread(over[TORCHRUN], 3),
        f"at most {TARGET}": "yes" if statistics.median(over[WATCHED]) <= TARGET else "no",
    }


def main(args: argparse.Namespace) -> None:
    if args.quick:
        args.pairs, args.steps, args.sizes = 1, 60, args.sizes[:1]
    rows = []
    for size in args.sizes:
        found: dict[str, list[Steps]] = {way: [] for way in (TORCHRUN, PLAIN, WATCHED)}
        for number in range(args.pairs):
            for way in list(found)[:: -1 if number % 2 else 1]:
                found[way].append(steps_of(way, size, args))
            over = found[WATCHED][-1].median / found[PLAIN][-1].median
            print(f"{size}: round {number + 1} of {args.pairs}: {over:.3f}", file=sys.stderr, flush=True)
        rows.append(row(size, found))
    print(
        f"{WORKERS} workers learn bytes (benchmarks/elastic_worker.py, {args.recipe}). Median step of {args.steps} "
        f"after {WARM_UP}; of {args.pairs} rounds the median (the least to the most).\n\n{markdown(rows)}\n\n"
        f"{provenance()}"
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--sizes", nargs="+", default=["small", "base"], help="of the model: tiny, small, base")
    options.add_argument("--recipe", default="TopK(density=0.01)")
    options.add_argument("--quick", action="store_true", help="one round of one size")
    main(options.parse_args())
