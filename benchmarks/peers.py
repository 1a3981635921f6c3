"""Peers on one job: DDP and its hooks, torchft, hivemind and recipes train one model on one emulated network.

All arms make the same training loop: examples/bytelm.py's model, the same random batches, AdamW at the same learning
rate, one emulated host for every worker. They take turns, and each trains for the same seconds. Writes
a page into docs/benchmarks; with --kills another one, of what follows when a worker is killed.

    make bench-peers                            # installs torchft and hivemind into .venv-peers
    python benchmarks/peers.py [--network SPEC] [--seconds 90] [--rounds 3] [--arms NAME ...]
    python benchmarks/peers.py --kills [--seconds 20] [--rounds 3] [--arms NAME ...]
    python benchmarks/peers.py --quick          # a minute, into runs/quick, to see that it runs
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import psutil
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_worker import texts, validation  # found only after the line above
from benchmarks.ladder_arms import ARMS as LADDER
from benchmarks.provenance import ROOT, provenance, scratch
from benchmarks.report import markdown, write_page
from benchmarks.time_to_loss import steps_to
from examples.bytelm import SIZES, ByteLM

from gossamer.base.units import bytes_text
from gossamer.comm.environment import interfaces

PAGE: Path = ROOT / "docs" / "benchmarks" / "peers.md"
LEARNING_RATE, OUTER_RATE, OUTER_MOMENTUM = 1e-3, 0.7, 0.9  # outer: as torchft's example of DiLoCo has them
PERIOD = 20  # steps between two exchanges of torchft's periodic arms
MEETING_SECONDS = 3.0  # in which hivemind's peers form a group; its guide recommends 3 to 5 on small local runs
EXCHANGE_SECONDS = 120.0
SHORT_SECONDS = 10.0  # of an exchange of torchft's where replicas are killed
START_SECONDS = 120.0
EVALUATE_SECONDS = 3.0
RESULT = "result.json"

Step = Callable[[], object]  # False: the step was not committed, or not with the other workers' parameters
Arm = Callable[["Worker"], Iterator[tuple[nn.Module, Step]]]
Found = TypeVar("Found")


class Outcome(TypedDict):
    """What the first worker measured. curve: (seconds of training, steps, held-out loss) at every evaluation."""

    seconds: float
    steps: int
    bytes: int
    memory: int
    curve: list[tuple[float, int, float]]


class Worker:
    """A worker's place in the job, its model, and its inner optimizer's factory."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(args.workers)
        self.batch: int = args.batch
        self.folder: Path = args.folder
        self.interface, self.address = next(each for each in interfaces().items() if each[0] != "lo")
        torch.manual_seed(0)
        self.model = ByteLM(*SIZES[args.size])

    def adamw(self, parameters: Any = None) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.model.parameters() if parameters is None else parameters, lr=LEARNING_RATE)

    def shared(self, name: str, make: Callable[[], str]) -> str:
        """A text of the first worker, which the others read."""
        path = self.folder / name
        if self.rank == 0:
            draft = path.with_suffix(".draft")
            draft.write_text(make())
            draft.rename(path)
        while not path.exists():
            time.sleep(0.02)
        return path.read_text()


def of_torch(worker: Worker, hook: str = "") -> Iterator[tuple[nn.Module, Step]]:
    """DistributedDataParallel, with one of its communication hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    import gossamer

    gossamer.init()  # the process group, as for every script
    megabytes = 1000 if hook == "powersgd" else 25  # torch's PowerSGD hook aborts on Gloo with several buckets
    model = DistributedDataParallel(worker.model, gradient_as_bucket_view=True, bucket_cap_mb=megabytes)
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    yield model, worker.adamw().step


def of_gossamer(worker: Worker, recipe: str) -> Iterator[tuple[nn.Module, Step]]:
    import gossamer

    gossamer.init()
    optimizer = worker.adamw()
    with gossamer.attach(worker.model, optimizer, recipe) as session, session.epoch():
        yield worker.model, optimizer.step


def of_torchft(worker: Worker, way: str, least: int | None = None) -> Iterator[tuple[nn.Module, Step]]:
    """torchft on Gloo, a replica group of one process on every host.

    Args:
        way: ddp, local or diloco.
        least: replicas that train without the others, with ddp only; None: training needs all, and none recovers.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    os.environ["GLOO_SOCKET_IFNAME"] = worker.interface
    socket.gethostname = lambda: (
        worker.address
    )  # torchft's checkpoints are served under it; emulated hosts have no name
    servers = list[Any]()
    seconds = EXCHANGE_SECONDS if least is None else SHORT_SECONDS
    patience = {"join_timeout_ms": 10_000}
    if least is not None:  # as benchmarks/lost_workers_torchft.py
        patience = {"join_timeout_ms": 2000, "heartbeat_timeout_ms": 1000, "quorum_tick_ms": 50}

    def lighthouse() -> str:
        servers.append(LighthouseServer(bind="0.0.0.0:29400", min_replicas=least or worker.size, **patience))
        return f"http://{worker.address}:29400"

    address = worker.shared("lighthouse", lighthouse)
    store = TCPStore(worker.address, 0, is_master=True, wait_for_workers=False)
    inner = worker.adamw()

    def load(state: dict[str, Any]) -> None:
        worker.model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=seconds)),
        load_state_dict=load,
        state_dict=lambda: {"model": worker.model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=least or worker.size,
        use_async_quorum=way != "diloco",
        replica_id=f"replica{worker.rank}",
        lighthouse_addr=address,
        hostname=worker.address,
        store_addr=worker.address,
        store_port=store.port,
        rank=0,
        world_size=1,
        init_sync=least is not None,  # all begin with the same seed
        timeout=timedelta(seconds=2 * seconds),
        quorum_timeout=timedelta(seconds=EXCHANGE_SECONDS),
    )
    if way == "ddp":
        optimizer = Optimizer(manager, inner)
        model = DistributedDataParallel(manager, worker.model)

        def take_step() -> bool:
            before = manager.current_step()
            optimizer.step()
            committed = bool(manager.current_step() > before)
            optimizer.zero_grad()  # begins the next quorum
            return committed

        optimizer.zero_grad()
        yield model, take_step
    elif way == "local":
        with LocalSGD(manager, worker.model, inner, sync_every=PERIOD):
            yield worker.model, inner.step
    else:
        outer = torch.optim.SGD(worker.model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
        with DiLoCo(manager, [worker.model], inner, outer, sync_every=PERIOD, pin_memory=False):
            yield worker.model, inner.step


def of_hivemind(worker: Worker, local_steps: int) -> Iterator[tuple[nn.Module, Step]]:
    """hivemind's Optimizer, parameters in 8 bits. It averages after this many steps of all peers."""
    import hivemind

    own = [f"/ip4/{worker.address}/tcp/0"]
    hosts = list[Any]()

    def first() -> str:
        hosts.append(hivemind.DHT(host_maddrs=own, start=True))
        return "\n".join(map(str, hosts[0].get_visible_maddrs()))

    known = worker.shared("peers", first).splitlines()
    dht = hosts[0] if hosts else hivemind.DHT(host_maddrs=own, initial_peers=known, start=True)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="peers",
        batch_size_per_step=worker.batch,
        target_batch_size=worker.batch * worker.size * local_steps,
        optimizer=worker.adamw(),
        use_local_updates=True,
        matchmaking_time=MEETING_SECONDS,
        averaging_timeout=EXCHANGE_SECONDS,
        state_averaging_compression=hivemind.compression.Uniform8BitQuantization(),
    )
    joined = False

    def take_step() -> bool:
        nonlocal joined
        had_joined = joined
        optimizer.step()  # a peer that is late loads the others' state here, or trains alone until it knows of them
        joined = joined or optimizer.local_epoch >= optimizer.tracker.global_epoch
        return had_joined

    yield worker.model, take_step


ALIGNED = "every 4 steps, 1 bit, momentum aligned"
FRAGMENTS = "8 fragments, each every 32 steps, 1 bit, momentum aligned, outer rate 2"
ARMS: dict[str, Arm] = {
    "DDP": of_torch,
    "DDP + fp16 hook": partial(of_torch, hook="fp16"),
    "DDP + PowerSGD hook, rank 4": partial(of_torch, hook="powersgd"),
    "torchft, DDP": partial(of_torchft, way="ddp"),
    f"torchft, LocalSGD of {PERIOD} steps": partial(of_torchft, way="local"),
    f"torchft, DiLoCo of {PERIOD} steps": partial(of_torchft, way="diloco"),
    "hivemind, parameters every 50 steps, 8 bits": partial(of_hivemind, local_steps=50),
    "Gossamer, Int8()": partial(of_gossamer, recipe="Int8()"),
    "Gossamer, Float4()": partial(of_gossamer, recipe="Float4()"),
    f"Gossamer, {ALIGNED}": partial(of_gossamer, recipe=LADDER[ALIGNED].recipe),
    f"Gossamer, {FRAGMENTS}": partial(of_gossamer, recipe=LADDER[FRAGMENTS].recipe),
}
DDP = next(iter(ARMS))


def transferred(interface: str) -> int:
    """Bytes on the interface so far, of both directions, headers included."""
    counters = psutil.net_io_counters(pernic=True)[interface]
    return int(counters.bytes_sent + counters.bytes_recv)


def memory() -> int:
    """Bytes of this process and its children; pages that several share count in parts."""
    this = psutil.Process()
    total = 0
    for each in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            total += each.memory_full_info().pss
    return int(total)


def work(args: argparse.Namespace) -> None:
    """One worker. The first measures; the clock stands still while it evaluates."""
    torch.set_num_threads(1)
    worker = Worker(args)
    training, exam = texts()
    draw = torch.Generator().manual_seed(worker.rank)
    with contextmanager(ARMS[args.arm])(worker) as (model, take_step):
        began = before = 0.0
        steps, evaluated, evaluating, curve = 0, 0.0, 0.0, list[tuple[float, int, float]]()
        while True:
            model(training[torch.randint(len(training), (args.batch,), generator=draw)]).backward()
            take_step()
            worker.model.zero_grad()
            steps += 1
            if worker.rank:
                continue
            if steps == 1:  # connections are there, and memory is reserved
                began, before = time.monotonic(), transferred(worker.interface)
                continue
            seconds = time.monotonic() - began - evaluating
            if seconds >= evaluated + EVALUATE_SECONDS or seconds >= args.seconds:
                pause, evaluated = time.monotonic(), seconds
                curve.append((seconds, steps - 1, validation(worker.model, exam)))
                evaluating += time.monotonic() - pause
            if seconds >= args.seconds:
                sent = transferred(worker.interface) - int(before)
                found = Outcome(seconds=seconds, steps=steps - 1, bytes=sent, memory=memory(), curve=curve)
                worker.shared(RESULT, partial(json.dumps, found))
                time.sleep(EXCHANGE_SECONDS)  # is ended meanwhile; the others wait for it


def measure(arm: str, args: argparse.Namespace) -> Outcome | str:
    """Train an arm once, or return why it did not train."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--network", args.network, "--workers", str(args.workers), "--grace-seconds", "0"]
        options += ["--logs", str(folder / "logs")]
        script = [__file__, "--role", arm, "--folder", name, "--size", args.size, "--batch", str(args.batch)]
        script += ["--workers", str(args.workers)]
        command = [sys.executable, "-m", "gossamer", "run", *options, *script, "--seconds", str(args.seconds)]
        with (folder / "output").open("w+") as output:
            run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
            until = time.monotonic() + 3 * args.seconds + START_SECONDS
            while not (done := (folder / RESULT).exists()) and run.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            found: Outcome | None = json.loads((folder / RESULT).read_text()) if done else None
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
            try:
                run.wait(30)
            except subprocess.TimeoutExpired:
                run.kill()
            said = (folder / "output").read_text(errors="replace")
    if found is not None:
        return found
    if args.verbose:
        print(said, file=sys.stderr)
    return failure_of(said) or f"no result within {3 * args.seconds + START_SECONDS:.0f} s"


def failure_of(said: str) -> str:
    """The last line that names an error; empty if there is none."""
    telling = [line.strip() for line in said.splitlines() if "Error" in line or "error" in line]
    return telling[-1][:120] if telling else ""


def spread(values: Sequence[float], unit: str = "", digits: int = 0) -> str:
    middle = f"{statistics.median(values):,.{digits}f}"
    around = f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})" if len(values) > 1 else ""
    return f"{middle}{unit}{around}"


def row(arm: str, outcomes: Sequence[Outcome], goal: float | None) -> dict[str, str]:
    reached = [None if goal is None else steps_to(goal, each["curve"]) for each in outcomes]
    moments = [each for each in reached if each is not None]
    return {
        "arm": arm,
        "step": spread([1000 * each["seconds"] / each["steps"] for each in outcomes], " ms"),
        "steps": spread([each["steps"] for each in outcomes]),
        "held-out loss": spread([each["curve"][-1][2] for each in outcomes], digits=3),
        "seconds to DDP's loss": spread(moments) if len(moments) == len(reached) else "not reached",
        "bytes of a step": bytes_text(statistics.median(each["bytes"] / each["steps"] for each in outcomes)),
        "memory of a worker": bytes_text(statistics.median(each["memory"] for each in outcomes)),
    }


def table(found: Mapping[str, Sequence[Outcome | str]]) -> str:
    """A row for every arm that trained; below it, why the others did not."""
    ends = [each["curve"][-1][2] for each in found.get(DDP, []) if not isinstance(each, str)]
    goal = statistics.median(ends) if ends else None
    return table_with_failures(found, partial(row, goal=goal), "Did not train.")


def table_with_failures(
    found: Mapping[str, Sequence[Found | str]], row: Callable[[str, list[Found]], dict[str, str]], failed: str
) -> str:
    """A row for every arm with results; below it, after the text `failed`, the reasons of those without."""
    good = {arm: [each for each in results if not isinstance(each, str)] for arm, results in found.items()}
    rows = [row(arm, results) for arm, results in good.items() if results]
    reasons = [f"{arm}: {each}." for arm, results in found.items() for each in results if isinstance(each, str)]
    return "\n\n".join([markdown(rows)] * bool(rows) + ([f"{failed} {' '.join(reasons)}"] if reasons else []))


def parameters_of(size: str) -> int:
    return sum(each.numel() for each in ByteLM(*SIZES[size]).parameters())


def versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = list[str]()
    for name in ("torch", "torchft", "hivemind"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def in_turns(
    args: argparse.Namespace,
    measure: Callable[[str, argparse.Namespace], Found | str],
    text: Callable[[Found | str], object],
) -> dict[str, list[Found | str]]:
    """Measure every arm once a round, and print each result. With --quick: one short round, for a page of its own."""
    if args.quick:
        args.seconds, args.rounds, args.size, args.output = 4.0, 1, "tiny", scratch(args.output)
    found: dict[str, list[Found | str]] = {arm: [] for arm in args.arms}
    for number in range(args.rounds):
        for arm, results in found.items():
            results.append(result := measure(arm, args))
            print(f"round {number + 1} of {args.rounds}: {arm}: {text(result)}", file=sys.stderr, flush=True)
    return found


def summary(outcome: Outcome | str) -> str:
    return outcome if isinstance(outcome, str) else f"{outcome['steps']} steps, {outcome['curve'][-1][2]:.3f}"


def main(args: argparse.Namespace) -> None:
    found = in_turns(args, measure, summary)
    parts = [
        "# Peers on one job",
        "How fast do recipes train on one slow network, compared with DDP, its hooks, torchft and hivemind?",
        f"examples/bytelm.py, {args.size} ({parameters_of(args.size):,} parameters), batch {args.batch}, "
        f"{args.workers} workers, each an emulated host on {args.network}. Every arm trains for {args.seconds:g} s "
        f"with AdamW at {LEARNING_RATE:g}; rounds take turns: {args.rounds}. Figures are medians, with the least and "
        "the most. Loss: of the first worker's model, on held-out text; evaluations do not count as time. DDP's loss "
        "is the median of its final losses; a run that ends above it has not reached it. Bytes: on the first worker's "
        "network interface, both directions, headers included. Memory: of its process and its children.",
        f"torchft averages by Gloo. hivemind's peers look for each other for {MEETING_SECONDS:g} s before an average, "
        "and train meanwhile. Arms are not tuned: the learning rate is the same, and outer rates are those of the "
        "peers' examples. What a killed worker costs is on [killed workers](peers-kills.md), simulations of federated "
        "learning on [Flower](flower.md), and losses with tuned rates on [retained benefit](ladder.md).",
        f"{provenance()} Versions: {versions()}.",
        table(found),
    ]
    write_page(args.output, parts)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--network", default="20mbit,20ms", metavar="SPEC")
    options.add_argument("--kills", action="store_true", help="kill a worker, and measure when the others train again")
    options.add_argument("--arms", nargs="+", metavar="NAME", help="default: all")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--size", choices=SIZES, default="small")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--seconds", type=float, default=90.0, help="of training, for every arm and round")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--output", type=Path)
    options.add_argument("--verbose", action="store_true", help="print the output of an arm that does not train")
    options.add_argument("--quick", action="store_true", help="a few seconds of a small model, in a file of their own")
    options.add_argument("--role", dest="arm", help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--place", help=argparse.SUPPRESS)
    options.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    names, page, run_worker, run_all = list(ARMS), PAGE, work, main
    if given.kills:
        from benchmarks import peers_kills

        names, page = list(peers_kills.ARMS), peers_kills.PAGE
        run_worker, run_all = peers_kills.work, peers_kills.main
    given.arms, given.output = given.arms or names, given.output or page
    if unknown := set(given.arms) - set(names):
        options.error(f"no such arm: {', '.join(unknown)}; choose from {', '.join(names)}")
    (run_worker if given.arm else run_all)(given)
