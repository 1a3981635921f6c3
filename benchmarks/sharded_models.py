"""Sharded models: which recipes run between replicas that FSDP2, HSDP, tensor parallelism or a pipeline hold in parts.

    python benchmarks/sharded_models.py
    python benchmarks/sharded_models.py --network examples/networks/two-sites-20ms.toml

Without a network four workers make three steps with each, and each cell says what came of it: "works" where parameters
are those of the reference, to 1e-6 with Dense(), and else are finite and the same on all replicas; or the refusal. With
one, two sites of two workers each: seconds a step of torch's HSDP, and of FSDP2 in each site with recipes between them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.provenance import provenance  # noqa: E402
from support.sharded_training import (  # type: ignore[import-not-found]  # noqa: E402
    Stages,
    attached,
    by_fsdp,
    by_tensor_parallelism,
    distance,
    one_process,
    train,
    whole,
)

import gossamer  # noqa: E402  # after the path, so that this checkout is measured
from gossamer.comm.environment.run_settings import COORDINATOR  # noqa: E402
from gossamer.errors import AttachError  # noqa: E402
from gossamer.train.checkpoint import digest  # noqa: E402

WORKERS = 4
RECIPES = {
    "Dense": "Dense()",
    "TopK": "Route(TopK(density=0.3), smallest=0)",
    "PowerSGD": "Route(PowerSGD(rank=1), smallest=0)",
    "DiLoCo": "DiLoCo(period=2)",
}
WIDTH, LAYERS = 512, 4


def trained(engine: str, recipe: str, mesh: DeviceMesh) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All parameters that this rank can gather after three steps, and those of plain training."""
    replicas, inside = mesh["replicate"], mesh["shard"]
    place, rank = replicas.get_local_rank(), dist.get_rank()
    if engine == "pipeline":
        stages = Stages(inside)
        session, optimizer = attached(stages.module, recipe, replicas)
        with session:
            stages.train(optimizer, place, 3)
        return whole(stages.module), stages.wanted(one_process(range(2)))
    data = [place] if engine == "TP" else [rank]
    model = by_tensor_parallelism(inside) if engine == "TP" else by_fsdp(mesh if engine == "HSDP" else inside)
    session, optimizer = attached(model, recipe, replicas)
    with session:
        train(model, optimizer, data, 3)
    return whole(model), one_process(range(2 if engine == "TP" else 4))


def cell(engine: str, recipe: str, mesh: DeviceMesh) -> str:
    try:
        found, wanted = trained(engine, recipe, mesh)
    except AttachError as refusal:
        return f"refused: {str(refusal).split('. ')[0]}"
    if not all(bool(each.isfinite().all()) for each in found.values()):
        return "FAILED: not finite"
    if recipe == RECIPES["Dense"] and distance(found, wanted) > 1e-6:
        return f"FAILED: {distance(found, wanted):.1e} from the reference"
    told: list[str] = [""] * WORKERS
    dist.all_gather_object(told, digest([each.contiguous() for each in found.values()]))
    alike = told[0] == told[2] and told[1] == told[3]
    return "works" if alike or recipe == RECIPES["DiLoCo"] else "FAILED: replicas part"


def elastic_cell(engine: str, mesh: DeviceMesh) -> str:
    """What attach says in a run whose workers come and go."""
    os.environ[COORDINATOR] = "127.0.0.1:1"
    try:
        return cell(engine, RECIPES["Dense"], mesh)
    finally:
        del os.environ[COORDINATOR]


def with_notes(rows: Sequence[list[str]]) -> list[str]:
    """Put a number in the place of each refusal; what they say."""
    notes = sorted({each for row in rows for each in row if each.startswith("refused")})
    for row in rows:
        row[:] = [f"refused ({notes.index(each) + 1})" if each in notes else each for each in row]
    return [f"({number}) {note}" for number, note in enumerate(notes, 1)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def seconds_of(recipe: str | None, mesh: DeviceMesh, steps: int) -> list[float]:
    """Of each step; recipe None: torch's HSDP."""
    model = layers()
    fully_shard(model, mesh=mesh if recipe is None else mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    session = None if recipe is None else gossamer.attach(model, optimizer, recipe, mesh=mesh["replicate"])
    taken: list[float] = []
    torch.manual_seed(1 + dist.get_rank())  # batches of its own
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    if session is not None:
        session.close()
    return taken[2:]


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = gossamer.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if arguments.timed:
        rows = []
        ways = {"torch HSDP": None, "Dense": "Dense()", "TopK": "TopK(density=0.01)"}
        for name, recipe in (ways | {"DiLoCo+Int8": "DiLoCo(period=10)+Int8()"}).items():
            taken = sorted(seconds_of(recipe, mesh, arguments.steps + 2))
            spread = f"{taken[0]:.3f} to {taken[-1]:.3f}"
            rows.append([name, f"{statistics.mean(taken):.3f}", f"{statistics.median(taken):.3f}", spread])
        head = ["training", "seconds a step, mean", "median", "least to most"]
    else:
        engines = ("FSDP2", "HSDP", "TP", "pipeline")
        rows = [
            [engine, *(cell(engine, recipe, mesh) for recipe in RECIPES.values()), elastic_cell(engine, mesh)]
            for engine in engines
        ]
        head = ["engine", *RECIPES, "elastic"]
    if world.is_first:
        notes = with_notes(rows)
        print(table(head, rows), *notes, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", help="as `gossamer run --network`: four hosts, two in each of two sites")
    parser.add_argument("--timed", action="store_true", help="time steps, also without a network")
    parser.add_argument("--steps", type=int, default=20, help="of each that is timed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    print(provenance(), flush=True)
    timed = arguments.timed or arguments.network is not None
    network = ["--network", arguments.network] if arguments.network else []
    inner = [__file__, "--worker", "--steps", str(arguments.steps), *(["--timed"] if timed else [])]
    run = [sys.executable, "-m", "gossamer", "run", "--workers", str(WORKERS), *network, *inner]
    raise SystemExit(subprocess.run(run, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
