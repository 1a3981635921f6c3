"""Two homes and an office: seconds from `gossamer join` to the first common step, step times and bytes.

The office has one open port. Each home has 20 Mbit/s up, 100 Mbit/s down and 40 ms to the office, and a router. Two
ways take turns: routers that let the homes connect directly (full cone), and symmetric ones, between which a relay in
the office forwards. Time runs from the moment at which the second home's command starts. Bytes are those of network
interfaces, headers included. Needs root and nft. Writes a page into docs/benchmarks.

    python benchmarks/two_homes.py [--recipes RECIPE ...] [--rounds 3] [--steps 200]
    python benchmarks/two_homes.py --quick      # one round of few steps, into runs/quick, to see that it runs
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Self

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance, scratch  # found only after the lines above
from benchmarks.report import markdown, write_page
from support.homes import (  # type: ignore[import-not-found]
    FULL_CONE,
    PORT,
    SYMMETRIC,
    Internet,
    internet,
    missing,
)

from gossamer.base.units import bytes_text
from gossamer.comm.network import Host, Network, Path
from gossamer.comm.network.parse import UNLIMITED_BITS_PER_SECOND
from gossamer.plan.emulation.namespaces import INTERFACE, EmulatedHost, address, ip
from gossamer.plan.emulation.tun_switch import SwitchFabric


def line(site: str, up: float, down: float) -> Host:
    return Host(up_bits_per_second=up, down_bits_per_second=down, site=site)


OFFICE = address(0)
UP, DOWN, ROUND_TRIP = 20e6, 100e6, 0.04
NETWORK = Network(
    hosts=(
        line("office", UNLIMITED_BITS_PER_SECOND, UNLIMITED_BITS_PER_SECOND),
        *(line(home, UP, DOWN) for home in ("home1", "home2")),
    ),
    default=Path(round_trip_seconds=ROUND_TRIP),
    paths={frozenset(("home1", "home2")): Path(round_trip_seconds=2 * ROUND_TRIP)},
)
HOMES = ("home1", "home2")
WAYS = {"direct": (FULL_CONE, ()), "relayed": (SYMMETRIC, ("--relay",))}
RECIPES = ("home", "Float4()")
PATIENCE_SECONDS = 300.0

# The beginning of a script: model, optimizer, data and session
SETUP = """
import json, sys, time
sys.path.insert(0, {root!r})
import torch
import gossamer
from examples.bytelm import SIZES, ByteLM

torch.set_num_threads(1)
world = gossamer.init()
torch.manual_seed(world.rank)
model = ByteLM(*SIZES["small"])
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
data = torch.randint(256, (64, 8, 65))
session = gossamer.attach(model, optimizer, {recipe!r})
"""

TRAIN = """
def moved():
    lines = open("/proc/net/dev").read().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines if not line.lstrip().startswith("lo:")]
    return sum(int(each[1]) for each in fields), sum(int(each[9]) for each in fields)

common, first, began, before = 0, 0.0, 0.0, (0, 0)
while common < {warm} + {steps}:
    model(data[session.steps % len(data)]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if world.size == 3:
        common += 1
        first = first or time.time()
        if common == {warm}:
            began, before = time.time(), moved()
ended, after = time.time(), moved()
print("found", json.dumps([first, (ended - began) / {steps}, after[0] - before[0], after[1] - before[1]]), flush=True)
session.close()
"""


@dataclass(frozen=True)
class Found:
    """seconds: to the first common step. step: seconds. received, sent: bytes of a step by machine."""

    seconds: float
    step: float
    received: Mapping[str, float]
    sent: Mapping[str, float]


@contextmanager
def two_homes(kind: str) -> Iterator[Internet]:
    """The homes and the office, whose lines meet in a switch with delays instead of the bridge of `internet`."""
    with internet(kind, kind) as net:
        machines = ("office", "router1", "router2")
        hosts = [
            EmulatedHost(namespace=net.name(machine), address=address(number))
            for number, machine in enumerate(machines)
        ]
        for host in hosts:
            ip(host.namespace, ["link del wan"])
        with closing(SwitchFabric(NETWORK, hosts, seed=0)):
            for router in machines[1:]:
                rules = net.rules(kind).replace('"wan"', f'"{INTERFACE}"')
                subprocess.run([*net.prefix(router), "nft", "flush", "ruleset"], check=True)
                subprocess.run([*net.prefix(router), "nft", "-f", "-"], input=rules, text=True, check=True)
            yield net


class Machines:
    """Runs `gossamer` on machines, each with a folder and the script. At the end of the block the processes end."""

    def __init__(self, net: Internet, folder: pathlib.Path, script: str) -> None:
        self._net, self._folder, self._script = net, folder, script
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
                process.wait(60)

    @property
    def link(self) -> pathlib.Path:
        return self._folder / "link"

    def start(self, machine: str, *words: str) -> None:
        folder = self._folder / machine
        folder.mkdir()
        (folder / "train.py").write_text(self._script)
        with (folder / "output").open("w") as output:
            command = [*self._net.prefix(machine), sys.executable, "-m", "gossamer", *words, "train.py"]
            self.processes[machine] = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)

    def start_office(self, workers: str, until: float, *options: str) -> None:
        """Start the first launcher and wait for its link, until a time of time.monotonic()."""
        listen = ("--listen", f"{OFFICE}:{PORT}", "--invite", str(self.link))
        self.start("office", "run", "--workers", workers, *listen, *options)
        while not self.link.exists() and self.processes["office"].poll() is None and time.monotonic() < until:
            time.sleep(0.05)

    def found(self, machine: str) -> list[float]:
        """The figures that the script printed. Raises RuntimeError with the output if there are none."""
        output = (self._folder / machine / "output").read_text()
        told = re.search(r"found (\[.*\])", output)
        if told is None:
            raise RuntimeError(f"{machine} did not finish:\n{output}")
        figures: list[float] = json.loads(told[1])
        return figures


def measure(way: str, recipe: str, warm: int, steps: int) -> Found:
    """Train once. Raises RuntimeError with the output of a machine that fails."""
    kind, options = WAYS[way]
    text = (SETUP + TRAIN).format(root=str(ROOT), recipe=recipe, warm=warm, steps=steps)
    with two_homes(kind) as net, tempfile.TemporaryDirectory() as name:
        with Machines(net, pathlib.Path(name), text) as machines, suppress(subprocess.TimeoutExpired):  # outputs tell
            until = time.monotonic() + PATIENCE_SECONDS
            machines.start_office("1:3:1", until, *options)
            for home in HOMES:
                typed = time.time()
                machines.start(home, "join", f"@{machines.link}")
            for process in machines.processes.values():
                process.wait(max(1.0, until - time.monotonic()))
        figures = {machine: machines.found(machine) for machine in machines.processes}
    return Found(
        seconds=max(each[0] for each in figures.values()) - typed,
        step=statistics.median(each[1] for each in figures.values()),
        received={machine: each[2] / steps for machine, each in figures.items()},
        sent={machine: each[3] / steps for machine, each in figures.items()},
    )


def spread(values: Sequence[float], form: str, unit: str) -> str:
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.median(values):{form}}{unit}{ends}"


def rows(found: Mapping[tuple[str, str], Sequence[Found]]) -> Iterator[dict[str, str]]:
    for (recipe, way), each in found.items():
        beside = found[recipe, "direct"]
        ratios = [one.step / other.step for one, other in zip(each, beside, strict=True)]
        home_bytes = [statistics.fmean(one.sent[home] for home in HOMES) for one in each]
        yield {
            "recipe": f"`{recipe}`",
            "homes": way,
            "to the first common step": spread([one.seconds for one in each], ".1f", " s"),
            "step": spread([1000 * one.step for one in each], ".0f", " ms"),
            "over direct": spread(ratios, ".2f", ""),
            "sent by a home": bytes_text(statistics.median(home_bytes)),
            "sent by the office": bytes_text(statistics.median(one.sent["office"] for one in each)),
        }


def main(args: argparse.Namespace) -> None:
    if args.quick:
        args.rounds, args.steps, args.output = 1, 16, scratch(args.output)
    found: dict[tuple[str, str], list[Found]] = {(recipe, way): [] for recipe in args.recipes for way in WAYS}
    for number in range(args.rounds):
        for (recipe, way), outcomes in found.items():
            outcomes.append(outcome := measure(way, recipe, warm=32, steps=args.steps))
            print(f"round {number + 1}: {recipe}, {way}: {outcome}", file=sys.stderr, flush=True)
    write_page(
        args.output,
        [
            "# Two homes and an office",
            "How soon do two homes behind routers train with an office, and what does a relay cost?",
            "Three workers train examples/bytelm.py (small, batch 8). The office has one open port. Each home has 20 "
            "Mbit/s up, 100 Mbit/s down and 40 ms to the office. *Direct*: routers that accept connections to a port "
            "that a worker has used (full cone). *Relayed*: symmetric routers; the office forwards what they send to "
            "each other. Seconds run from the start of the second home's `gossamer join` until all three have made a "
            "common step; they include the imports of Python and torch. Bytes: of a step, on network interfaces, with "
            f"headers. Medians of {args.rounds} rounds that take turns, with the least and the most.",
            provenance(),
            markdown(list(rows(found))),
        ],
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="RECIPE")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=200, help="common steps that are timed")
    options.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "benchmarks" / "two-homes.md")
    options.add_argument("--quick", action="store_true", help="a few steps, in a file of their own")
    given = options.parse_args()
    if why := missing():
        sys.exit(f"{why}, so no homes can be emulated. Run this on Linux, as root, with nftables installed.")
    main(given)
