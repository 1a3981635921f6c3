"""Lost workers with torchft: the same model, losses and table as benchmarks/lost_workers.py, by torchft on Gloo.

torchft is not installed with Gossamer; it needs a Python environment that has Gossamer's packages, too:

    pip install torchft==0.2.0
    python benchmarks/lost_workers_torchft.py [--minutes 10] [--every 10] [--seeds 0 1 2] [--ways ddp plain] [--quick]

Four replica groups of one process each, a lighthouse, at least two replicas; a process that ends otherwise than it
should is started again at once, as `gossamer run --max-restarts` does. ddp: torchft's DistributedDataParallel; plain:
its manager averages each gradient after backward, and nothing is overlapped.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import STOP, DrivenRun  # found only after the line above
from benchmarks.lost_workers import LEAST, WORKERS, measure, read_options, shorten

HEARTBEAT_MS = 1000  # its default is 5000
EXCHANGE_SECONDS, QUORUM_SECONDS = 5.0, 30.0
LEAD_STEPS = 20  # between the wish to stop and the step after which all do
POLL_SECONDS = 0.02
FAILURES = 30  # of processes that nobody killed, after which it is given up
WAYS = ("ddp", "plain")
LAST_LINES = 4


def work(args: argparse.Namespace) -> None:
    """One replica, whose steps are written down as benchmarks/elastic_worker.py does."""
    import torch
    from benchmarks.elastic_worker import BATCH, SIZES, StepLog, parameter_hash, texts, validation
    from examples.bytelm import ByteLM
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    log = StepLog(args.folder, args.place)
    training, exam = texts()
    model = ByteLM(*SIZES[args.size])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=EXCHANGE_SECONDS)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=LEAST,
        replica_id=f"replica{args.place}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=2 * EXCHANGE_SECONDS),
        quorum_timeout=timedelta(seconds=QUORUM_SECONDS),
    )
    trained = DistributedDataParallel(manager, model) if args.way == "ddp" else model
    optimizer = Optimizer(manager, inner)
    draw = torch.Generator()
    while (step := manager.current_step()) < min(args.steps, last_step(args.folder, step)):
        optimizer.zero_grad()
        draw.manual_seed(1_000_000 * args.seed + WORKERS * step + args.place)
        loss = trained(training[torch.randint(len(training), (BATCH,), generator=draw)])
        loss.backward()
        if args.way == "plain":
            for each in [manager.allreduce(each.grad) for each in model.parameters() if each.grad is not None]:
                each.wait()
        optimizer.step()
        if manager.current_step() > step:
            rank = manager.participating_rank()
            log.write(manager.current_step(), loss.item(), manager.num_participants(), -1 if rank is None else rank)
    size = manager.num_participants()
    log.end(hash=parameter_hash(model), loss=validation(model, exam), step=manager.current_step(), size=size)
    time.sleep(1.0)  # who is behind may need this replica for its last step
    sys.stdout.flush()
    os._exit(0)  # its threads would stay


def last_step(folder: Path, step: int) -> int:
    """After which all stop: who sees the wish first says it."""
    target = folder / "last-step"
    if (folder / STOP).exists() and not target.exists():
        draft = folder / f"last-step-{os.getpid()}"
        draft.write_text(str(step + LEAD_STEPS))
        with suppress(FileExistsError):
            os.link(draft, target)
    return int(target.read_text()) if target.exists() else sys.maxsize


def launch(args: argparse.Namespace) -> None:
    """A lighthouse and the replicas, until all have ended as they should."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=LEAST,
        join_timeout_ms=2000,
        heartbeat_timeout_ms=HEARTBEAT_MS,
        quorum_tick_ms=50,
    )
    quiet = {"RUST_LOG": "error", "RUST_BACKTRACE": "0"}
    near = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    starts = 0

    def start(place: int) -> subprocess.Popen[bytes]:
        nonlocal starts
        starts += 1
        command = [sys.executable, __file__, "--role", "worker", "--place", str(place), "--folder", str(args.folder)]
        command += ["--seed", str(args.seed), "--size", args.size, "--steps", str(args.steps), "--way", args.way]
        with (args.folder / f"{place}-{starts}.log").open("wb") as log:
            return subprocess.Popen(command, env={**os.environ, **near, **quiet}, stdout=log, stderr=log)

    def said(place: int) -> str:
        newest = max(args.folder.glob(f"{place}-*.log"), key=lambda path: int(path.stem.split("-")[1]))
        lines = [line for line in newest.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-LAST_LINES:])

    replicas = {place: start(place) for place in range(WORKERS)}
    failures, done = 0, set[int]()
    try:
        while len(done) < WORKERS:
            time.sleep(POLL_SECONDS)
            for place, replica in replicas.items():
                code = replica.poll()
                if code is None or place in done:
                    continue
                if code == 0:
                    done.add(place)
                    continue
                if code != -9:
                    failures += 1
                    print(f"replica {place}, which nobody killed, ended with {code}: {said(place)}", flush=True)
                if failures >= FAILURES:
                    raise SystemExit(f"{failures} processes that nobody killed ended by themselves")
                replicas[place] = start(place)
    finally:
        for replica in replicas.values():
            replica.kill()
        lighthouse.shutdown()


@contextmanager
def run(way: str, script: Sequence[str], keep: Path | None) -> Iterator[DrivenRun]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--role", "launcher", "--way", way, "--folder", str(folder), *script]
        running = DrivenRun(command, folder)
        try:
            yield running
        finally:
            running.end()


if __name__ == "__main__":
    options = read_options(__doc__.split("\n")[0])
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    for name in ("--role", "--way"):
        options.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--seed", "--place", "--steps"):
        options.add_argument(name, type=int, default=sys.maxsize if name == "--steps" else 0, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.role is not None:
        (work if given.role == "worker" else launch)(given)
    else:
        if given.quick:
            shorten(given)
        by = f"torchft 0.2.0, on Gloo, with a heartbeat's patience of {HEARTBEAT_MS} ms"
        measure({f"torchft, {way}": partial(run, way) for way in given.ways}, by, given)
