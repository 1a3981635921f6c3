"""Several workers in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

import pytest
import torch

from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker, enter


def test_a_process_is_one_worker() -> None:
    found: list[WorkerScope] = []
    thread = threading.Thread(target=lambda: found.append(current_worker()))
    thread.start()
    thread.join()
    assert found == [current_worker()]
    with current_worker().waiting():
        pass


def test_a_communication_thread_belongs_to_who_made_it() -> None:
    mine = WorkerScope()

    def work() -> WorkerScope:
        enter(mine)
        thread = CommThread([torch.device("cpu")])
        try:
            return thread.submit(current_worker).wait()
        finally:
            thread.close()

    assert copy_context().run(work) is mine
    assert current_worker() is not mine


class CountedWaits(WorkerScope):
    def __init__(self) -> None:
        self.waits = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.waits += 1
        yield


@pytest.mark.parametrize("is_own", [True, False])
def test_only_its_own_worker_lets_others_run_while_a_communication_thread_ends(is_own: bool) -> None:
    """The garbage collector may close it while another worker imports, and each worker that then ran would wait for the
    lock of that import."""
    owner, closing = CountedWaits(), CountedWaits()

    def made() -> CommThread:
        enter(owner)
        return CommThread([torch.device("cpu")])

    thread = copy_context().run(made)

    def close() -> None:
        enter(owner if is_own else closing)
        thread.close()

    copy_context().run(close)
    assert (owner.waits, closing.waits) == (int(is_own), 0)
    assert not thread._thread.is_alive()
