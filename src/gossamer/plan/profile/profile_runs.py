"""Profiling runs: times a script's step without a network, in as many copies as will share the processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies import GossipStage, Stage
from gossamer.base import bounded_file, system
from gossamer.base.aggregation import STEADY, AggregationContext
from gossamer.base.layout import Layout, dtype_of
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    payload_bytes,
)
from gossamer.comm.network.cost.step_simulator import ready_seconds
from gossamer.errors import GossamerError
from gossamer.events import Attached
from gossamer.plan.estimate.workload_profile import BucketProfile, WorkloadProfile
from gossamer.plan.profile.exchange_timer import time_stage
from gossamer.plan.profile.gradient_statistics import GradientStatistics
from gossamer.plan.profile.load_meter import mean_load
from gossamer.plan.profile.profiler import AT_ONCE, results, statistics_file
from gossamer.train.engine.bucket import Bucket
from gossamer.train.traffic.op_trace import trace_ops

GROWS = 2  # minimum growth of the received bytes with four times the workers
FEW, MOST_DECODED = 4, 16  # numbers of workers with payloads to decode here
ENOUGH_BATCHES = 16  # for gradient statistics
FEWEST_STEPS = 2  # nothing is observed before the first one ends
LINES_OF_ERROR, MOST_ERROR_BYTES = 8, 2**16
MOST_ENTRIES = 2**29
POLL_SECONDS = 0.02


class ProfileError(GossamerError, RuntimeError):
    """The script could not be profiled."""


def profile_script(
    script: Path, arguments: Sequence[str], recipe: Recipe, workers: int, copies: int = 1
) -> WorkloadProfile:
    """Run `copies` of a script at once until each has made some steps. Return the mean of their profiles.

    Use as many copies as workers that will share this machine, since they slow each other down in the same way.
    """
    profile, _ = _profiled(script, arguments, recipe, workers, copies, batches=0)
    return profile


def profile_with_gradients(
    script: Path, arguments: Sequence[str], workers: int, copies: int = 1, batches: int = ENOUGH_BATCHES
) -> tuple[WorkloadProfile, GradientStatistics | None]:
    """The profile of a script in lock step without compression, and statistics of the gradients of `batches` batches
    after some further training; None for 0 batches, or if no observed batch had finite gradients."""
    return _profiled(script, arguments, resolve(None), workers, copies, batches)


def _profiled(
    script: Path, arguments: Sequence[str], recipe: Recipe, workers: int, copies: int, batches: int
) -> tuple[WorkloadProfile, GradientStatistics | None]:
    with tempfile.TemporaryDirectory(prefix="gossamer-measure-") as name:
        directory = Path(name)
        _run_copies(directory, script, arguments, recipe, workers, copies, batches)
        found = [
            WorkloadProfile.from_json(json.loads(path.read_text(encoding="utf-8")))
            for path in results(directory, copies)
        ]
        file = statistics_file(directory)
        statistics = (
            GradientStatistics.from_json(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
        )
    return _mean(found), statistics


def _run_copies(
    directory: Path, script: Path, arguments: Sequence[str], recipe: Recipe, workers: int, copies: int, batches: int
) -> None:
    threads = str(max(1, system.cores() // copies))  # as for the workers of a run
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "GOSSAMER_RECIPE": repr(recipe)}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for copy in range(copies):
            command = [
                sys.executable,
                "-m",
                "gossamer.plan.profile.profiler",
                str(directory),
                str(copy),
                str(copies),
                str(workers),
                str(batches),
            ]
            with (directory / f"errors-{copy}").open("wb") as errors:
                running.append(
                    subprocess.Popen(
                        [*command, str(script), *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=errors
                    )
                )
        for copy, exit_code in _as_they_end(running):
            _check(directory, copy, copies, exit_code, script)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _as_they_end(running: Sequence[subprocess.Popen[bytes]]) -> Iterator[tuple[int, int]]:
    """(copy, exit code) in order of their ends: other copies may wait for a failed one."""
    left = dict(enumerate(running))
    while left:
        ended = [(copy, code) for copy, process in left.items() if (code := process.poll()) is not None]
        for copy, code in ended:
            del left[copy]
            yield copy, code
        if not ended:
            time.sleep(POLL_SECONDS)


def _check(directory: Path, copy: int, copies: int, exit_code: int, script: Path) -> None:
    if results(directory, copies)[copy].exists():
        return
    if exit_code:
        tail = (
            bounded_file.read_end(directory / f"errors-{copy}", MOST_ERROR_BYTES)
            .decode(errors="replace")
            .splitlines()[-LINES_OF_ERROR:]
        )
        raise ProfileError(f"{script} failed during profiling, so there is no estimate:\n" + "\n".join(tail))
    raise ProfileError(
        f"{script} ended before one of its steps could be timed. It must attach a recipe and make at least "
        f"{FEWEST_STEPS} steps: pass the arguments of a training, or the compute time of a step: "
        "--step-seconds 0.2"
    )


def _mean(found: Sequence[WorkloadProfile]) -> WorkloadProfile:
    """Mean of every number over the copies, which have the same buckets."""

    def mean(values: Sequence[Sequence[float]]) -> list[float]:
        return [float(value) for value in np.mean(values, axis=0)]

    def joint(same: Sequence[BucketProfile]) -> BucketProfile:
        return replace(
            same[0],
            ready_seconds=fmean(bucket.ready_seconds for bucket in same),
            computing_seconds=mean([bucket.computing_seconds for bucket in same]),
            engine_seconds=mean([bucket.engine_seconds for bucket in same]),
            offering_seconds=fmean(bucket.offering_seconds for bucket in same),
            landing_seconds=fmean(bucket.landing_seconds for bucket in same),
            spread_seconds=fmean(bucket.spread_seconds for bucket in same),
        )

    return replace(
        found[0],
        backward_seconds=fmean(each.backward_seconds for each in found),
        rest_seconds=fmean(each.rest_seconds for each in found),
        timed_steps=[seconds for each in found for seconds in each.timed_steps],
        other_load=mean_load([each.other_load for each in found]),
        buckets=[joint(same) for same in zip(*(each.buckets for each in found), strict=True)],
        site_buckets=[joint(same) for same in zip(*(each.site_buckets for each in found), strict=True)],
    )


def assume_profile(model: Attached, recipe: Recipe, step_seconds: float, workers: int) -> WorkloadProfile:
    """The profile of a step of given duration, two thirds of it backward; codecs are timed here, with random numbers.

    Gradients become ready evenly, by their entries. Buckets of equal shapes are measured once, with the number of
    threads that each of `workers` workers would have on this machine.
    """
    stage = recipe.strategy.steady_stage
    site = stage.per_site if workers > 1 else None
    with worker_threads(workers):
        buckets = _assumed_buckets(model, stage, recipe.compressor, step_seconds, workers) if stage.communicates else []
        site_buckets = _assumed_buckets(model, AT_ONCE, Dense(), step_seconds, site) if site else []
    return WorkloadProfile(
        recipe=model.recipe,
        backward_seconds=step_seconds,
        rest_seconds=0.0,
        buckets=buckets,
        control_bytes=model.control_bytes,
        buffer_bytes=model.buffers,
        rider_bytes=model.rider_bytes,
        site_buckets=site_buckets,
        site_control_bytes=model.site_control_bytes,
        copies=0,
    )


@contextmanager
def worker_threads(workers: int) -> Iterator[None]:
    """Context manager: the number of threads that each of `workers` workers has on this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _assumed_buckets(
    model: Attached, stage: Stage, compressor: Compressor, step_seconds: float, workers: int
) -> list[BucketProfile]:
    seen: dict[tuple[tuple[int, ...], ...], dict[str, Any]] = {}
    buckets: list[BucketProfile] = []
    numel = 0
    fragments = model.fragments or [0] * len(model.layouts)
    for fragment, (dtype, layout) in zip(fragments, model.layouts, strict=True):
        numel += layout.numel
        shapes = tuple(slot.shape for slot in layout)
        if shapes not in seen:
            seen[shapes] = time_codec(dtype, layout, stage, compressor, workers)
        named = {slot.name: slot.shape for slot in layout}
        place = 0 if stage is AT_ONCE else fragment
        buckets.append(
            BucketProfile(
                dtype=dtype,
                shapes=named,
                ready_seconds=ready_seconds(step_seconds, numel / model.parameters),
                fragment=place,
                **seen[shapes],
            )
        )
    return buckets


def time_codec(dtype: str, layout: Layout, stage: Stage, compressor: Compressor, workers: int) -> dict[str, Any]:
    """Seconds of one bucket of random numbers in an exchange, named as in BucketProfile. Raises ProfileError for a
    bucket that is too large for memory."""
    if layout.numel > MOST_ENTRIES:
        raise ProfileError(
            f"a bucket of {layout.numel:,} entries is too large to be compressed here, so its time cannot be measured. "
            "Use a smaller model, such as --parameters 1000000000."
        )
    kind = dtype_of(dtype)
    parameters = {slot.name: nn.Parameter(torch.randn(slot.shape, dtype=kind)) for slot in layout}
    fresh = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def timed(world: int) -> dict[str, Any]:
        buckets = [Bucket(parameters, compressor, AggregationContext(step=STEADY, world=world))]
        (found,) = time_stage(stage, [buckets], compressor, world, fresh)
        return found

    if workers <= MOST_DECODED or isinstance(stage, GossipStage):
        return timed(workers)
    worlds = (FEW, MOST_DECODED, workers)
    ops = [trace_ops(Recipe(compressor=compressor), layout, kind, world) for world in worlds]
    few, many = timed(FEW), timed(MOST_DECODED)
    if len({len(each) for each in ops}) > 1:  # the operations depend on the number of workers
        return _spread_over(many, len(ops[-1]))
    return grown(
        few, many, [[received_bytes(op, world) for op in each] for each, world in zip(ops, worlds, strict=True)]
    )


def _spread_over(found: dict[str, Any], ops: int) -> dict[str, Any]:
    """The same compute time for this number of operations: all of it before the first one."""
    computing, engine = sum(found["computing_seconds"]), sum(found["engine_seconds"])
    return found | {
        "computing_seconds": [computing, *[0.0] * ops],
        "engine_seconds": [engine / max(1, ops)] * ops,
    }


# -- payloads of many workers ------------------------------------------------------------------------------------------


def received_bytes(op: CollectiveOp, world: int) -> int:
    """Payload bytes that a worker receives and decodes one by one; means arrive summed."""
    return sum(_bytes_received(each, world) for each in op.concurrent())


def _bytes_received(op: CollectiveOp, world: int) -> int:
    match op:
        case AllGather(forms=tuple(forms)) | AllToAll(forms=tuple(forms)):
            return sum(map(payload_bytes, forms))
        case AllGather(payload):
            return world * payload_bytes(payload)
        case AllToAll(parts):
            return world * payload_bytes(parts[0])
        case InGroup(ranks, inner):
            return _bytes_received(inner, len(ranks))
        case AllReduceMean() | NeighborAllGather() | Coalesced():
            return 0


def grown(
    few: dict[str, Any], many: dict[str, Any], received: Sequence[Sequence[int]], computing: str = "computing_seconds"
) -> dict[str, Any]:
    """Extrapolate a timing to all workers, so that payloads of a group too large for this machine are not decoded.

    few, many: seconds named as in BucketProfile, of FEW and MOST_DECODED workers. `received`: received bytes of each
    operation with FEW, with MOST_DECODED, and with all workers. The work after an operation is linear in its received
    bytes, and never shrinks.
    """
    first, *after = zip(few[computing], many[computing], strict=True)
    seconds = [first[1]]
    for (less, more), (little, much, all_bytes) in zip(after, zip(*received, strict=True), strict=True):
        grows = much >= GROWS * little  # parts of a reduce-scatter do not grow, except for their headers
        each = max(0.0, more - less) / (much - little) if grows and much > little else 0.0
        seconds.append(more + each * max(0, all_bytes - much))
    return many | {computing: seconds}
