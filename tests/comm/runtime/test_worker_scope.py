"""Several workers in one process."""

from __future__ import annotations

import threading
from contextvars import copy_context

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
