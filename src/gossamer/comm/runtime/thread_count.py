"""Intra-op thread count: the library's own threads keep to what torch.set_num_threads says in the caller's thread.

OpenMP and MKL keep the count of each thread apart, and torch hands its own on to a new thread only when that thread
first asks for it. A matrix product does not ask: without a word it runs on all cores, and on a busy machine waits for
each of them in turn. Later changes reach no other thread at all. Compiled loops use as many, or what GOSSAMER_THREADS
says.
"""

from __future__ import annotations

import threading

import torch

from gossamer.base.kernels import share_among, thread_limit


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
        _of_thread.count = self
        if torch.get_num_threads() != self._count:  # this question is what torch waits for
            torch.set_num_threads(self._count)
        share_among(thread_limit(self._count))


_of_thread = threading.local()


def count_of_caller() -> ThreadCount:
    """The count that a thread made here and now is to keep to: one object for all that a thread of the caller makes."""
    if not hasattr(_of_thread, "count"):
        _of_thread.count = ThreadCount()
    count: ThreadCount = _of_thread.count
    count.look()
    return count
