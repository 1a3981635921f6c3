"""Threads of compiled loops: how many share one call's work; its results are the same bits for any number."""

from __future__ import annotations

import os
import threading

from gossamer.base.kernels.library import Count, Function, KernelsError, library, wanted_kernels

VARIABLE = "GOSSAMER_THREADS"
MOST = 8  # by default: fewer threads than that read as fast as the memory of one socket can

_USE_THREADS = Function("gossamer_use_threads", Count)
_of_thread = threading.local()


def thread_limit(torch_threads: int) -> int:
    """How many threads may share a call's work: what GOSSAMER_THREADS says, or as many as torch may use, at most MOST.

    Launchers divide a machine's cores by its workers and tell torch, and whoever tells it another number means the
    library, too. Under torchrun that number is 1 unless OMP_NUM_THREADS is set.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return min(torch_threads, MOST)
    if not (asked.isascii() and asked.isdigit() and int(asked) >= 1):
        raise KernelsError(
            f"{VARIABLE}={asked}: this should be the number of threads that encode and decode together, and nobody can "
            f"tell how many cores this worker may use. Write {VARIABLE}=2, or leave it unset: then it is torch's own."
        )
    return int(asked)


def share_among(count: int) -> None:
    """From now on up to so many threads share the work of each call that the running thread makes; at first, one."""
    if count == getattr(_of_thread, "count", 1):
        return
    if wanted_kernels() != "reference" and library() is not None:
        _USE_THREADS(count)
        _of_thread.count = count
