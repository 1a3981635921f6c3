"""Peak memory of a worker over DistributedDataParallel's, for each recipe, in copies of the model's parameters.

Four workers train a model of few and large tensors, each recipe and DDP in new processes, since buffers of one recipe
would serve the next. A training of a tiny model first loads what a process keeps. The peak is that of private resident
memory during the steps (Linux: VmHWM without shared pages), over the memory just before the model was built. Shared
memory is added in proportion: a page that two workers map counts half for each. Parameters, gradients and AdamW's
moments alone are 4 copies.

The allocator of the C library keeps freed memory of up to 32 MB a piece for later, by a threshold that moves with what
was freed before, so equal runs have different peaks. By default it is fixed at 1 MiB here: larger memory is returned
when it is freed. --allocator default leaves it to the library.

    python benchmarks/memory.py [--workers 4] [--width 1536] [--runs 3] [--recipe R ...] [--json FILE] [--page FILE.md]
    python benchmarks/memory.py --alive     # tensors alive in a reduction, counted in one process without an allocator
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.overhead import launch, stepper  # found only after the line above
from benchmarks.provenance import provenance
from benchmarks.steps import DDP, RECIPES

import gossamer
from gossamer.algorithms.compressors.sharded import is_group_residual
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels.buffer_pool import blocks
from gossamer.base.ops import AllReduceMean, Coalesced, CollectiveOp
from gossamer.train.engine.bucket import NO_INPUT, Bucket, assign_buckets
from gossamer.train.engine.bucket_reduction import StepReduction

WIDTH, LAYERS, STEPS, TINY = 1536, 8, 5, 64  # 19 million parameters: 75 MB
FIXED = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
RESIDUALS, OWED, OTHER, BUFFERS, SHARED = "residuals", "shard residuals", "other state", "buffers", "shared"
IN_FLIGHT = "in flight"
ALIVE = (RESIDUALS, OWED, OTHER, IN_FLIGHT)
NARROW = ("Feedback(TopK(0.01), dtype='bfloat16')", "Feedback(Sharded(Int8()), dtype='bfloat16')")
PARTS = (RESIDUALS, OWED, OTHER, BUFFERS, SHARED)  # of a worker's memory, without model, gradients and optimizer


def resident_bytes(file: str, *fields: str) -> int:
    """The sum of fields of /proc/self/status or smaps_rollup."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.partition(":")[0] in fields)


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def state_bytes(buckets: Sequence[Bucket]) -> dict[str, int]:
    """Bytes of compressor state with its second buffer, by kind."""
    found = dict.fromkeys((RESIDUALS, OWED, OTHER), 0)
    for bucket in buckets:
        for state in (bucket.state, bucket.state._scratch):
            for key, packed in state.items():
                residual = RESIDUALS if key.rpartition(".")[2] == "residual" else OTHER
                found[OWED if is_group_residual(key) else residual] += packed.flat.nbytes
    return found


def train(recipe: str, width: int, world: gossamer.World) -> dict[str, float]:
    """Peak memory of this worker while it trains with `recipe`, and parts of it, in copies of the parameters."""
    gc.collect()
    blocks.release()
    ctypes.CDLL(None).malloc_trim(0)
    world.barrier()
    floor, shared = resident_bytes("status", "RssAnon", "RssFile"), resident_bytes("smaps_rollup", "Pss_Shmem")
    with ExitStack() as stack:
        model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters())
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        session = None
        if recipe == DDP:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            session = stack.enter_context(gossamer.attach(model, optimizer, recipe))
        step = stepper(nn.Sequential(model, Sum()), optimizer, torch.randn(4, width))
        step()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: building the session is not counted
        for _ in range(STEPS):
            step()
        peak = resident_bytes("status", "VmHWM") - resident_bytes("status", "RssShmem")
        found = {} if session is None else state_bytes(session._synchronizer.buckets)
        found[BUFFERS] = blocks.peak
        found[SHARED] = resident_bytes("smaps_rollup", "Pss_Shmem") - shared
        found["copies"] = peak - floor + found[SHARED]
        return {name: each / nbytes for name, each in found.items()}


def work(args: argparse.Namespace) -> None:
    """Measure one recipe in this group of processes: the largest peak of all workers, and the mean of each part."""
    world = gossamer.init()
    torch.manual_seed(world.rank)
    train(args.one, TINY, world)
    found = train(args.one, args.width, world)
    row = {name: world.all_reduce(each, "max" if name == "copies" else "mean") for name, each in found.items()}
    if world.is_first:
        Path(args.into).write_text(json.dumps(row))


# -- counted in one process ------------------------------------------------------------------------------------------


class Echo:
    """A transport over which every rank sends what this one does; `watch` is called when an operation has begun."""

    rank = 0

    def __init__(self, world: int, watch: Callable[[], None]) -> None:
        self.world, self._watch = world, watch

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        received = self._received(op)
        self._watch()
        return lambda: received

    def _received(self, op: CollectiveOp) -> Any:
        if isinstance(op, Coalesced):
            return [self._received(each) for each in op.ops]
        answer: Any = op.meta_answer(self.world, self.rank)
        return answer if isinstance(op, AllReduceMean) else [tuple(each.clone() for each in one) for one in answer]


def alive_bytes() -> int:
    """Of the memory of all tensors, each counted once."""
    storages = (each.untyped_storage() for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def alive(recipe: str, args: argparse.Namespace) -> dict[str, Any]:
    """Copies that a reduction of all buckets keeps and needs, beyond the model, its gradients and the optimizer."""
    compressor, at = resolve(recipe, args.workers).compressor, AggregationContext(world=args.workers)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(LAYERS)))
    parameters = dict(model.named_parameters())
    nbytes = sum(each.nbytes for each in parameters.values())
    buckets = [Bucket(part, compressor, at) for part in assign_buckets(parameters)]
    seen: list[int] = []

    def step(number: int) -> None:
        for bucket in buckets:
            torch.arange(bucket.flat.numel(), out=bucket.flat).sin_()
        transport: Any = Echo(args.workers, lambda: seen.append(alive_bytes()))
        context = AggregationContext(world=args.workers, step=number)
        reduction = StepReduction(compressor, transport, [*parameters], context, 1.0, 1.0)
        for bucket in buckets:
            reduction.exchange(bucket, NO_INPUT, 1.0)
        reduction._pipeline.finish()
        for bucket, (_, staged) in zip(buckets, sorted(reduction._staged.items()), strict=True):
            bucket.commit(staged.next_state, set(bucket.parameters), 1.0)

    step(0)
    gc.collect()
    before = alive_bytes()
    seen.clear()
    step(1)
    parts = {name: each / nbytes for name, each in state_bytes(buckets).items()}
    parts[IN_FLIGHT] = max(seen) / nbytes - before / nbytes
    return {"recipe": recipe, "copies": sum(parts.values()), "parts": parts}


def show_alive(args: argparse.Namespace) -> None:
    print(f"{provenance()}\n")
    print(f"| copies of the parameters | all | {' | '.join(ALIVE)} |\n|---|{'---:|' * (1 + len(ALIVE))}")
    for recipe in args.recipe or (*RECIPES, *NARROW):
        row = alive(recipe, args)
        parts = " | ".join(f"{row['parts'][name]:.2f}" for name in ALIVE)
        print(f"| `{recipe}` | {row['copies']:.2f} | {parts} |", flush=True)


# -- measured in processes -------------------------------------------------------------------------------------------


def measure(recipe: str, args: argparse.Namespace) -> dict[str, float]:
    fixed = {} if args.allocator == "default" else FIXED
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.json")
        if launch(args.workers, ["--one", recipe, "--into", str(file)], fixed):
            raise SystemExit(f"a worker failed while it trained with {recipe}")
        row: dict[str, float] = json.loads(file.read_text())
    return row


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each recipe's runs, in turns; DDP first."""
    recipes: Sequence[str] = (DDP, *(args.recipe or RECIPES))
    runs = [{recipe: measure(recipe, args) for recipe in recipes} for _ in range(args.runs)]
    found: list[dict[str, Any]] = []
    for recipe in recipes:
        peaks = [run[recipe]["copies"] for run in runs]
        over = [run[recipe]["copies"] - run[DDP]["copies"] for run in runs]
        parts = {name: statistics.median(run[recipe].get(name, 0.0) for run in runs) for name in PARTS}
        median = {"copies": statistics.median(peaks), "over_ddp": statistics.median(over)}
        found.append({"recipe": recipe, **median, "runs": peaks, "over_ddp_runs": over, "parts": parts})
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"| copies of the parameters | peak | over DDP | {' | '.join(PARTS)} |",
        f"|---|{'---:|' * (2 + len(PARTS))}",
    ]
    for row in found:
        spread = f"{min(row['over_ddp_runs']):+.2f} to {max(row['over_ddp_runs']):+.2f}"
        parts = " | ".join(f"{row['parts'][name]:.2f}" for name in PARTS)
        lines.append(f"| {row['recipe']} | {row['copies']:.2f} | {row['over_ddp']:+.2f} ({spread}) | {parts} |")
    return "\n".join(lines)


def main(args: argparse.Namespace) -> None:
    found = rows(args)
    about = f"{provenance()} The load average was {os.getloadavg()[0]:.1f}."
    print(f"{about}\n\n{table(found)}")
    if args.page:
        args.page.write_text(f"# Memory of a worker\n\n{about}\n\n{table(found)}\n")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Peak memory of a worker over DDP's, for each recipe.")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--width", type=int, default=WIDTH, help="features of each of the model's layers")
    options.add_argument("--runs", type=int, default=3, help="new processes of each recipe")
    options.add_argument("--recipe", action="append", metavar="R", help="only this one; may be repeated")
    options.add_argument("--allocator", choices=["fixed", "default"], default="fixed", help="the C library's threshold")
    options.add_argument("--json", metavar="FILE")
    options.add_argument("--page", type=Path, metavar="FILE.md")
    options.add_argument("--alive", action="store_true", help="count tensors of one process instead")
    options.add_argument("--one", help=argparse.SUPPRESS)  # a worker's recipe
    options.add_argument("--into", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.alive:
        show_alive(args)
    elif args.one is None:
        main(args)
    else:
        work(args)
