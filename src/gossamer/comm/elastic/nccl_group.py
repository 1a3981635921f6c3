"""NCCL group: makes torch's NCCL process group of some ranks over a store, known to nobody else in the process.

Not one of init_process_group's: an elastic run has no default group, which could not lose a rank, and each view has a
group of its own. It has not run on GPUs.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

# What goes wrong is raised where it is waited for; else torch's own watchdog ends the process, of which it is the error
ERRORS_ARE_OURS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def nccl_group(store: Store, rank: int, world: int, device: torch.device) -> Any:
    """Every rank calls it, with a store in which no other group was formed; it returns once all are connected."""
    os.environ.setdefault(*ERRORS_ARE_OURS)
    torch.cuda.set_device(device)  # of the thread that forms it
    group = dist.ProcessGroupNCCL(store, rank, world, dist.ProcessGroupNCCL.Options())
    group._set_sequence_number_for_group()
    group.eager_connect_single_device(device)
    return group
