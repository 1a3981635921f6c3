"""Threads of compiled loops: how many share one call's work; its results are the same bits for any number."""

from __future__ import annotations

import os
import threading

import torch

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


# -- threads that the library makes for a caller -----------------------------------------------------------------------

# They keep to what torch.set_num_threads says in the caller's thread. OpenMP and MKL keep the count of each thread
# apart, and torch hands its own on to a new thread only when that thread first asks for it. A matrix product does not
# ask: it runs on all cores, and on a busy machine waits for each of them in turn. Later changes reach no other thread
# at all. Compiled loops use as many, or what GOSSAMER_THREADS says.


class ThreadCount:
    """The intra-op threads of one thread of the caller, for those that the library runs for it."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._count = torch.get_num_threads()
        thread_limit(self._count)  # the caller hears of a wrong one, before there is a thread that could

    def look(self) -> None:
        """Learn the owner's count; in other threads, of which autograd has one for every device, nothing happens."""
        if threading.get_ident() == self._owner:
            self._count = torch.get_num_threads()

    def adopt(self) -> None:
        """Take this count for the running thread, and for those that it makes."""
        _of_thread.keeps_to = self
        if torch.get_num_threads() != self._count:  # this question is what torch waits for
            torch.set_num_threads(self._count)
        share_among(thread_limit(self._count))


def count_of_caller() -> ThreadCount:
    """The count that a thread made here and now is to keep to: one object for all that a thread of the caller makes."""
    if not hasattr(_of_thread, "keeps_to"):
        _of_thread.keeps_to = ThreadCount()
    count: ThreadCount = _of_thread.keeps_to
    count.look()
    return count
