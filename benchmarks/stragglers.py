"""Unequal workers: useful samples per second of each recipe, and time to a validation loss.

Workers train examples/bytelm.py for the same time, each in a control group with a part of a processor. The baseline is
the same workers without communication, under the same quotas. Servers have no such limit. Recipes take turns. Needs
root and control groups. Writes docs/benchmarks/stragglers.md.

    python benchmarks/stragglers.py [--seconds 40] [--rounds 3] [--speeds 1,1,1,0.2] [--output FILE.md]
    python benchmarks/stragglers.py --quick     # a minute, into runs/quick, to see that it runs
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance, scratch  # found only after the line above

PAGE = ROOT / "docs" / "benchmarks" / "stragglers.md"
APART = "no communication"
SERVER = ["--servers", "1"]
RECIPES: dict[str, list[str]] = {  # and options of `gossamer run`
    APART: [],
    "Dense()": [],
    "EveryStep(global_batch=256, batch=8, balance=True)": [],
    "EveryStep(global_batch=128, balance=True)": [],
    "LocalSGD(period=20)": [],
    "LocalSGD(period=20, balance=True)": [],
    "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5, balance=True) + OneBit()": [],
    "ParameterServer(mode='sync')": SERVER,
    "ParameterServer(mode='stale', staleness=4)": SERVER,
    "ParameterServer(mode='async')": SERVER,
    "AsyncDiLoCo(period=24)": SERVER,
    "AsyncDiLoCo(period=24, quorum=2, grace=4.0)": SERVER,
    "Gossip(mixing='pairwise')": [],
}
SPEEDS = "1,1,1,0.2", "1,0.7,0.5,0.2", "0.25,0.5,1"
WITHOUT_COMMON_END = "ParameterServer", "Gossip", "AsyncDiLoCo"  # workers end each by its own clock
TOTAL = 1.2  # processors of all workers together
BATCH, WARM_UP = 8, 0.2  # samples without a global batch; part of the time before samples count
PERIOD_US = 20_000  # short, so that a slow worker is slow and not now and then frozen
LOOKS = 12  # at the parameters, during training
EMPTYING_SECONDS, EMPTYING_LOOKS = 10.0, 100
ENDINGS = (signal.SIGTERM, signal.SIGHUP)


class Group(NamedTuple):
    """A control group that bounds the processor time of its processes."""

    path: Path

    @classmethod
    def make(cls, name: str, share: float) -> "Group":
        version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        path = Path("/sys/fs/cgroup") / ("" if version_2 else "cpu") / name
        try:
            path.mkdir()
            if version_2:
                (path / "cpu.max").write_text(f"{int(share * PERIOD_US)} {PERIOD_US}")
                (path / "cpu.weight").write_text("10000")  # before other programs of this machine
            else:
                (path / "cpu.shares").write_text("100000")
                (path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (path / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))
        except OSError as problem:
            raise SystemExit(
                f"No control group can be made here ({problem}), so no worker is slow: run this as root."
            ) from None
        return cls(path)

    def join(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self) -> None:
        (self.path.parent / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Whoever is still in it ends first, since a group that somebody is in stays."""
        for _ in range(EMPTYING_LOOKS):
            members = set((self.path / "cgroup.procs").read_text().split()) - {"0"}  # 0: whom this namespace cannot see
            if not members:
                break
            for member in members:
                with suppress(ProcessLookupError):
                    os.kill(int(member), signal.SIGKILL)
            time.sleep(EMPTYING_SECONDS / EMPTYING_LOOKS)
        self.path.rmdir()


@contextmanager
def groups(speeds: Sequence[float]) -> Iterator[list[Group]]:
    """Control groups, which are removed afterwards, also where this process is asked to end."""
    shares = [TOTAL * speed / sum(speeds) for speed in speeds]
    made: list[Group] = []
    with ending_by_exit():
        try:
            for rank, share in enumerate(shares):
                made.append(Group.make(f"gossamer-{os.getpid()}-{rank}", share))
            yield made
        finally:
            for each in made:
                each.remove()


@contextmanager
def ending_by_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt: by default they leave everything."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in ENDINGS:  # once is enough: what tidies up is not to be interrupted
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- one worker


def work(args: argparse.Namespace) -> None:
    """Train for some seconds; print the number of samples, and on rank 0 the validation loss over time."""
    import torch
    from examples.bytelm import SIZES, ByteLM, windows

    import gossamer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    import sysconfig

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    training, held_out = windows([file for i, file in enumerate(files) if i % 10]), windows(files[::10])
    world = gossamer.init()
    model = ByteLM(*SIZES[args.size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = None if args.worker == APART else gossamer.attach(model, optimizer, args.worker)
    together = session is not None and not args.worker.startswith(WITHOUT_COMMON_END)
    sized = "global_batch" in args.worker
    draw = torch.Generator().manual_seed(world.rank)
    group = Group(Path(args.groups.split(",")[world.rank]))
    group.join()
    looks: list[tuple[float, list[torch.Tensor]]] = []
    begun, samples, counted_from, before = time.monotonic(), 0, 0.0, 0
    while True:
        now = time.monotonic() - begun
        if now >= args.seconds:
            if session is None or not together:
                break
            session.request_stop()
        if session is not None and together and session.should_stop:
            break
        if not counted_from and now >= WARM_UP * args.seconds:
            counted_from, before = now, samples
        size = session.batch_size if session is not None and sized else BATCH
        batch = training[torch.randint(len(training), (size,), generator=draw)]
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        samples += size
        if session is not None:
            session.log(loss=loss.item())
        if world.is_first and now >= len(looks) * args.seconds / LOOKS:
            looks.append((now, [parameter.detach().clone() for parameter in model.parameters()]))
    seconds = time.monotonic() - begun - counted_from
    group.leave()
    if session is not None:
        session.close()
    curve = []
    with torch.no_grad():
        for moment, parameters in looks:
            for parameter, value in zip(model.parameters(), parameters, strict=True):
                parameter.copy_(value)
            curve.append((moment, float(model(held_out[:: len(held_out) // 256]))))
    found = {"rank": world.rank, "samples": samples - before, "seconds": seconds, "curve": curve}
    print("RESULT", json.dumps(found), flush=True)


# -- all workers


def run(recipe: str, options: list[str], made: list[Group], args: argparse.Namespace) -> list[dict[str, Any]]:
    script = ["benchmarks/stragglers.py", "--worker", recipe, "--seconds", str(args.seconds), "--size", args.size]
    script += ["--groups", ",".join(str(each.path) for each in made)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gossamer", "run", "--workers", str(len(made)), "--logs", folder, *options]
        done = subprocess.run([*command, *script], cwd=ROOT, capture_output=True, text=True, timeout=600)
        printed = "".join(path.read_text() for path in Path(folder).glob("rank-*.log"))
    results = [json.loads(line.partition("RESULT ")[2]) for line in printed.splitlines() if "RESULT " in line]
    if len(results) != len(made):
        raise SystemExit(f"{shlex.join([*command, *script])} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return sorted(results, key=lambda each: each["rank"])


def reached(curve: list[tuple[float, float]], target: float) -> float:
    """Seconds until the loss was at the target, interpolated between two looks; infinite if it never was."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= target < high:
            return before + (after - before) * (high - target) / (high - low)
    return float("inf")


def ratios(rates: list[float], baseline: list[float]) -> str:
    """Median ratio over rounds, and its range if there are several."""
    found = [rate / other for rate, other in zip(rates, baseline, strict=True)]
    middle = f"{statistics.median(found):.2f}"
    return f"{middle} ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else middle


def table(speeds: Sequence[float], recipes: dict[str, list[str]], args: argparse.Namespace) -> list[str]:
    """Lines of the page for one set of speeds."""
    rates: dict[str, list[float]] = {name: [] for name in recipes}
    samples: dict[str, list[int]] = {}
    curves: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in recipes}
    with groups(speeds) as made:
        for number in range(args.rounds):
            for name, options in recipes.items():
                results = run(name, options, made, args)
                rates[name].append(sum(each["samples"] / each["seconds"] for each in results))
                samples[name] = [each["samples"] for each in results]
                curves[name].append(results[0]["curve"])
                print(
                    f"round {number + 1} of {args.rounds}: {name}: {rates[name][-1]:.1f} samples/s, {samples[name]}, "
                    f"validation loss {results[0]['curve'][-1][1]:.3f}",
                    file=sys.stderr,
                    flush=True,
                )
    target = statistics.median(curve[-1][1] for curve in curves[APART])
    shares = ", ".join(f"{TOTAL * speed / sum(speeds):.2f}" for speed in speeds)
    lines = [
        f"## Speeds {', '.join(f'{speed:g}' for speed in speeds)}\n",
        f"{len(speeds)} workers with {shares} of a processor. Loss: that of rank 0 without communication, "
        f"{target:.3f}.\n",
        "| recipe | samples/s | relative | samples of each worker | time to that loss | final loss |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for name in recipes:
        middle = statistics.median(reached(curve, target) for curve in curves[name])
        shown = "" if name == APART else f"{middle:.1f} s" if middle < args.seconds else "not reached"
        lines.append(
            f"| {name if name == APART else f'`{name}`'} | {statistics.median(rates[name]):.1f} | "
            f"{ratios(rates[name], rates[APART])} | {', '.join(map(str, samples[name]))} | {shown} | "
            f"{statistics.median(curve[-1][1] for curve in curves[name]):.3f} |"
        )
    return [*lines, ""]


def main(args: argparse.Namespace) -> None:
    recipes = {name: options for name, options in RECIPES.items() if name == APART or args.only in name}
    if args.quick:
        recipes = {name: RECIPES[name] for name in (APART, "EveryStep(global_batch=128, balance=True)")}
        args.seconds, args.rounds, args.output, args.speeds = 4.0, 1, scratch(args.output), SPEEDS[:1]
    rounds = f"median and range of {args.rounds} rounds" if args.rounds > 1 else "one round"
    lines = [
        "# Unequal workers\n",
        "How much do slow workers slow the others, and which recipe reaches a loss?\n",
        f"examples/bytelm.py, {args.size}, {args.seconds:g} s, batches of {BATCH} samples or the global batch of the "
        "recipe. Every worker has a part of a processor (a CPU quota); parameter servers have no such limit. Relative: "
        "samples per second of all workers, divided by those of the same workers without communication in the same "
        f"round ({rounds}); the first {WARM_UP:.0%} of the time is left out. Samples of each worker: of the last round."
        " Larger batches take less time per sample, so a relative rate may exceed 1.\n",
        provenance() + "\n",
    ]
    for speeds in args.speeds:
        lines += table([float(speed) for speed in speeds.split(",")], recipes, args)
    text = "\n".join(lines)
    print(text)
    args.output.write_text(text)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--seconds", type=float, default=40)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--speeds", nargs="+", default=SPEEDS, metavar="1,1,1,0.2")
    options.add_argument("--size", choices=["small", "base"], default="small")
    options.add_argument("--only", default="", metavar="TEXT", help="recipes that contain it, and the baseline")
    options.add_argument("--output", type=Path, default=PAGE)
    options.add_argument("--quick", action="store_true", help="a few seconds, in a file of their own")
    options.add_argument("--worker", metavar="RECIPE", help=argparse.SUPPRESS)
    options.add_argument("--groups", help=argparse.SUPPRESS)
    found = options.parse_args()
    (work if found.worker else main)(found)
