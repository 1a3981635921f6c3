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
from support.joining import attends, hello, in_threads, job
from support.processes import SOON_SECONDS

from gossamer.comm.environment import JobEnvironment, device_for, join, leave, rendezvous
from gossamer.comm.environment.host_info import own_gpus
from gossamer.comm.environment.meeting import RunIdentity
from gossamer.comm.environment.meeting_member import attend
from gossamer.comm.environment.meeting_server import MeetingServer
from gossamer.comm.environment.tcp_store import hosted_store
from gossamer.errors import ConnectError, LeftWhileJoining

pytestmark = pytest.mark.usefixtures("environ")


def failure(rank, port, seconds=0.3, world=2):
    started = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        join(job(rank, port, world), seconds)
    assert time.monotonic() - started < seconds + SOON_SECONDS
    assert not dist.is_initialized()
    assert f"127.0.0.1:{port}" in str(caught.value)
    return str(caught.value)


def test_nobody_listens(port):
    assert "rank 0 was not started" in failure(1, port)


def test_missing_workers_are_counted_and_named(port):
    message = failure(0, port, world=3)
    assert "ranks 1 and 2 of 3 did not join within 0.3 s" in message
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
        message = failure(0, other.getsockname()[1], seconds=100)
    assert "choose another: MASTER_PORT" in message
    assert time.monotonic() - started < SOON_SECONDS


def join_all(port, *ranks):
    return in_threads(*(lambda rank=rank: join(job(rank, port), 5.0) for rank in ranks))


def test_everyone_meets_and_forms_a_group(port, formed):
    assert join_all(port, 0, 1) == ["gloo", "gloo"]
    assert formed == ["gloo", "gloo"]


def check_gpus(port, formed, others, backend, device):
    """Of two workers of a machine, of which the first sees one GPU, a; device: the second's own."""

    def other():
        with contextlib.closing(attends(port, 1, gpus=others)) as member:
            member.everyone("coming", 5.0)
            member.everyone("reaching", 5.0, "")
            member.everyone("standing", 5.0, "")

    assert in_threads(lambda: join(job(0, port), 5.0), other)[0] == backend
    assert formed == [backend]
    assert device_for(job(0, port)) == torch.device("cuda", 0)
    assert device_for(job(1, port)) == torch.device(device)


@pytest.fixture
def _sees_a(monkeypatch):
    monkeypatch.setattr(rendezvous, "visible_gpus", lambda environ: ["a"])


@pytest.mark.usefixtures("_sees_a")
@pytest.mark.parametrize(
    ("others", "backend", "device"),
    [
        ("", "gloo", "cpu"),
        ("a", "gloo", "cpu"),  # one for two workers
        ("b", "cpu:gloo,cuda:nccl", "cuda:0"),  # each sees its own
        ("a,b", "cpu:gloo,cuda:nccl", "cuda:1"),
    ],
)
def test_all_know_which_gpus_all_see(port, formed, others, backend, device):
    check_gpus(port, formed, others, backend, device)
    rendezvous.leave_meeting()
    assert device_for(job(1, port)) == torch.device("cpu"), "what is known of a group ends with it"


@pytest.mark.usefixtures("_sees_a")
@pytest.mark.parametrize(
    ("others", "backend", "device", "broken"),
    [
        ("a", "gloo", "cpu", lambda seen: [0 if gpus else None for gpus in seen]),  # looks at its own alone
        ("b", "cpu:gloo,cuda:nccl", "cuda:0", lambda seen: own_gpus([seen[0]] * len(seen))),  # takes all for alike
    ],
)
def test_the_check_catches_who_does_not_listen(port, monkeypatch, formed, others, backend, device, broken):
    monkeypatch.setattr(rendezvous, "own_gpus", broken)
    with pytest.raises(AssertionError):
        check_gpus(port, formed, others, backend, device)


def second_of_a_rank(port):
    """What the second worker under rank 1 hears, while the first waits for the others."""
    (outcome,) = join_all(port, 1)
    assert isinstance(outcome, ConnectError)
    return str(outcome)


@pytest.fixture
def rank_1_is_there(port):
    identity = RunIdentity(run="without a name, start 1", world=2)
    server = MeetingServer(socket.create_server(("127.0.0.1", port)), identity)
    with contextlib.closing(server), contextlib.closing(attends(port, 1)):
        yield


@pytest.mark.usefixtures("rank_1_is_there")
def test_a_second_worker_of_the_same_rank_is_refused(port):
    said = second_of_a_rank(port)
    assert "another worker (w1) is already present as rank 1" in said
    assert "MASTER_PORT" in said
    assert "GOSSAMER_RUN" in said


@pytest.mark.usefixtures("rank_1_is_there")
def test_a_process_that_imports_the_script_again_is_told_so(port, monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    assert second_of_a_rank(port).endswith('Put the program under `if __name__ == "__main__":`')


@pytest.mark.usefixtures("rank_1_is_there")
def test_a_process_that_a_worker_has_spawned_is_told_so(port, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    said = second_of_a_rank(port)
    assert "the rank of the worker that started it" in said
    assert "without torch.multiprocessing.spawn" in said
    assert "Another program" not in said


@pytest.mark.usefixtures("rank_1_is_there")
def test_a_worker_of_another_run_is_refused(port, environ):
    environ["GOSSAMER_RUN"] = "older"
    said = second_of_a_rank(port)
    assert "it belongs to the run 'older, start 1' and this is the run 'without a name, start 1'" in said


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
        [sys.executable, tmp_path / "train.py"], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == ["False", "True"]


def test_a_blocked_network_is_told_to_all(port):
    """Rank 1 says hello from a port where nobody listens, as if a firewall were in between."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = closed.getsockname()[1]

    def rank_1():
        with contextlib.closing(attends(port, 1, address="127.0.0.1", port=dead)) as member:
            return member.everyone("reaching", 5.0, "")

    error, outcomes = in_threads(lambda: join(job(0, port), 5.0), rank_1)
    assert isinstance(error, ConnectError)
    assert "rank 0 cannot reach rank 1 at 127.0.0.1" in str(error)
    assert "firewall" in str(error)
    assert "rank 0 cannot reach rank 1" in outcomes[0]


def test_any_two_ranks_that_do_not_reach_each_other_are_named(port, formed):
    """Not only one and the next: torch would wait half an hour for each."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = closed.getsockname()[1]

        def other(rank, **at):
            identity = RunIdentity(run="without a name, start 1", world=3)
            said = hello(rank, world=3, **at)
            with contextlib.closing(attend(lambda: ("127.0.0.1", port), identity, said, 5.0)) as member:
                return member.everyone("reaching", 5.0, "")

        error, *_ = in_threads(
            lambda: join(job(0, port, 3), 5.0), lambda: other(1), lambda: other(2, address="127.0.0.1", port=dead)
        )
    assert isinstance(error, ConnectError)
    assert "rank 0 cannot reach rank 2 at 127.0.0.1 (Connection refused)" in str(error)


def test_a_peer_that_dies_while_the_group_forms_is_named_to_all_at_once(port, monkeypatch):
    """Torch itself would wait for half an hour."""
    forming, dead = threading.Event(), threading.Event()
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: (forming.set(), dead.wait(60)))

    def rank_1():
        member = attends(port, 1)
        member.everyone("reaching", 5.0, "")
        forming.wait(10)
        member.close()

    began = time.monotonic()
    error, _ = in_threads(lambda: join(job(0, port), 5.0), rank_1)
    dead.set()
    assert isinstance(error, LeftWhileJoining)
    assert "rank 1 (w1) left while the workers were joining" in str(error)
    assert time.monotonic() - began < SOON_SECONDS


def test_a_peer_that_dies_before_all_stand_is_named_to_who_does(port, formed):
    def rank_1():
        member = attends(port, 1)
        member.everyone("reaching", 5.0, "")
        member.close()

    error, _ = in_threads(lambda: join(job(0, port), 5.0), rank_1)
    assert isinstance(error, LeftWhileJoining)
    assert formed == ["gloo"]


@pytest.mark.parametrize(
    ("greeting", "told"), [(b"", "sent nothing within 2 s"), (b"SSH-2.0-OpenSSH_9.2\r\n", "b'SSH-2.0")]
)
def test_a_foreign_program_at_the_meeting_point_is_told_from_a_meeting(port, greeting, told):
    with socket.create_server(("127.0.0.1", port)) as foreign:

        def answer():
            link, _ = foreign.accept()
            link.sendall(greeting)
            return link

        began = time.monotonic()
        error, link = in_threads(lambda: join(job(1, port), 60.0), answer)
        link.close()
    assert time.monotonic() - began < SOON_SECONDS
    assert told in str(error)
    assert "MASTER_PORT=<a free port>" in str(error)


def test_rank_0_listens_where_it_is_found_and_nowhere_else(port, formed):
    assert join_all(port, 0, 1) == ["gloo", "gloo"]
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # refused where somebody listens on every address


def test_a_latecomer_is_refused_and_told_why(port, formed):
    assert join_all(port, 0, 1) == ["gloo", "gloo"]
    assert "is already present as rank 1" in second_of_a_rank(port)


def test_a_restarted_job_does_not_meet_where_the_last_attempt_did(port, environ, formed):
    server = hosted_store("127.0.0.1", socket.create_server(("127.0.0.1", port)), timeout=timedelta(seconds=5))
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for attempt in ("0", "1"):
        environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        with pytest.raises(ConnectError, match=r"rank 1 of 2 did not join within 0\.2 s"):
            join(job(0, port), 0.2)
    assert server.get("gossamer/0/meeting") != server.get("gossamer/1/meeting")
    assert join_all(port, 0, 1) == ["gloo", "gloo"]  # rank 0 takes the place of the one that has gone


def test_a_second_rank_0_by_a_launchers_store_is_refused(port, environ, formed):
    server = hosted_store("127.0.0.1", socket.create_server(("127.0.0.1", port)))
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with socket.create_server(("127.0.0.1", 0)) as first:
        server.set("gossamer/0/meeting", f"127.0.0.1:{first.getsockname()[1]}")
        (error,) = join_all(port, 0)
    assert "another worker is already present as rank 0" in str(error)


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


def test_without_a_meeting_workers_of_a_machine_are_taken_to_see_the_same_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_for(JobEnvironment(local_rank=1, local_world=3, world=3)) == torch.device("cuda", 1)
    assert device_for(JobEnvironment(local_rank=2, local_world=3, world=3)) == torch.device("cpu")


WORKER = """
import os, torch, torch.distributed as dist
import gossamer.world, gossamer.train.world_state
world = gossamer.world.init()
assert gossamer.world.init() is world and gossamer.train.world_state.current() is world._state
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
        said = [worker.communicate(timeout=200)[1] for worker in workers]
    assert said == [f"{rank}/2 cpu 3.0" for rank in (0, 1)]
    assert [worker.returncode for worker in workers] == [0, 0]


class CountingStore(dist.Store):
    """Passes requests on, and counts those that wait for other ranks."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.requests = inner, 0

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        self.requests += 1
        return self.inner.get(key)

    def wait(self, keys, timeout):
        self.requests += 1
        self.inner.wait(keys, timeout)

    def has_extended_api(self):
        return True

    def multi_get(self, keys):
        self.requests += 1
        return self.inner.multi_get(keys)


FORMED = []  # torch ends the process if a group is freed while another thread forms one


def requests_of_forming(size):
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(size)]

    def form(rank):
        return dist.ProcessGroupGloo(stores[rank], rank, size, timedelta(seconds=30))

    FORMED.extend(in_threads(*(lambda rank=rank: form(rank) for rank in range(size))))
    return [store.requests for store in stores]


def test_a_rank_reads_the_addresses_of_all_others_in_one_request(port, environ, monkeypatch):
    failure(1, port)
    assert environ[rendezvous.BATCHED_STORE] == "1"
    monkeypatch.undo()  # torch reads the process's own environment
    monkeypatch.setenv(rendezvous.BATCHED_STORE, "1")
    assert requests_of_forming(4) == [1] * 4
    monkeypatch.setenv(rendezvous.BATCHED_STORE, "0")
    assert requests_of_forming(4) == [8] * 4


def test_the_users_value_for_the_store_wins(port, environ):
    environ[rendezvous.BATCHED_STORE] = "0"
    failure(1, port)
    assert environ[rendezvous.BATCHED_STORE] == "0"
