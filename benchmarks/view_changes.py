"""View changes: seconds from the loss of a worker until the others train again, and where they go.

Workers of an elastic run are killed one by one. Their connections break at once, so no timeout is part of it. The
launcher starts others in their places; their joins are measured by benchmarks/joining.py.

    python benchmarks/view_changes.py [--losses 6] [--networks none 100mbit,20ms] [--size small] [--json FILE]
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import WorkerProcess, read, run  # found only after the line above
from benchmarks.provenance import provenance
from benchmarks.report import markdown

WORKERS, LEAST = 4, 2
UNLIMITED = "none"
EVERY_SECONDS = 12.0  # between two losses, at least
SOON_SECONDS = 10.0  # a change that begins later has another cause
ALL, NOTICED, REST = "until the next step", "the loss is noticed", "the interrupted step is made again"
PHASES = {  # methods of gossamer.comm.elastic that follow each other, by what they do
    "report": "it is reported to the coordinator",
    "decide": "the coordinator answers with the next view",
    "meet": "the members connect",
    "mesh": "the connections become a group",
    "resolve": "the members compare their progress",
    "adopt": "ranks and data are divided again",
}


# -- the worker's process ------------------------------------------------------------------------------------------


def note_phases(file: Path) -> None:
    """Append when each phase of a view change began and ended in this process."""
    from gossamer.comm.elastic.agent import MembershipAgent
    from gossamer.comm.elastic.joined_run import JoinedRun
    from gossamer.comm.elastic.transport import ElasticTransport
    from gossamer.comm.elastic.view_listener import ViewListener

    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def timed(owner: Any, name: str, phase: str) -> None:
        honest: Callable[..., Any] = getattr(owner, name)

        @wraps(honest)
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return honest(*arguments, **named)
            finally:
                os.write(descriptor, (json.dumps([phase, began, time.monotonic()]) + "\n").encode())

        setattr(owner, name, call)

    timed(ElasticTransport, "_regroup", "change")
    timed(MembershipAgent, "broken", "report")
    timed(MembershipAgent, "view_after", "decide")
    timed(ViewListener, "meet", "meet")
    timed(JoinedRun, "_connect", "mesh")  # with the meeting, which is subtracted
    timed(ElasticTransport, "_resolve", "resolve")
    timed(ElasticTransport, "_adopt", "adopt")


def work() -> None:
    from benchmarks import elastic_worker

    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--size", default="small")
    args = options.parse_args()
    note_phases(args.folder / f"{os.getpid()}.phases")
    elastic_worker.main(argparse.Namespace(folder=args.folder, steps=sys.maxsize, size=args.size, seed=0))


# -- the driver's --------------------------------------------------------------------------------------------------


def phases_of(folder: Path, worker: WorkerProcess) -> list[tuple[str, float, float]]:
    file = folder / f"{worker.pid}.phases"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def change_of(worker: WorkerProcess, phases: Sequence[tuple[str, float, float]], killed: float) -> dict[str, float]:
    """Seconds by phase of a survivor's change after a loss; empty if it has none, or several at once."""
    changes = [each for each in phases if each[0] == "change" and killed < each[1] < killed + SOON_SECONDS]
    after = [step.moment for step in worker.steps if step.moment > killed]
    before = [step.moment for step in worker.steps if step.moment <= killed]
    if not changes or not after or not before:
        return {}
    _, began, ended = changes[0]
    step = next((moment for moment in after if moment > ended), None)
    if step is None or len([each for each in changes if each[1] < step]) > 1:
        return {}
    found = {name: sum(e - b for phase, b, e in phases if phase == name and began <= b <= step) for name in PHASES}
    found["mesh"] -= found["meet"]
    rest = step - began - sum(found.values())
    return {ALL: step - killed, NOTICED: began - killed, **{PHASES[name]: found[name] for name in found}, REST: rest}


def measure(recipe: str, network: str, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """The changes of all survivors of all losses."""
    emulated = [] if network == UNLIMITED else ["--network", network]
    options = [*emulated, "--recipe", recipe, "--max-restarts", "1000"]
    with run(f"{LEAST}:{WORKERS}", options, ["--size", args.size], program="view_changes.py") as running:
        killed: list[tuple[float, int]] = []
        running.wait_for(WORKERS, 30)
        for number in range(args.losses):
            running.wait_for(WORKERS, 2)
            victim = running.training()[number % WORKERS]
            killed.append((running.kill(victim), victim.pid))
            running.sleep(EVERY_SECONDS)
        running.wait_for(WORKERS, 2)
        running.stop()
        for worker in read(running.folder):
            phases = phases_of(running.folder, worker)
            for moment, pid in killed:
                if worker.pid != pid and (found := change_of(worker, phases, moment)):
                    yield found


def spread(seconds: Sequence[float]) -> str:
    """Median with 10 % to 90 %, in milliseconds."""
    if len(seconds) < 2:
        return "-"
    deciles = [1000 * each for each in statistics.quantiles(seconds, n=10, method="inclusive")]
    return f"{deciles[4]:.0f} ({deciles[0]:.0f} to {deciles[-1]:.0f})"


def main(args: argparse.Namespace) -> None:
    found = {network: [*measure(args.recipe, network, args)] for network in args.networks}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    load = os.getloadavg()[0]
    names = [ALL, NOTICED, *PHASES.values(), REST]
    table = [
        {"milliseconds": name} | {network: spread([each[name] for each in found[network]]) for network in found}
        for name in names
    ]
    counts = ", ".join(f"{len(changes)} on {network}" for network, changes in found.items())
    print(
        f"{WORKERS} workers learn bytes ({args.size}, {args.recipe}); one is killed {args.losses} times. Medians over "
        f"survivors and losses with 10 % to 90 % ({counts}). Load average {load:.1f}.\n\n{markdown(table)}\n\n"
        f"{provenance()}"
    )


if __name__ == "__main__":
    if "--folder" in sys.argv:
        work()
    else:
        options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
        options.add_argument("--losses", type=int, default=6)
        options.add_argument("--networks", nargs="+", default=[UNLIMITED, "100mbit,20ms"], metavar="SPEC")
        options.add_argument("--recipe", default="TopK(density=0.01)")
        options.add_argument("--size", default="small", help="of the model: tiny, small, base")
        options.add_argument("--json", type=Path, metavar="FILE")
        main(options.parse_args())
