"""Ranks that join one job, in threads of one process."""

import threading

from gossamer.comm.environment import JobEnvironment
from gossamer.comm.environment.meeting import Hello, RunIdentity
from gossamer.comm.environment.meeting_member import attend
from gossamer.errors import GossamerError


def job(rank, port, world=2):
    return JobEnvironment(
        rank=rank,
        world=world,
        local_rank=rank,
        local_world=world,
        master_address="127.0.0.1",
        master_port=port,
        launcher="environment",
    )


def in_threads(*calls):
    """Run the calls at the same time; returns their results or errors."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except GossamerError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def hello(rank, **changes):
    return Hello(**{"run": "without a name, start 1", "world": 2, "rank": rank, "who": f"w{rank}"} | changes)


def attends(at, rank, **changes):
    """A member that is not `join`'s."""
    identity = RunIdentity(run="without a name, start 1", world=2)
    return attend(lambda: ("127.0.0.1", at), identity, hello(rank, **changes), 5.0)
