"""Named stragglers: of four workers one is disturbed; which rank is named, with which cause, after how many steps.

Each run is a `gossamer run` of its own, whose store says who was found. A step takes 20 ms of a processor and waits
40 ms for a device that there is not. The rank and the step are drawn by the seed. A disturbance ends once it was named,
and the run goes on until the store says so. Rows come as runs end; in "stopped" nobody makes steps until it is named.

    python benchmarks/named_stragglers.py [--cases CASE ..] [--ranks N ..] [--seeds 5] [--healthy 20] [--output F.md]

Needs root: quotas are control groups', a slow link an emulated host's.
"""

import argparse
import gc
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance  # found only after the line above
from benchmarks.stragglers import Group, ending_by_exit

WORKERS = 4
PROCESSOR_SECONDS, DEVICE_SECONDS = 0.02, 0.04  # of a step
DATA_SECONDS = 0.12
QUOTA = 0.12  # of a core
NETWORK, FACTOR = "100mbit,2ms", 8
FIRST_STEPS = (40, 60)  # after how many steps a disturbance may begin
HEALTHY_STEPS = 200
WITHIN_STEPS = 20
MOST_SECONDS = 20.0  # until it is named, and until it is over
START_SECONDS = 150.0
POLL_SECONDS = 0.05
HEALTHY = "healthy"
FAULT_SAID = "after training began"


@dataclass(frozen=True)
class Found:
    """What a run came to. moments are unix seconds; steps and seconds from the disturbance to the first name."""

    rank: int | None
    cause: str | None
    steps: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0  # before the disturbance
    over_seconds: float | None = None  # from the end of the disturbance to the end of the finding
    before: int = 0  # findings in which nobody was disturbed
    unsteady: int = 0  # findings that named somebody or something else meanwhile


# -- one worker


def work(folder: Path) -> None:
    import torch

    import gossamer

    torch.set_num_threads(1)
    world = gossamer.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    slow_data, garbage = folder / f"data loading-{world.rank}", folder / f"garbage collection-{world.rank}"
    x, factor = torch.randn(64, 128), torch.randn(192, 192)
    kept: list[list[int]] = [[number] for number in range(150_000)]
    gc.freeze()
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    with gossamer.attach(model, optimizer, "Dense()") as session, (folder / f"steps-{world.rank}").open("a") as steps:
        for step in range(100_000):
            if slow_data.exists():
                time.sleep(DATA_SECONDS)
            loss = model(x).square().mean()
            end = time.thread_time() + PROCESSOR_SECONDS
            while time.thread_time() < end:
                factor @ factor
            time.sleep(DEVICE_SECONDS)
            if garbage.exists():
                gc.unfreeze()
                for _ in range(6):
                    gc.collect()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.item())
            print(step, time.time(), file=steps, flush=True)
            if world.is_first and (folder / "stop").exists():
                session.request_stop()
    del kept


# -- disturbances: each begins on entry and ends on exit

Disturb = Callable[[Path, int], Iterator[None]]


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())


def by_file(cause: str) -> Disturb:
    def disturb(folder: Path, rank: int) -> Iterator[None]:
        flag = folder / f"{cause}-{rank}"
        flag.touch()
        yield
        flag.unlink()

    return disturb


def quota(folder: Path, rank: int) -> Iterator[None]:
    group = Group.make(f"gossamer-{os.getpid()}-{rank}", QUOTA)
    try:
        (group.path / "cgroup.procs").write_text(str(pid_of(folder, rank)))
        yield
    finally:
        with suppress(ProcessLookupError):
            (group.path.parent / "cgroup.procs").write_text(str(pid_of(folder, rank)))
        group.remove()


def stopped(folder: Path, rank: int) -> Iterator[None]:
    os.kill(pid_of(folder, rank), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid_of(folder, rank), signal.SIGCONT)


def crowded(folder: Path, rank: int) -> Iterator[None]:
    """The worker shares one core with three others' loops; who is not bound to it can go elsewhere."""
    threads = [int(each) for each in os.listdir(f"/proc/{pid_of(folder, rank)}/task")]
    cores = os.sched_getaffinity(0)
    one = {max(cores)}
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for process in (*threads, *(each.pid for each in loops)):
            os.sched_setaffinity(process, one)
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()
        for thread in threads:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


def nothing(folder: Path, rank: int) -> Iterator[None]:
    yield


CASES: dict[str, Disturb] = {
    "computing": quota,
    "data loading": by_file("data loading"),
    "link": nothing,  # a fault of the run's
    "stopped": stopped,
    "garbage collection": by_file("garbage collection"),
    "loaded machine": crowded,
}
SIXTEEN = ("computing", "data loading", "link", "stopped")


# -- one run


class Run:
    """A run that goes on, seen through what its workers and its store say."""

    def __init__(self, logs: Path, options: Sequence[str]) -> None:
        self.logs, self.folder = logs, logs / "steps"
        self.folder.mkdir()
        script = [str(ROOT / "benchmarks" / "named_stragglers.py"), "--worker", str(self.folder)]
        self.command = [sys.executable, "-m", "gossamer", "run", "--workers", str(WORKERS), "--logs", str(logs)]
        self.said = (logs / "said.txt").open("w")
        self.process = subprocess.Popen(
            [*self.command, *options, *script], cwd=ROOT, stdout=self.said, stderr=subprocess.STDOUT
        )

    def steps(self, rank: int = 0) -> list[float]:
        """When each step of a rank ended."""
        path = self.folder / f"steps-{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [float(line.split()[1]) for line in lines if line.endswith("\n")]

    def rows(self, query: str, *values: object) -> list[tuple[float, ...]]:
        with closing(sqlite3.connect(f"file:{self.logs}/run.sqlite?mode=ro", uri=True, timeout=10)) as db:
            return db.execute(query, values).fetchall()

    def findings(self) -> list[tuple[float, int, str]]:
        return [(at, int(rank), str(cause)) for at, rank, cause in self.rows("SELECT at, rank, cause FROM finding")]

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended early:\n{(self.logs / 'said.txt').read_text()[-3000:]}")
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def end(self) -> None:
        (self.folder / "stop").touch()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.said.close()


@contextmanager
def running(options: Sequence[str]) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as logs:
        run = Run(Path(logs), options)
        try:
            yield run
        finally:
            run.end()


def measure(cause: str, rank: int, seed: int) -> Found:
    draw = random.Random(f"{cause} {rank} {seed}")
    first = draw.randrange(*FIRST_STEPS)
    options, fault = [], None
    if cause == "link":
        fault = f"slow({rank}, factor={FACTOR}, at={draw.uniform(6, 9):.1f})"
        options = ["--network", NETWORK, "--fault", fault]
    with running(options) as run:
        last = HEALTHY_STEPS if cause == HEALTHY else first
        if not run.wait(lambda: len(run.steps()) >= last, START_SECONDS):
            raise SystemExit(f"no {last} steps in {START_SECONDS:g} s")
        if cause == HEALTHY:
            return Found(None, None, step_seconds=pace(run.steps()), before=len(run.findings()))
        with disturbed(cause, run.folder, rank) as end:
            begun = time.time()
            if fault is not None:
                if not run.wait(lambda: FAULT_SAID in (run.logs / "said.txt").read_text(), START_SECONDS):
                    raise SystemExit(f"nothing was said of {fault}")
                begun = time.time()
            run.wait(lambda: any(at > begun for at, _, _ in run.findings()), MOST_SECONDS)
            end()
            ended = time.time()
            found = [each for each in run.findings() if each[0] > begun]
            if not found:
                return Found(None, None, step_seconds=pace(run.steps()[:first]), before=len(run.findings()))
            at, named, why = found[0]
            over = "SELECT at FROM event WHERE kind = 'caught up' AND rank = ? AND at > ?"
            is_over = fault is None and run.wait(lambda: run.rows(over, named, ended), MOST_SECONDS)
        return Found(
            rank=named,
            cause=why,
            steps=sum(begun < moment <= at for moment in run.steps()),
            seconds=at - begun,
            step_seconds=pace([moment for moment in run.steps() if moment < begun]),
            over_seconds=run.rows(over, named, ended)[0][0] - ended if is_over else None,
            before=sum(each[0] <= begun for each in run.findings()),
            unsteady=sum(each[0] > begun and each[1:] != (named, why) for each in run.findings()),
        )


@contextmanager
def disturbed(cause: str, folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """A disturbance that is over when the block is, or earlier when asked."""
    with ExitStack() as stack:
        stack.enter_context(contextmanager(CASES[cause])(folder, rank))
        yield stack.close


def pace(moments: Sequence[float]) -> float:
    """The median step."""
    return statistics.median(late - early for early, late in pairwise(moments[10:]))


# -- all of them


def main(args: argparse.Namespace) -> None:
    began = time.monotonic()
    rows, right, quiet = [], 0, 0
    with ending_by_exit():
        for cause in args.cases:
            for rank in args.ranks:
                runs = []
                for seed in range(args.seeds):
                    runs.append(each := measure(cause, rank, seed))
                    print(f"{cause}, rank {rank}, seed {seed}: {each}", file=sys.stderr, flush=True)
                hits = [each for each in runs if (each.rank, each.cause) == (rank, cause)]
                soon = [each for each in hits if each.steps <= WITHIN_STEPS]
                right += len(soon)
                over = [each.over_seconds for each in hits if each.over_seconds is not None]
                rows.append(
                    f"| {cause} | {rank} | {len(hits)} of {len(runs)} | {len(soon)} of {len(runs)} | "
                    f"{spread([each.steps for each in hits], 0)} | {spread([each.seconds for each in hits])} | "
                    f"{spread(over)} | {sum(each.before + each.unsteady for each in runs)} | "
                    f"{spread([1000 * each.step_seconds for each in runs], 0)} |"
                )
                print(rows[-1], flush=True)
        for seed in range(args.healthy):
            each = measure(HEALTHY, 0, seed)
            quiet += not each.before
            print(f"{HEALTHY}, seed {seed}: {each}", file=sys.stderr, flush=True)
    bound = (
        f" (with 95 % confidence, fewer than {1 - 0.05 ** (1 / args.healthy):.0%} of such runs name a rank)"
        if quiet
        else ""
    )
    seeds = f"medians and ranges of {args.seeds} seeds" if args.seeds > 1 else "one seed"
    text = "\n".join(
        [
            "# Stragglers by name\n",
            "Is a straggler named with the right cause, and how soon? One of "
            f"{WORKERS} workers on one machine is disturbed; each row is one disturbed rank, {seeds}. Named within "
            f"{WITHIN_STEPS} steps with its cause: {right} of {len(args.cases) * len(args.ranks) * args.seeds}. "
            f"No rank was named in {quiet} of {args.healthy} healthy runs of {HEALTHY_STEPS} steps"
            f"{bound if quiet == args.healthy else ''}. Other findings: before the disturbance, or "
            f"of another rank or cause after it. {time.monotonic() - began:.0f} s in all.\n",
            provenance() + "\n",
            f"| cause | rank | named correctly | within {WITHIN_STEPS} steps | steps until named | "
            "seconds until named | seconds from its end to the end of the finding | "
            "other findings | healthy step, ms |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
            *rows,
        ]
    )
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


def spread(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return ""
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else middle


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--cases", nargs="*", choices=CASES, default=SIXTEEN)
    options.add_argument("--ranks", nargs="*", type=int, default=range(WORKERS))
    options.add_argument("--seeds", type=int, default=5, help="runs of each case")
    options.add_argument("--healthy", type=int, default=20)
    options.add_argument("--output", type=Path, help="a file for the table")
    options.add_argument("--worker", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    found = options.parse_args()
    if found.worker is not None:
        work(found.worker)
    else:
        main(found)
