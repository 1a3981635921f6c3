"""Device failures: names the bucket for which memory ran out, or over which a GPU's driver failed.

Memory that runs out before a bucket's first operation is told to all ranks in the step's report, so that none of them
makes the step and each raises MemoryShortage. Later than that this rank cannot answer the others any more: the error is
raised here, nothing was committed, and they see this worker leave.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gossamer.algorithms.compressors.base import OUT_OF_MEMORY
from gossamer.base.layout import FlatTensors
from gossamer.errors import DeviceError, MemoryShortage

WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")  # in what torch's allocators say
DRIVER = re.compile(r"^(CUDA|HIP|CUBLAS|cuBLAS|cuDNN|NCCL|Triton).*(error|Error)", re.MULTILINE)


def shortage(bucket: FlatTensors, rank: int, failure: BaseException) -> str:
    """Who ran out of memory over what, and how much was asked for: a text for every rank."""
    asked = WANTED.search(str(failure))
    more = f"{asked[1]} more" if asked else "more than there was"
    return f"rank {rank} ran out of memory on {bucket.flat.device} for {describe(bucket)}: {more} was asked for"


def describe(bucket: FlatTensors) -> str:
    """A bucket by its tensors and its size."""
    first, *_, last = (names := bucket.layout.names) * 2
    which = f'"{first}"' if len(names) == 1 else f'the {len(names)} tensors from "{first}" to "{last}"'
    return f"the bucket of {which} ({bucket.flat.nbytes:,} bytes)"


def undone(texts: str) -> MemoryShortage:
    """The error that every rank raises after the same step, which none of them has made."""
    return MemoryShortage(
        f"{texts}. No rank has made this step: nothing was applied and nothing remembered, so training can go on from "
        "here. Make the batch smaller, or the buckets' compressor one that needs less beside them, such as Dense(); "
        "memory in pieces is joined by PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )


@contextmanager
def named(bucket: FlatTensors, rank: int) -> Iterator[None]:
    """Within the block, what runs out or breaks on the device does so over this bucket. Raises MemoryShortage and
    DeviceError in the place of torch's errors."""
    try:
        yield
    except OUT_OF_MEMORY as failure:
        raise MemoryShortage(
            f"{shortage(bucket, rank, failure)}, after parts of it had been exchanged. Nothing of this step was "
            "applied or remembered, and the other ranks see this worker leave. Make the batch smaller, and go on from "
            "the last checkpoint: gossamer run --max-restarts 1 with a script that calls session.load(directory)."
        ) from failure
    except RuntimeError as failure:
        if not _of_the_driver(failure):
            raise
        raise DeviceError(
            f"{bucket.flat.device} of rank {rank} failed while {describe(bucket)} was exchanged "
            f"({str(failure).splitlines()[0]}). Nothing of this step was applied or remembered, but this process "
            "cannot use the device any more: a kernel that ran before may have caused it. Go on from the last "
            "checkpoint in a new one, gossamer run --max-restarts 1; CUDA_LAUNCH_BLOCKING=1 shows which kernel it was."
        ) from failure


def _of_the_driver(failure: RuntimeError) -> bool:
    kind = getattr(torch, "AcceleratorError", None)  # torch 2.8 has it
    return (kind is not None and isinstance(failure, kind)) or DRIVER.search(str(failure)) is not None
