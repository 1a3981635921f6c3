"""Stragglers: what one slow worker costs the others in useful steps per second, and in time to a validation loss.

Four workers train examples/bytelm.py for the same time, each in a control group with a share of a processor of its own;
the last has a fifth of the others'. The baseline is the same four without communication, under the same quotas.
Servers have no such bound. Rounds take turns. Needs root and control groups. Writes docs/benchmarks/stragglers.md.

    python benchmarks/stragglers.py [--seconds 30] [--rounds 3] [--size small] [--output FILE.md]
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance, scratch  # found only after the line above

PAGE = ROOT / "docs" / "benchmarks" / "stragglers.md"
APART = "no communication"
RECIPES: dict[str, list[str]] = {
    APART: [],
    "ParameterServer(mode='sync')": ["--servers", "1"],
    "ParameterServer(mode='stale', staleness=4)": ["--servers", "1"],
    "ParameterServer(mode='async')": ["--servers", "1"],
    "Gossip(mixing='pairwise')": [],
}
WORKERS, SHARE, TIMES_SLOWER = 4, 0.35, 5
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
            else:
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
def groups() -> Iterator[list[Group]]:
    """Control groups, which are gone afterwards: also where this process is asked to end."""
    shares = [SHARE] * (WORKERS - 1) + [SHARE / TIMES_SLOWER]
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
    """Train for some seconds; print how many steps that were, and on rank 0 the validation loss over time."""
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
    draw = torch.Generator().manual_seed(world.rank)
    group = Group(Path(args.groups.split(",")[world.rank]))
    group.join()
    looks: list[tuple[float, list[torch.Tensor]]] = []
    begun, steps = time.monotonic(), 0
    while (now := time.monotonic() - begun) < args.seconds:
        batch = training[torch.randint(len(training), (8,), generator=draw)]
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if session is not None:
            session.log(loss=loss.item())
        if world.is_first and now >= len(looks) * args.seconds / LOOKS:
            looks.append((now, [parameter.detach().clone() for parameter in model.parameters()]))
    taken = time.monotonic() - begun
    group.leave()
    if session is not None:
        session.close()
    curve = []
    with torch.no_grad():
        for moment, parameters in looks:
            for parameter, value in zip(model.parameters(), parameters, strict=True):
                parameter.copy_(value)
            curve.append((moment, float(model(held_out[:: len(held_out) // 256]))))
    print("RESULT", json.dumps({"rank": world.rank, "steps": steps, "seconds": taken, "curve": curve}), flush=True)


# -- all of them


def run(recipe: str, options: list[str], made: list[Group], args: argparse.Namespace) -> list[dict[str, Any]]:
    script = ["benchmarks/stragglers.py", "--worker", recipe, "--seconds", str(args.seconds), "--size", args.size]
    script += ["--groups", ",".join(str(each.path) for each in made)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gossamer", "run", "--workers", str(WORKERS), "--logs", folder, *options]
        done = subprocess.run([*command, *script], cwd=ROOT, capture_output=True, text=True, timeout=600)
        said = "".join(path.read_text() for path in Path(folder).glob("rank-*.log"))
    results = [json.loads(line.partition("RESULT ")[2]) for line in said.splitlines() if "RESULT " in line]
    if len(results) != WORKERS:
        raise SystemExit(f"{shlex.join([*command, *script])} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return sorted(results, key=lambda each: each["rank"])


def reached(curve: list[tuple[float, float]], target: float) -> float:
    """When the loss was down to the target, between two looks; infinite where it was not."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= target < high:
            return before + (after - before) * (high - target) / (high - low)
    return float("inf")


def over_by_rounds(mine: list[float], theirs: list[float]) -> str:
    """The median ratio of rounds, and the least and the most where there is more than one."""
    over = [one / other for one, other in zip(mine, theirs, strict=True)]
    middle = f"{statistics.median(over):.2f}"
    return f"{middle} ({min(over):.2f} to {max(over):.2f})" if len(over) > 1 else middle


def main(args: argparse.Namespace) -> None:
    recipes = dict(RECIPES)
    if args.quick:
        recipes = {name: RECIPES[name] for name in (APART, "ParameterServer(mode='async')")}
        args.seconds, args.rounds, args.output = 2.0, 1, scratch(args.output)
    rates: dict[str, list[float]] = {name: [] for name in recipes}
    steps: dict[str, list[list[int]]] = {name: [] for name in recipes}
    curves: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in recipes}
    with groups() as made:
        for number in range(args.rounds):
            for name, options in recipes.items():
                results = run(name, options, made, args)
                rates[name].append(sum(each["steps"] / each["seconds"] for each in results))
                steps[name].append([each["steps"] for each in results])
                curves[name].append(results[0]["curve"])
                print(
                    f"round {number + 1} of {args.rounds}: {name}: {rates[name][-1]:.1f} steps/s, {steps[name][-1]}, "
                    f"validation loss {results[0]['curve'][-1][1]:.3f}",
                    file=sys.stderr,
                    flush=True,
                )
    target = statistics.median(curve[-1][1] for curve in curves[APART])  # what one worker reaches alone
    rounds = f"median and range of {args.rounds}" if args.rounds > 1 else "there was one"
    lines = [
        "# One slow worker\n",
        f"examples/bytelm.py, {args.size}, batch 8, {WORKERS} workers for {args.seconds:g} s. Each may use {SHARE:g} "
        f"of a processor, the last {SHARE / TIMES_SLOWER:g} ({TIMES_SLOWER} times slower); a parameter server has no "
        "such limit. Relative: steps of all workers, divided by those of the same four without communication, by "
        f"round: {rounds}. Steps of each worker are from the last round. Time to a loss: until rank 0's parameters "
        f"have the final validation loss of training without communication, {target:.3f}.\n",
        provenance() + "\n",
        "| | steps/s | relative | steps of each worker | time to that loss | final loss |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for name in recipes:
        when = [reached(curve, target) for curve in curves[name]]
        last = [curve[-1][1] for curve in curves[name]]
        middle = statistics.median(when)
        shown = "" if name == APART else f"{middle:.1f} s" if middle < args.seconds else "not reached"
        lines.append(
            f"| {name if name == APART else f'`{name}`'} | {statistics.median(rates[name]):.1f} | "
            f"{over_by_rounds(rates[name], rates[APART])} | "
            f"{', '.join(map(str, steps[name][-1]))} | {shown} | {statistics.median(last):.3f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    args.output.write_text(text)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--seconds", type=float, default=30)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--size", choices=["small", "base"], default="small")
    options.add_argument("--output", type=Path, default=PAGE)
    options.add_argument("--quick", action="store_true", help="a few seconds, in a file of their own")
    options.add_argument("--worker", metavar="RECIPE", help=argparse.SUPPRESS)
    options.add_argument("--groups", help=argparse.SUPPRESS)
    found = options.parse_args()
    (work if found.worker else main)(found)
