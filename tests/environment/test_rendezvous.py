"""Rendezvous: joining a job, or saying why not."""

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gossamer.environment import JobEnvironment, device_for, join, leave, rendezvous
from gossamer.errors import ConnectError


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """A private os.environ without a launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    monkeypatch.setattr(os, "environ", {name: kept[name] for name in kept if not name.startswith("TORCHELASTIC")})
    return os.environ


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def failure(rank, port, seconds=0.3, world=2):
    started = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        join(job(rank, port, world), seconds)
    assert time.monotonic() - started < seconds + 5
    assert not dist.is_initialized()
    assert f"127.0.0.1:{port}" in str(caught.value)
    return str(caught.value)


def test_nobody_listens(port):
    assert "rank 0 was not started" in failure(1, port)


def test_missing_workers_are_counted_and_named(port):
    message = failure(0, port, world=3)
    assert "2 of 3 workers are missing after 0.3 s, ranks [1, 2]" in message
    assert "Too few workers were started" in message


@pytest.mark.skipif(sys.platform != "linux", reason="reads interfaces as Linux does")
def test_the_interface_is_chosen_named_and_not_overruled(port, environ):
    assert "interface lo)" in failure(1, port)
    assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "lo"
    environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"] = "given0", "given1"
    assert "interface given0)" in failure(1, port)
    assert environ["NCCL_SOCKET_IFNAME"] == "given1"


def test_a_port_in_use_is_told_at_once():
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::", 0))
        other.listen()
        started = time.monotonic()
        message = failure(0, other.getsockname()[1], seconds=10)
    assert "choose another: MASTER_PORT" in message
    assert time.monotonic() - started < 2


def store_at(port):
    return rendezvous._open_store(job(0, port), 5.0)


def in_threads(*calls):
    """Run the calls at the same time; returns their results or errors."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except ConnectError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_everyone_hears_everyone(port):
    stores = store_at(port), rendezvous._open_store(job(1, port), 5.0)
    told = in_threads(
        *(lambda r=r: rendezvous._everyone(stores[r], job(r, port), "topic", f"from {r}", 5.0) for r in (0, 1))
    )
    assert told == [["from 0", "from 1"]] * 2


@pytest.mark.parametrize(("gpus", "devices"), [(0, {"cpu"}), (1, {"cpu", "cuda"}), (2, {"cuda"})])
def test_everyone_meets_and_knows_what_all_compute_on(port, monkeypatch, gpus, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    stores = store_at(port), rendezvous._open_store(job(1, port), 5.0)

    def meet(rank):
        return lambda: rendezvous._meet(stores[rank], job(rank, port), "127.0.0.1", 5.0)

    assert in_threads(meet(0), meet(1)) == [devices, devices]


def test_a_second_worker_of_the_same_rank_is_refused(port):
    store = store_at(port)
    store.set("hello/0", "elsewhere|1")
    with pytest.raises(ConnectError, match=r"another worker \(elsewhere\|1\) is there already under rank 0"):
        rendezvous._everyone(store, job(0, port), "hello", "here|2", 0.3)


def test_a_process_that_imports_the_script_again_is_told_so(port, monkeypatch):
    def refused():
        with pytest.raises(ConnectError) as caught:
            rendezvous._everyone(store, job(0, port), "hello", "here|2", 0.3)
        return str(caught.value)

    store = store_at(port)
    store.set("hello/0", "elsewhere|1")
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    assert refused().endswith('Put the program under `if __name__ == "__main__":`')
    monkeypatch.undo()
    assert "MASTER_PORT" in refused()


IMPORTED = """
import multiprocessing

print(getattr(multiprocessing.current_process(), "_inheriting", False), flush=True)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
"""


@pytest.mark.processes
def test_multiprocessing_says_when_it_imports_the_script_again(tmp_path):
    (tmp_path / "train.py").write_text(IMPORTED)
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "True"]


def test_a_blocked_network_is_told_to_all(port):
    """Rank 1 says hello from a port where nobody listens, as if a firewall were in between."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = closed.getsockname()[1]
    stores = store_at(port), rendezvous._open_store(job(1, port), 5.0)

    def rank_1():
        rendezvous._everyone(stores[1], job(1, port), "hello", f"far|1|cpu|127.0.0.1|{dead}", 5.0)
        return rendezvous._everyone(stores[1], job(1, port), "call", "reached", 5.0)

    error, outcomes = in_threads(lambda: rendezvous._meet(stores[0], job(0, port), "127.0.0.1", 5.0), rank_1)
    assert isinstance(error, ConnectError)
    assert "rank 0 cannot reach rank 1 at 127.0.0.1" in str(error)
    assert "firewall" in str(error)
    assert "rank 0 cannot reach rank 1" in outcomes[0]


def test_a_restarted_job_does_not_read_what_the_last_attempt_wrote(port, environ):
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for attempt in ("0", "1"):
        environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        with pytest.raises(ConnectError, match=r"1 of 2 workers are missing.*ranks \[1\]"):
            join(job(0, port), 0.2)
    assert server.check(["gossamer/0/hello/0"])
    assert server.check(["gossamer/1/hello/0"])


def test_a_group_that_exists_is_used_as_it_is(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert join(job(1, 1)) == "gloo"
        assert dist.group.WORLD is group
        rendezvous._leave_quietly(os.getpid() + 1)  # what a forked child would do at its exit
        assert dist.group.WORLD is group
    finally:
        rendezvous._leave_quietly(os.getpid())
    assert not dist.is_initialized()
    leave()  # nothing left to leave


def test_a_worker_without_a_gpu_of_its_own_computes_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_for(JobEnvironment(local_rank=1, local_world=3, world=3)) == torch.device("cuda", 1)
    assert device_for(JobEnvironment(local_rank=2, local_world=3, world=3)) == torch.device("cpu")


WORKER = """
import os, torch, torch.distributed as dist
import gossamer.world
world = gossamer.world.init()
assert gossamer.world.init() is world and gossamer.world.current() is world
group = dist.group.WORLD
assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() >= 600
del group  # or it would outlive the group's end, into that of the interpreter
total = torch.ones(1) * (world.rank + 1)
dist.all_reduce(total)
dist.barrier()
assert world.is_first == (world.rank == 0)
os.write(2, f"{world.rank}/{world.size} {world.device} {total.item()}".encode())
"""


@pytest.mark.processes
def test_two_processes_join_and_leave_quietly(port, environ):
    with contextlib.ExitStack() as running:
        workers = [
            running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", WORKER],
                    env=environ
                    | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in (0, 1)
        ]
        for worker in workers:
            running.callback(worker.kill)
        said = [worker.communicate(timeout=60)[1] for worker in workers]
    assert said == [f"{rank}/2 cpu 3.0" for rank in (0, 1)]
    assert [worker.returncode for worker in workers] == [0, 0]
