"""Device failures: names the bucket on which memory ran out or a GPU driver failed.

If memory runs out before a bucket's first operation, the step's report informs all ranks; no rank makes the step, and
each raises MemoryShortage. If it runs out later, this rank cannot answer the others any more: the error is raised here,
nothing is committed, and the others detect the loss of this worker.
"""

from __future__ import annotations

import re

import torch

from gossamer.algorithms.compressors.base import OUT_OF_MEMORY
from gossamer.base.layout import FlatTensors
from gossamer.base.units import first_line
from gossamer.errors import DeviceError, MemoryShortage

WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")  # in error messages of torch's allocators
DRIVER = re.compile(r"^(CUDA|HIP|CUBLAS|cuBLAS|cuDNN|NCCL|Triton).*(error|Error)", re.MULTILINE)


def shortage(bucket: FlatTensors, rank: int, failure: BaseException) -> str:
    """A text for every rank: this rank, the bucket and the size of the allocation that failed."""
    asked = WANTED.search(str(failure))
    more = f"{asked[1]} more" if asked else "more than available"
    return f"rank {rank} ran out of memory on {bucket.flat.device} for {describe(bucket)}: {more} was requested"


def describe(bucket: FlatTensors) -> str:
    """Describe a bucket by its tensors and its size."""
    first, *_, last = (names := bucket.layout.names) * 2
    which = f'"{first}"' if len(names) == 1 else f'the {len(names)} tensors from "{first}" to "{last}"'
    return f"the bucket of {which} ({bucket.flat.nbytes:,} bytes)"


def undone(texts: str) -> MemoryShortage:
    """The error that every rank raises after a step that no rank has made."""
    return MemoryShortage(
        f"{texts}. No rank has made this step: nothing was applied and no state changed, so training can continue. "
        "Reduce the batch size, or use a compressor with less temporary memory, such as Dense(); against fragmented "
        "memory set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    )


def device_failure(bucket: FlatTensors, rank: int, failure: BaseException) -> MemoryShortage | DeviceError | None:
    """The error that names the bucket, to be raised in place of torch's own; None for other failures."""
    if isinstance(failure, OUT_OF_MEMORY):
        return MemoryShortage(
            f"{shortage(bucket, rank, failure)}, after parts of it had been exchanged. Nothing of this step was "
            "applied, and the other ranks detect the loss of this worker. Reduce the batch size, and resume from the "
            "last checkpoint: gossamer run --max-restarts 1 with a script that calls session.load(directory)."
        )
    if not isinstance(failure, RuntimeError) or not _of_the_driver(failure):
        return None
    return DeviceError(
        f"{bucket.flat.device} of rank {rank} failed while {describe(bucket)} was exchanged "
        f"({first_line(failure)}). Nothing of this step was applied, but this process cannot use the "
        "device any more; an earlier kernel may have caused the error. Resume from the last checkpoint in a new "
        "process, gossamer run --max-restarts 1; CUDA_LAUNCH_BLOCKING=1 shows the kernel that failed."
    )


def _of_the_driver(failure: RuntimeError) -> bool:
    kind = getattr(torch, "AcceleratorError", None)  # torch 2.8 has it
    return (kind is not None and isinstance(failure, kind)) or DRIVER.search(str(failure)) is not None
