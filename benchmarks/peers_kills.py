"""A killed worker on the job of benchmarks/peers.py: seconds until the others train, and until all train again.

`python benchmarks/peers.py --kills` runs this. Each arm trains until its rate is steady. Then one worker is killed
(SIGKILL, with all its child processes), and its replacement is started by what each framework has for that: torchrun
restarts all workers of DDP from a snapshot, `gossamer run` starts one worker, and a loop restarts a process of torchft
or hivemind.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from benchmarks.elastic_runs import DrivenRun, WorkerProcess, read
from benchmarks.elastic_worker import StepLog, texts
from benchmarks.ladder_arms import ARMS as LADDER
from benchmarks.peers import (
    ALIGNED,
    FRAGMENTS,
    MEETING_SECONDS,
    PERIOD,
    SHORT_SECONDS,
    Arm,
    Step,
    Worker,
    failure_of,
    in_turns,
    of_hivemind,
    of_torchft,
    parameters_of,
    spread,
    table_with_failures,
    versions,
)
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import write_page
from torch import nn

from gossamer.comm.environment import interfaces

PAGE: Path = ROOT / "docs" / "benchmarks" / "peers-kills.md"
VICTIM = 1  # a place; the first one has the lighthouse, the first DHT peer or the rendezvous
LEAST = 2  # workers that may train without the others
RESTARTS = 3
RETURN_SECONDS = 300.0  # for all workers to train again
SETTLE_SECONDS = 10.0  # after all train again, in which pauses still count
POLL_SECONDS = 0.1
SNAPSHOT = "snapshot.pt"
PORT = 29400
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

Agent = Callable[[Sequence[str], argparse.Namespace], None]


def of_torchrun(worker: Worker) -> Iterator[tuple[nn.Module, Step]]:
    """DistributedDataParallel, with a snapshot every PERIOD steps."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    optimizer, snapshot, steps = worker.adamw(), worker.folder / SNAPSHOT, 0
    if snapshot.exists():
        state = torch.load(snapshot)
        worker.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def take_step() -> None:
        nonlocal steps
        optimizer.step()
        steps += 1
        if dist.get_rank() == 0 and steps % PERIOD == 0:
            draft = snapshot.with_suffix(".draft")
            torch.save({"model": worker.model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
            draft.rename(snapshot)

    yield DistributedDataParallel(worker.model, gradient_as_bucket_view=True), take_step


def of_gossamer(worker: Worker, recipe: str) -> Iterator[tuple[nn.Module, Step]]:
    import gossamer

    gossamer.init()
    optimizer = worker.adamw()
    with gossamer.attach(worker.model, optimizer, recipe):
        yield worker.model, optimizer.step


def torchrun(command: Sequence[str], args: argparse.Namespace) -> NoReturn:
    """Become torchrun's agent of this host."""
    interface, address = outward()
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{os.environ['MASTER_ADDR']}:{PORT}"]
    rendezvous += ["--rdzv-id", "peers", "--rdzv-conf", f"is_host={int(os.environ['RANK'] == '0')}"]
    rendezvous += ["--local-addr", address, "--nnodes", str(args.workers), "--nproc-per-node", "1"]
    agent = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--max-restarts", str(RESTARTS)]
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.execv(sys.executable, [*agent, *command[1:]])  # it starts Python itself


def restarter(command: Sequence[str], args: argparse.Namespace) -> None:
    """Start the process again whenever it ends."""
    for _ in range(1 + RESTARTS):
        subprocess.call(command)
    raise SystemExit(f"the process of torchft or hivemind ended {1 + RESTARTS} times")


@dataclass(frozen=True)
class KillArm:
    """An arm, and the agent that keeps its process on every host; None: `gossamer run` itself does."""

    arm: Arm
    agent: Agent | None


ARMS: dict[str, KillArm] = {
    "DDP, torchrun": KillArm(of_torchrun, torchrun),
    "torchft, DDP": KillArm(partial(of_torchft, way="ddp", least=LEAST), restarter),
    "hivemind, parameters every 50 steps, 8 bits": KillArm(partial(of_hivemind, local_steps=50), restarter),
    "Gossamer, Int8()": KillArm(partial(of_gossamer, recipe="Int8()"), None),
    "Gossamer, Float4()": KillArm(partial(of_gossamer, recipe="Float4()"), None),
    f"Gossamer, {ALIGNED}": KillArm(partial(of_gossamer, recipe=LADDER[ALIGNED].recipe), None),
    f"Gossamer, {FRAGMENTS}": KillArm(partial(of_gossamer, recipe=LADDER[FRAGMENTS].recipe), None),
}


def outward() -> tuple[str, str]:
    """Interface and address of this emulated host."""
    return next(each for each in interfaces().items() if each[0] != "lo")


def command_of(arm: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """The run of an arm on emulated hosts."""
    elastic = ["--workers", f"{LEAST}:{args.workers}", "--max-restarts", str(RESTARTS)]
    workers = ["--workers", str(args.workers)] if ARMS[arm].agent else elastic
    options = [*workers, "--network", args.network, "--grace-seconds", "0", "--logs", str(folder / "logs")]
    return [sys.executable, "-m", "gossamer", "run", *options, *script_of(arm, args, folder), "--agent"]


def script_of(arm: str, args: argparse.Namespace, folder: Path) -> list[str]:
    job = ["--workers", str(args.workers), "--size", args.size, "--batch", str(args.batch)]
    return [str(ROOT / "benchmarks" / "peers.py"), "--kills", "--role", arm, "--folder", str(folder), *job]


def work(args: argparse.Namespace) -> None:
    """One worker, or the agent that keeps it running. Each step that counts is written down."""
    agent, place = ARMS[args.arm].agent, os.environ["RANK"] if args.place is None else args.place
    if args.agent and agent is not None:
        agent([sys.executable, *script_of(args.arm, args, args.folder), "--place", place], args)
        return
    if agent is not None:
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)  # ends with its agent, whatever ends that
    torch.set_num_threads(1)
    worker, log = Worker(args), StepLog(args.folder, int(place))
    training, _ = texts()
    draw = torch.Generator().manual_seed(int(place))
    with contextmanager(ARMS[args.arm].arm)(worker) as (model, take_step):
        while True:
            loss = model(training[torch.randint(len(training), (args.batch,), generator=draw)])
            loss.backward()
            if take_step() is not False:
                log.write(log.lines + 1, loss.item(), args.workers, int(place))
            worker.model.zero_grad()


@dataclass(frozen=True)
class Recovery:
    """Seconds: of a step before the kill; from the kill until every survivor has made a step that began after it, and
    until the replacement has, too; of the longest pause of a survivor from the kill on."""

    step: float
    survivors: float
    all: float
    pause: float


def recovery(processes: Sequence[WorkerProcess], killed: float, workers: int) -> Recovery | None:
    """What the processes wrote down; None until all train again. killed: moment of the kill, at the place VICTIM."""
    firsts = {place: first_step(processes, place, killed) for place in range(workers)}
    known = {place: moment - killed for place, moment in firsts.items() if moment is not None}
    if len(known) < workers:
        return None
    places = {place: moments_of(processes, place) for place in known}
    before = [late - early for early, late in pairwise(places[VICTIM]) if late <= killed]
    survivors = set(known) - {VICTIM}
    pauses = [late - early for place in survivors for early, late in pairwise(places[place]) if late > killed]
    return Recovery(
        step=sum(before) / len(before),
        survivors=max(known[place] for place in survivors),
        all=max(known.values()),
        pause=max(pauses),
    )


def first_step(processes: Sequence[WorkerProcess], place: int, killed: float) -> float | None:
    """When a place completed the first step that began after the kill. A process's first step counts as begun then."""
    found = list[float]()
    for each in processes:
        moments = [step.moment for step in each.steps if each.place == place]
        if moments and moments[0] > killed:
            found.append(moments[0])
        else:
            found += [late for early, late in pairwise(moments) if early > killed][:1]
    return min(found, default=None)


def moments_of(processes: Sequence[WorkerProcess], place: int) -> list[float]:
    """When a place completed steps, in all its processes."""
    return sorted(step.moment for each in processes if each.place == place for step in each.steps)


def kill(pid: int) -> float:
    """Kill a process and its descendants; returns when, in monotonic seconds."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    moment = time.monotonic()
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    return moment


def measure(arm: str, args: argparse.Namespace) -> Recovery | str:
    """Kill a worker of an arm once, or return why it could not be measured."""
    with tempfile.TemporaryDirectory() as name:
        running = DrivenRun(command_of(arm, args, Path(name)), Path(name))
        try:
            running.wait_for(args.workers)
            running.sleep(args.seconds)
            killed = kill(running.training()[VICTIM].pid)
            until = killed + RETURN_SECONDS
            while recovery(read(running.folder), killed, args.workers) is None:
                running.check()
                if time.monotonic() > until:
                    raise SystemExit(f"not all workers trained again within {RETURN_SECONDS:g} s")
                time.sleep(POLL_SECONDS)
            running.sleep(SETTLE_SECONDS)
            found = recovery(read(running.folder), killed, args.workers)
            assert found is not None
            return found
        except SystemExit as problem:
            if args.verbose:
                print(problem, running.text, sep="\n", file=sys.stderr)
            return failure_of(str(problem)) or str(problem).splitlines()[0][:120]
        finally:
            running.end()


def row(arm: str, found: Sequence[Recovery]) -> dict[str, str]:
    return {
        "arm": arm,
        "step before": spread([1000 * each.step for each in found], " ms"),
        "survivors' next step": spread([each.survivors for each in found], " s", 1),
        "longest pause of a survivor": spread([each.pause for each in found], " s", 1),
        "all workers train again": spread([each.all for each in found], " s", 1),
    }


def table(found: Mapping[str, Sequence[Recovery | str]]) -> str:
    """A row for every arm that trained again; below it, why the others did not."""
    return table_with_failures(found, row, "Did not train again.")


def main(args: argparse.Namespace) -> None:
    found = in_turns(args, measure, str)
    parts = [
        "# A killed worker, with each peer",
        "How soon do the other workers train after one is killed, and when do all train again?",
        f"The job of [peers on one job](peers.md): examples/bytelm.py, {args.size} ({parameters_of(args.size):,} "
        f"parameters), batch {args.batch}, {args.workers} workers, each an emulated host on {args.network}. After "
        f"{args.seconds:g} s of training with all workers, worker {VICTIM} and its child processes are killed "
        f"(SIGKILL). Rounds take turns: {args.rounds}. Figures are medians, with the least and the most.",
        "Next step: the first that began after the kill, at the last of the survivors. Pause: the longest time between "
        f"two steps of a survivor, from the kill until {SETTLE_SECONDS:g} s after all train again. All workers train "
        "again: the replacement, too, has the others' parameters and has made a step.",
        f"torchrun restarts all workers of DDP, from a snapshot of every {PERIOD} steps on a shared disk; it makes the "
        f"steps since then again. torchft runs with at least {LEAST} replicas, a heartbeat timeout of 1 s and an "
        f"exchange timeout of {SHORT_SECONDS:g} s (its defaults: 5 and 60 s). "
        f"hivemind's peers look for each other for {MEETING_SECONDS:g} s before an average, and train meanwhile; the "
        "replacement counts from the first step after it has loaded their state. Processes of torchft and hivemind are "
        f"restarted by a loop, workers of Gossamer by `gossamer run --workers {LEAST}:{args.workers} --max-restarts "
        f"{RESTARTS}`.",
        f"{provenance()} Versions: {versions()}.",
        table(found),
    ]
    write_page(args.output, parts)
