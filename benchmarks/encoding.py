"""Encoding within training: its seconds a step over those of the same encoding in a loop, and where they go.

Two workers on this machine train a model of 50 MB by every codec in turn, in every round. Within training the
communication thread's seconds are those of events.StepEnded, once by the clock and once in seconds of a processor, in
turns from step to step; what lies between the two is waiting for a core. The loop is what `gossamer bench compressors`
does: the same buckets and states, one worker after the other, alone. Then each thing that training does and the loop
does not is switched on in the loop, one by one.

    python benchmarks/encoding.py [--quick] [--only OneBit] [--rounds N] [--json FILE]
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import runner
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import buffer_pool, share_among
from gossamer.base.kernels.checks import crc32
from gossamer.comm.environment.host_info import machine
from gossamer.plan.bench.interleave import interleave, spread
from gossamer.train.engine.bucket import Bucket, assign_buckets

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.overhead import launch  # found only after the line above

CODECS = (
    "OneBit()",
    "TwoBit(threshold=0.5)",
    "Int8()",
    "Float4()",
    "SignMagnitude()",
    "QSGD()",
    "TernGrad()",
    "TopK(density=0.01)",
    "Threshold(value=0.01, capacity=0.01)",
    "DGC(density=0.001)",
    "RandomK(density=0.01)",
    "PowerSGD()",
    "Dense(dtype='bfloat16')",
)
QUICK = ("OneBit()", "Int8()", "TopK(density=0.01)")
SIDE, LAYERS = 1024, 12  # 50 MB
LOOPED = "Int8()"  # in which single things are switched on: of the codecs with much to write
CORES = {"every core computes": (8, 8), "a core is idle": (48, 1)}  # rows that each of the workers trains on
WARM_UP = 3
TARGET = 1.3

Seconds = tuple[float, float]  # by the clock, of a processor


def matrices() -> nn.Module:
    return nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)])


def optimizer_for(codec: str, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9 if codec.startswith("DGC") else 0.0)


@contextmanager
def reading(clock: Callable[[], float]) -> Iterator[None]:
    """What the communication thread reads the time from."""
    before = vars(runner)["time"]
    vars(runner)["time"] = SimpleNamespace(perf_counter=clock)
    try:
        yield
    finally:
        vars(runner)["time"] = before


def in_training(step: Callable[[], None], steps: int) -> tuple[Seconds, float]:
    """Medians of a step's encoding; and how many pages a step touches for the first time."""
    ended: list[float] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StepEnded):
            ended.append(event.encode_seconds)

    unsubscribe = events.subscribe(listen)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        for clock in (time.perf_counter, time.thread_time):
            with reading(clock):
                step()
    unsubscribe()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return (statistics.median(ended[0::2]), statistics.median(ended[1::2])), faults / 2 / steps


def encode_once(compressor: Any, buckets: Sequence[Bucket], rank: int) -> Seconds:
    """Until every bucket's first operation, as the benchmark of compressors counts."""
    clock = cpu = 0.0
    for bucket in buckets:
        at = AggregationContext(step=5, seed=11, rank=rank, world=2, momentum=0.9)
        script = compressor.aggregate(bucket.packed, bucket.state, at, bucket.mean_buffer)
        began = time.perf_counter(), time.thread_time()
        script.send(None)
        clock, cpu = clock + time.perf_counter() - began[0], cpu + time.thread_time() - began[1]
        script.close()
    return clock, cpu


def in_a_loop(encode: Callable[[], Seconds], repeats: int) -> Seconds:
    found = [encode() for _ in range(repeats + WARM_UP)][WARM_UP:]
    clock, cpu = zip(*found, strict=True)
    return statistics.median(clock), statistics.median(cpu)


def in_turns(world: Any, action: Callable[[], Any]) -> Any:
    """Every worker alone."""
    found: Any = None
    for rank in range(world.size):
        dist.barrier()
        if rank == world.rank:
            found = action()
    dist.barrier()
    return found


def measure(codec: str, rows: int, steps: int, world: Any) -> dict[str, float]:
    """One codec in one round."""
    torch.manual_seed(world.rank)
    model, x = matrices(), torch.randn(rows, SIDE)
    optimizer = optimizer_for(codec, model)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with gossamer.attach(model, optimizer, codec) as session:
        for _ in range(WARM_UP):
            step()
        (clock, cpu), faults = in_training(step, steps)
        synchronizer: Any = session._synchronizer
        compressor, buckets = synchronizer._context.compressor, synchronizer.buckets
        for bucket in buckets:
            bucket.early = frozenset()
        (_, late), _ = in_training(step, steps)
        for bucket in buckets:
            bucket.flat.normal_(std=1e-3)
        alone, alone_cpu = in_turns(
            world, lambda: in_a_loop(lambda: encode_once(compressor, buckets, world.rank), steps)
        )
    return {
        "loop": alone,
        "clock": clock,
        "cpu": cpu,
        "clock_ratio": clock / alone,
        "cpu_ratio": cpu / alone_cpu,
        "late_ratio": late / alone_cpu,
        "faults": faults,
    }


# -- one thing at a time ---------------------------------------------------------------------------------------------


class Beside:
    """Something that another thread of this process does all the time."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._ended = work, False
        self._thread = threading.Thread(target=self._repeat)

    def _repeat(self) -> None:
        torch.set_num_threads(1)
        while not self._ended:
            self._work()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()


def count_to(n: int) -> int:
    return sum(range(n))


def causes(codec: str) -> dict[str, Callable[[], Seconds]]:
    """The loop, and the loop with one thing more."""
    model = matrices()
    compressor = resolve(codec).compressor
    at = AggregationContext(world=2)

    def filled(bucket_bytes: int) -> list[Bucket]:
        found = [Bucket(part, compressor, at) for part in assign_buckets(dict(model.named_parameters()), bucket_bytes)]
        for bucket in found:
            bucket.flat.normal_(std=1e-3)
        return found

    large, small = filled(25 * 2**20), filled(1)
    other, left, right = torch.ones(2**24), torch.randn(SIDE, SIDE), torch.randn(64, SIDE)
    near = memoryview(bytes(2**18))

    def plain(of: Sequence[Bucket] = large) -> Seconds:
        return encode_once(compressor, of, 0)

    def cold() -> Seconds:
        other.sum()
        return plain()

    def fresh() -> Seconds:
        kept, buffer_pool.KEPT = buffer_pool.KEPT, 0
        pooled, buffer_pool.LARGE = buffer_pool.LARGE, 0
        try:
            return plain()
        finally:
            buffer_pool.KEPT, buffer_pool.LARGE = kept, pooled

    def beside(work: Callable[[], object], encode: Callable[[], Seconds] = plain) -> Callable[[], Seconds]:
        def timed() -> Seconds:
            with Beside(work):
                return encode()

        return timed

    def two() -> Seconds:
        share_among(2)
        try:
            return plain()
        finally:
            share_among(1)

    def near_cache() -> Seconds:
        began = time.perf_counter(), time.thread_time()
        for _ in range(200):
            crc32(near)
        return time.perf_counter() - began[0], time.thread_time() - began[1]

    product = lambda: torch.mm(right, left)  # noqa: E731
    return {
        "the loop": plain,
        "caches full of other things": cold,
        "payloads in fresh memory": fresh,
        f"{len(small)} buckets, not {len(large)}": lambda: plain(small),
        "a thread of this worker multiplies": beside(product),
        "a thread of this worker adds 64 MB": beside(other.sum),
        "a thread of this worker runs Python": beside(lambda: count_to(10_000)),
        "two threads share the work": two,
        "the first cache alone": near_cache,
        "the same, a thread multiplies": beside(product, near_cache),
    }


BASE = {"the same, a thread multiplies": "the first cache alone"}  # whose yardstick is not the loop


def switched(codec: str, rounds: int) -> dict[str, dict[str, float]]:
    found = interleave(causes(codec), rounds)
    medians = {name: [statistics.median(each) for each in zip(*turns, strict=True)] for name, turns in found.items()}
    told: dict[str, dict[str, float]] = {}
    for name, (clock, cpu) in medians.items():
        base = medians[BASE.get(name, name if name in BASE.values() else "the loop")]
        ratios = {"clock_ratio": clock / base[0], "cpu_ratio": cpu / base[1]}
        told[name] = {"clock": clock, "cpu": cpu, **ratios, "spread": spread([turn[0] for turn in found[name]])}
    return told


# -- the report ------------------------------------------------------------------------------------------------------


def show_codecs(found: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    for cores, by_codec in found.items():
        print(
            f"\n{cores}; ms of encoding a step, of worker 0: in the loop, in training by the clock and of a processor;"
        )
        print("over the loop's: by the clock (spread), of a processor (spread), and with gradients put in late; pages")
        for codec, rounds in by_codec.items():
            middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            clock, cpu = (spread([each[key] for each in rounds]) for key in ("clock_ratio", "cpu_ratio"))
            print(
                f"{codec:38}{1e3 * middle['loop']:7.2f}{1e3 * middle['clock']:8.2f}{1e3 * middle['cpu']:8.2f}"
                f"{middle['clock_ratio']:7.2f} ({clock:4.0%}){middle['cpu_ratio']:6.2f} ({cpu:4.0%})"
                f"{middle['late_ratio']:6.2f}{middle['faults']:7.0f}"
                f"{'' if middle['cpu_ratio'] <= TARGET else '  above ' + str(TARGET)}",
                flush=True,
            )


def show_causes(codec: str, found: dict[str, dict[str, float]]) -> None:
    print(f"\n{codec} in the loop with one thing more: ms by the clock, of a processor; over those without; spread")
    for name, one in found.items():
        print(
            f"{name:38}{1e3 * one['clock']:8.2f}{1e3 * one['cpu']:8.2f}"
            f"{one['clock_ratio']:7.2f}{one['cpu_ratio']:6.2f}{one['spread']:7.0%}"
        )


def work(args: argparse.Namespace) -> None:
    world = gossamer.init()
    codecs = [codec for codec in (QUICK if args.quick else CODECS) if codec.startswith(args.only)]
    rounds, steps = (2, 3) if args.quick else (args.rounds, args.steps)
    found: dict[str, dict[str, list[dict[str, float]]]] = {cores: {codec: [] for codec in codecs} for cores in CORES}
    for _ in range(rounds):
        for codec in codecs:
            for cores, rows in CORES.items():
                found[cores][codec].append(measure(codec, rows[world.rank], steps, world))
    told: dict[str, Any] = in_turns(world, lambda: {LOOPED: switched(LOOPED, 2 * rounds)} if world.is_first else {})
    if not world.is_first:
        return
    about = {**machine(), "threads_per_worker": torch.get_num_threads(), "load_average": os.getloadavg()[0]}
    command = shlex.join(["python", *sys.argv])
    print("machine ", ", ".join(f"{name} {value}" for name, value in about.items()))
    print("command ", command)
    show_codecs(found)
    for codec, one in told.items():
        show_causes(codec, one)
    if args.json:
        report = {"machine": about, "command": command, "codecs": found, "causes": told}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Encoding within training over encoding in a loop, two workers.")
    options.add_argument("--quick", action="store_true", help="three codecs, two rounds")
    options.add_argument("--only", default="", metavar="TEXT", help="codecs that begin so")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=4, help="of each kind in a round")
    options.add_argument("--json", metavar="FILE")
    args = options.parse_args()
    if "RANK" not in os.environ:
        sys.exit(launch())
    work(args)
