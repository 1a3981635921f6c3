"""Threads of compiled loops: the number of threads per call. Results have the same bits for any number."""

from __future__ import annotations

import os
import threading

import torch

from gossamer.base.kernels.library import Count, Function, KernelsError, library, wanted_kernels

VARIABLE = "GOSSAMER_THREADS"
MOST = 8  # by default; fewer threads already use the full memory bandwidth of one socket

_USE_THREADS = Function("gossamer_use_threads", Count)
_of_thread = threading.local()


def thread_limit(torch_threads: int) -> int:
    """Return the number of threads that may share a call: GOSSAMER_THREADS, or torch's number, at most MOST.

    Launchers divide a machine's cores by its workers and set torch's number. Other values that a user sets for torch
    apply as well. Under torchrun the number is 1 unless OMP_NUM_THREADS is set.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return min(torch_threads, MOST)
    if not (asked.isascii() and asked.isdigit() and int(asked) >= 1):
        raise KernelsError(
            f"{VARIABLE} must be the number of threads that encode and decode together, got {asked!r}, and the cores "
            f"available to this worker are unknown. Write {VARIABLE}=2, or unset it: torch's own number then applies."
        )
    return int(asked)


def share_among(count: int) -> None:
    """Set the number of threads that share each call of the running thread; initially one."""
    if count == getattr(_of_thread, "count", 1):
        return
    if wanted_kernels() != "reference" and library() is not None:
        _USE_THREADS(count)
        _of_thread.count = count


# -- threads that the library starts for a caller ----------------------------------------------------------------------

# They use the caller's torch.set_num_threads. OpenMP and MKL keep a count per thread, and torch applies its own to a
# new thread only when that thread first reads it. A matrix product does not read it: it runs on all cores, and on a
# busy machine waits for each of them in turn. Later changes do not reach other threads at all. Compiled loops use the
# same number, or GOSSAMER_THREADS.


class ThreadCount:
    """The intra-op threads of one caller's thread, for threads that the library starts for it."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.count = torch.get_num_threads()
        self._limit = thread_limit(self.count)  # raises in the caller's thread for an invalid GOSSAMER_THREADS

    def look(self) -> None:
        """Read the owner's count; no effect in other threads, of which autograd has one per device."""
        if threading.get_ident() == self.owner and (count := torch.get_num_threads()) != self.count:
            self._limit = thread_limit(count)
            self.count = count  # last: another thread that reads it must read the new limit as well

    def adopt(self) -> int:
        """Apply this count to the running thread, and to those that it starts. Return it."""
        _of_thread.keeps_to, count, limit = self, self.count, self._limit
        if torch.get_num_threads() != count:  # reading it makes torch apply its own count
            torch.set_num_threads(count)
        share_among(limit)
        return count


def count_of_caller() -> ThreadCount:
    """Return the count that a thread started here must use: one object for all threads of a caller's thread."""
    if not hasattr(_of_thread, "keeps_to"):
        _of_thread.keeps_to = ThreadCount()
    count: ThreadCount = _of_thread.keeps_to
    count.look()
    return count
