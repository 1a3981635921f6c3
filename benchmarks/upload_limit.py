"""Upload limit: bytes of a network interface over time, and the pace of a step over the estimated one.

Two machines on an emulated network, each a network namespace; the first has --upload-limit. They average gradients in
every step. The interface of the first machine is read several times a second, headers included. The estimate is that of
`gossamer explain --network ...,up=LIMIT` for the same script. Needs root and nft. Writes a page into docs/benchmarks.

    python benchmarks/upload_limit.py [--limit 5mbit] [--minutes 10] [--recipe RECIPE]
    python benchmarks/upload_limit.py --quick       # half a minute, into runs/quick, to see that it runs
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance, scratch  # found only after the lines above
from benchmarks.report import markdown, write_page
from benchmarks.two_homes import SETUP, Machines, two_homes
from support.homes import FULL_CONE, missing  # type: ignore[import-not-found]

from gossamer.base.units import parse_rate
from gossamer.plan.emulation.namespaces import INTERFACE

SAMPLE_SECONDS = 0.1
WINDOWS = (1.0, 10.0)  # seconds
PATIENCE_SECONDS = 120.0

TRAIN = """
times = []
while not (times and times[-1] > times[0] + {seconds}):
    model(data[session.steps % len(data)]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if world.size == 2:
        times.append(world.broadcast(time.time()))
print("found", json.dumps(times), flush=True)
session.close()
"""

Sample = tuple[float, int]  # time, bytes sent since the interface exists


def sent(prefix: Sequence[str], interface: str) -> Sample:
    table = subprocess.run([*prefix, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
    line = next(line for line in table.splitlines() if line.strip().startswith(f"{interface}:"))
    return time.time(), int(line.split(":")[1].split()[8])


def train(args: argparse.Namespace, seconds: float) -> tuple[list[float], list[Sample]]:
    """Times of the common steps, and samples of the first machine's interface. Raises RuntimeError."""
    samples = list[Sample]()
    text = (SETUP + TRAIN).format(root=str(ROOT), recipe=args.recipe, seconds=seconds)
    with two_homes(FULL_CONE) as net, tempfile.TemporaryDirectory() as name:
        with Machines(net, Path(name), text) as machines:
            until = time.monotonic() + PATIENCE_SECONDS + seconds
            machines.start_office("1:2:1", until, "--upload-limit", args.limit)
            machines.start("home1", "join", f"@{machines.link}")
            while machines.processes["office"].poll() is None and time.monotonic() < until:
                samples.append(sent(net.prefix("office"), INTERFACE))
                time.sleep(SAMPLE_SECONDS)
        times = machines.found("office")
    return times, [each for each in samples if times[0] <= each[0] <= times[-1]]


def estimate(args: argparse.Namespace) -> float:
    """Seconds of a step, as `gossamer explain` estimates them."""
    with tempfile.TemporaryDirectory() as name:
        script, found = Path(name) / "train.py", Path(name) / "found.json"
        script.write_text((SETUP + TRAIN).format(root=str(ROOT), recipe=args.recipe, seconds=0))
        network = f"100mbit,40ms,up={args.limit}"
        words = ["explain", args.recipe, "--workers", "2", "--network", network, "--json", str(found), str(script)]
        subprocess.run([sys.executable, "-m", "gossamer", *words], check=True, capture_output=True)
        return float(json.loads(found.read_text())["estimate"]["step_seconds"])


def rates(samples: Sequence[Sample], window: float) -> list[float]:
    """Bits per second in each window of about this many seconds, one after another."""
    marks = [samples[0]]
    for each in samples:
        if each[0] >= marks[-1][0] + window:
            marks.append(each)
    return [8 * (after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(marks)]


def main(args: argparse.Namespace) -> None:
    seconds = 60 * args.minutes
    if args.quick:
        seconds, args.output = 15.0, scratch(args.output)
    estimated = estimate(args)
    times, samples = train(args, seconds)
    steps = [after - before for before, after in pairwise(times)]
    limit = parse_rate(args.limit)
    rows = [
        {
            "window": f"{window:g} s",
            "mean": f"{statistics.fmean(found) / 1e6:.2f} Mbit/s",
            "largest": f"{max(found) / 1e6:.2f} Mbit/s",
            "mean over the limit": f"{statistics.fmean(found) / limit:.3f}",
            "largest over the limit": f"{max(found) / limit:.3f}",
        }
        for window in WINDOWS
        for found in [rates(samples, window)]
    ]
    measured = statistics.fmean(steps)
    write_page(
        args.output,
        [
            "# Upload limit",
            "Does `--upload-limit` hold on the network interface, and is its pace the estimated one?",
            f"Two machines train examples/bytelm.py (small, batch 8) with `{args.recipe}` for "
            f"{seconds / 60:g} minutes. The first has `--upload-limit {args.limit}`. Rates are those of its network "
            "interface, with headers.",
            provenance(),
            markdown(rows),
            f"A step took {1000 * measured:.0f} ms on average ({len(steps)} steps), and `gossamer explain` estimated "
            f"{1000 * estimated:.0f} ms: measured over estimated {measured / estimated:.3f}.",
        ],
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--limit", default="5mbit", metavar="RATE")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--recipe", default="Int8()")
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "upload-limit.md")
    options.add_argument("--quick", action="store_true", help="half a minute, in a file of its own")
    given = options.parse_args()
    if why := missing():
        sys.exit(f"{why}, so no machines can be emulated. Run this on Linux, as root, with nftables installed.")
    main(given)
