"""Parallel jobs: several at a time, each in a process of one thread."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

Job = TypeVar("Job")
Done = TypeVar("Done")


def one_thread() -> None:
    """Use one thread: small tensors are not worth a second one, and other processes have their own."""
    torch.set_num_threads(1)


def done(
    do: Callable[[Job], Done], jobs: Sequence[Job], processes: int, prepare: Callable[[], None] = one_thread
) -> Iterator[Done]:
    """Results of `do` by job, as they are done; with one process, in this one and in order.

    prepare: what a process does once, before its first job. Both functions are found by their names in new processes.
    """
    if processes == 1:
        prepare()
        yield from map(do, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=prepare) as pool:
        for each in as_completed([pool.submit(do, job) for job in jobs]):
            yield each.result()
