"""Slices of JAX devices on an emulated network: seconds per step over one slice alone, and a slice that is replaced.

Each of three workers is a slice: one process with eight virtual CPU devices, over which the model is sharded.

1. Blocks of steps alternate in one run: without a session, as one slice alone trains, and under each recipe. All slices
   share the machine in each block, so other load slows all blocks alike. Ratios are those of one round.
2. An elastic run: one slice is killed (SIGKILL) and the launcher starts another process in its place. Measured: seconds
   until that process has made its first step that averages with the others, and their longest step meanwhile.

    python benchmarks/jax_slices.py [--rounds 7] [--kills 3] [--network 100mbit,20ms]    # root, for the network
    python benchmarks/jax_slices.py --quick                                              # to see that it runs
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import STOP, DrivenRun, WorkerProcess, read, spread  # found only after the line above
from benchmarks.provenance import provenance
from benchmarks.report import markdown

SLICES, DEVICES = 3, 8
PERIOD = 10
RECIPES = (f"DiLoCo(period={PERIOD}) + Int8()", "TopK(0.01)")
WIDTH, DEPTH = 256, 4
WARM_UP, BEFORE_KILL = 10, 20  # steps
PATIENCE_SECONDS = 600.0

# -- a slice -----------------------------------------------------------------------------------------------------------


class Slice:
    """The model of one slice, sharded over its devices, and one step of it."""

    def __init__(self, batch: int) -> None:
        import jax
        import numpy as np
        import optax
        from benchmarks.jax_overhead import layers, loss
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        optimizer = optax.adam(1e-3)

        def apply(parameters: Any, moments: Any, mean: Any) -> Any:
            updates, moments = optimizer.update(mean, moments, parameters)
            return optax.apply_updates(parameters, updates), moments

        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("model",)), PartitionSpec(None, "model"))
        self.parameters: Any = jax.device_put(layers(WIDTH, DEPTH), sharding)
        self.moments: Any = jax.jit(optimizer.init)(self.parameters)
        self._gradient, self._update, self._wait = (
            jax.jit(jax.value_and_grad(loss)),
            jax.jit(apply),
            jax.block_until_ready,
        )
        self._batch, self._draw = batch, np.random.default_rng(os.getpid())

    def session(self, recipe: str | None) -> Any:
        import gossamer.jax

        session = gossamer.jax.Session(self.parameters, recipe, state=lambda: self.moments)
        self.parameters, self.moments = session.parameters, session.state
        return session

    def step(self, session: Any = None) -> float:
        """One step; None: without other slices. Returns the loss."""
        found, gradients = self._gradient(
            self.parameters, self._draw.normal(size=(self._batch, WIDTH)).astype("float32")
        )
        mean = gradients if session is None else session.give(gradients)
        if mean is not None:
            self.parameters, self.moments = self._update(self.parameters, self.moments, mean)
        if session is not None:
            self.parameters = session.took_step(self.parameters)
        self._wait(self.parameters)
        return float(found)


def alternate(args: argparse.Namespace) -> None:
    """A slice of a fixed run: blocks of steps in turns. Rank 0 prints the seconds per step of each block."""
    import gossamer

    world = gossamer.init()
    plain, slices = Slice(args.batch), {recipe: Slice(args.batch) for recipe in RECIPES}
    sessions = {recipe: each.session(recipe) for recipe, each in slices.items()}
    blocks: dict[str, Callable[[], float]] = {"one slice alone": plain.step}
    blocks |= {recipe: lambda r=recipe: slices[r].step(sessions[r]) for recipe in RECIPES}  # type: ignore[misc]
    found: dict[str, list[float]] = {name: [] for name in blocks}
    for round_number in range(args.rounds + 1):
        for name, step in blocks.items():
            world.all_gather(0)
            begin = time.perf_counter()
            for _ in range(args.steps if round_number else WARM_UP):
                step()
            seconds = (time.perf_counter() - begin) / args.steps
            if round_number:
                found[name].append(statistics.mean(world.all_gather(seconds)))
    sent = {recipe: session.stats.run.bytes_sent / session.stats.run.steps for recipe, session in sessions.items()}
    for session in sessions.values():
        session.close()
    if world.is_first:
        print("RESULT " + json.dumps({"seconds": found, "bytes": sent}), flush=True)


def train(args: argparse.Namespace) -> None:
    """A slice of an elastic run, until the file STOP is there. Each step is written into a file of this process."""
    import jax
    from benchmarks.elastic_worker import StepLog

    import gossamer

    log, world, mine = StepLog(args.folder, int(os.environ["GOSSAMER_PLACE"])), gossamer.init(), Slice(args.batch)
    with mine.session(None) as session:
        while not session.should_stop:
            loss = mine.step(session)
            log.write(session.steps, loss, world.size, world.rank)
            if (args.folder / STOP).exists():
                session.request_stop()
        agreed = jax.device_get(session.averaged_parameters())
        log.end(hash=hashlib.sha256(b"".join(each.tobytes() for each in agreed.values())).hexdigest()[:16])


# -- the driver --------------------------------------------------------------------------------------------------------


@contextmanager
def started(workers: str, args: argparse.Namespace, *options: str, part: str) -> Iterator[DrivenRun]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "steps"
        folder.mkdir()
        network = [] if args.network == "none" else ["--network", args.network]
        command = [sys.executable, "-m", "gossamer", "run", "--workers", workers, "--logs", temporary, *network]
        script = [__file__, "--part", part, "--folder", str(folder)]
        counts = ["--rounds", str(args.rounds), "--steps", str(args.steps), "--batch", str(args.batch)]
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
        running = DrivenRun([*command, *options, *script, *counts], folder, environment)
        try:
            yield running
        finally:
            running.end()


def compare(args: argparse.Namespace) -> str:
    """The table of seconds per step."""
    with started(str(SLICES), args, part="alternate") as running:
        if code := running.wait(PATIENCE_SECONDS):
            raise SystemExit(f"the fixed run ended with {code}:\n{running.text[-3000:]}")
        told = json.loads(next(line for _, line in running.said if "RESULT " in line).partition("RESULT ")[2])
    alone = told["seconds"]["one slice alone"]
    rows = []
    for name, seconds in told["seconds"].items():
        ratios = [each / base for each, base in zip(seconds, alone, strict=True)]
        rows.append(
            {
                "": name,
                "ms a step": spread([1000 * each for each in seconds], 1),
                "over one slice alone": "" if name not in RECIPES else spread(ratios),
                "kB sent a step": f"{told['bytes'][name] / 1000:.1f}" if name in RECIPES else "0",
            }
        )
    return markdown(rows)


def replace(recipe: str, args: argparse.Namespace) -> dict[str, str]:
    """A row of the table of slices that are killed."""
    options = ["--recipe", recipe, "--max-restarts", "1000"]
    back, gaps = list[float](), list[float]()
    with started(f"2:{SLICES}", args, *options, part="train") as running:
        for number in range(args.kills):
            running.wait_for(SLICES, BEFORE_KILL)
            victim = running.training()[1 + number % (SLICES - 1)]
            killed = running.kill(victim)
            back.append(contributed(running, victim, killed, recipe) - killed)
            running.sleep(2.0)
            survivors = (each for each in read(running.folder) if each.lives and each.pid != victim.pid)
            gaps += [gap for each in survivors if (gap := each.longest_gap(killed, killed + back[-1])) is not None]
        code = running.stop()
        ends = [each.end["hash"] for each in read(running.folder) if each.end]
        if code or len(ends) != SLICES:
            raise SystemExit(f"the elastic run ended with {code}, {len(ends)} slices:\n{running.text[-3000:]}")
    return {
        "": recipe,
        "slices killed": str(args.kills),
        "seconds until the new slice contributes": spread(back, 1),
        "longest step of the others, seconds": spread(gaps),
        "hashes at the end": "equal" if len({*ends}) == 1 else "DIFFERENT",
    }


def contributed(running: DrivenRun, victim: WorkerProcess, killed: float, recipe: str) -> float:
    """The moment at which the process in place of `victim` had made its first step that averages with the others."""
    period = PERIOD if "DiLoCo" in recipe else 1
    while time.monotonic() < killed + PATIENCE_SECONDS:
        for each in read(running.folder):
            if each.place == victim.place and each.pid != victim.pid:
                after = (step for step in each.steps if step.moment > killed and step.number % period == 0)
                if (first := next(after, None)) is not None:
                    return first.moment
        running.sleep(0.2)
    raise SystemExit(f"no slice took the place of {victim.place}:\n{running.text[-3000:]}")


def main(args: argparse.Namespace) -> None:
    if args.part:
        return {"alternate": alternate, "train": train}[args.part](args)
    if args.quick:
        args.rounds, args.kills = 2, 1
    written = provenance()  # as it is now: the checkout may change meanwhile
    model = f"{DEPTH * WIDTH**2:,} parameters, {args.batch} samples a step, Adam"
    print(f"{SLICES} slices of {DEVICES} virtual devices, {model}, on {args.network}.")
    print(f"Medians over {args.rounds} rounds of {args.steps} steps, and over slices killed (the least to the most).\n")
    print(f"{compare(args)}\n", flush=True)
    print(f"{markdown([replace(recipe, args) for recipe in RECIPES])}\n\n{written}")
    return None


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--network", default="100mbit,20ms", help="of each slice's host; none: no emulation")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--steps", type=int, default=20, help="of a block; a multiple of ten")
    options.add_argument("--batch", type=int, default=512, help="samples of each slice in a step")
    options.add_argument("--kills", type=int, default=3, help="of each recipe")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--part", choices=("alternate", "train"), help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    main(options.parse_args())
