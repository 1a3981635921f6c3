"""Process groups: real processes on Gloo give the same bits, beside DDP and with DDP's hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from support.nightly import nightly
from support.paths import SUPPORT
from support.processes import free_port, succeed
from support.virtual_workers import notices

from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, NeighborAllGather
from gossamer.comm import device_wait, process_group
from gossamer.comm.communicator import Communicator
from gossamer.comm.environment.wait_progress import WaitProgress
from gossamer.comm.process_group import (
    BUSY,
    LONGEST_POLL_SECONDS,
    ArrivalRoll,
    ProcessGroupTransport,
    monitored_barrier,
    through_host,
)
from gossamer.errors import ConnectError, PeerLost

CHECKS = [
    "words_over_gloo",
    "parts_over_gloo",
    "sites_over_gloo",
    "turns_over_gloo",
    "compressors_over_gloo",
    "dense_equals_ddp",
    "dense_equals_ddp_on_integers",
    "dense_is_within_rounding_of_ddp",
    "hook_survives_rebuilding",
    "hook_skips_what_is_not_finite",
    "averages",
    "other_collectives_beside_the_lane",
]


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, *nightly(4)])
def test_real_workers(world: int) -> None:
    said = succeed([str(SUPPORT / "worker_checks.py"), *CHECKS], world, preload=["laws.subjects"])
    for text in said:
        assert [line for line in text.splitlines() if line.startswith("passed")] == [f"passed {c}" for c in CHECKS]


# -- over NCCL they are aborted, once and at once, and who has left is named -------------------------------------------

# No GPU takes part: what an engine is, is told by a name, and torch's abort is noted instead of called.


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A default group of this process alone; the groups that were aborted."""
    aborted: list[Any] = []
    monkeypatch.setattr(process_group, "_abort", aborted.append)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield aborted
    dist.destroy_process_group()


def broken(transport: ProcessGroupTransport) -> None:
    """What a dead peer comes to: the engine raises."""

    def fails(op: Any) -> Any:
        raise RuntimeError("NCCL communicator was aborted on rank 0: remote process exited")

    transport._start = fails  # type: ignore[method-assign]
    with pytest.raises(PeerLost, match="remote process exited"):
        transport.answer(None)  # type: ignore[arg-type]


def check_aborted(aborted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[Any] = []
    transport = ProcessGroupTransport()
    group, transport.takes_devices = transport._group, True
    broken(transport)
    assert aborted == [group], "kernels wait for a dead peer"
    broken(transport)
    assert aborted == [group], "a group is aborted once"
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    transport.close()
    assert destroyed == [], "what was aborted is not waited for"
    monkeypatch.undo()


def test_over_nccl_a_group_that_broke_is_aborted_and_not_waited_for(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        check_aborted(alone, patch)


def test_the_check_catches_a_group_that_is_left_as_it_is(alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "abort", lambda self: None)
    with pytest.raises(AssertionError, match="dead peer"):
        check_aborted(alone, monkeypatch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_of_any_device_but_the_host_pass_through_host_memory(
    device: str, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """meta stands for a device that is not CUDA, such as MPS."""
    monkeypatch.setattr(process_group, "through_host", lambda op, begin, place: "through host")
    op = AllReduceMean(torch.zeros(2, device=device))
    found: Any = ProcessGroupTransport()._here(op, lambda op: lambda: "directly", 0)
    assert (found if device == "meta" else found()) == ("through host" if device == "meta" else "directly")


@pytest.mark.parametrize("count", [3, 200_000])
def test_means_of_integers_are_exact(count: int, alone: list[Any]) -> None:
    numbers = torch.arange(count) + 2**24 + 1  # float32 would round them
    assert torch.equal(ProcessGroupTransport().answer(AllReduceMean(numbers)), numbers)


def test_a_mean_may_be_written_to_strided_memory(alone: list[Any]) -> None:
    numbers = torch.arange(6.0).view(2, 3)
    out = numbers.clone().t()
    assert ProcessGroupTransport().answer(AllReduceMean(out, out)) is out
    assert torch.equal(out, numbers.t())


class Endless:
    """Work that a dead peer owes something."""

    def is_completed(self) -> bool:
        return False


class OnGpu:
    is_cuda = True


def wait_for_the_dead(transport: ProcessGroupTransport) -> Any:
    return transport._begun(OnGpu(), lambda: [Endless()])  # type: ignore[arg-type]


def test_whoever_left_the_meeting_is_named_while_work_is_under_way(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_wait, "GRACE_SECONDS", 0.0)
    transport = ProcessGroupTransport()
    waiting = wait_for_the_dead(transport)
    monkeypatch.setattr(process_group, "gone", lambda: "rank 2 (host, process 17)")
    with pytest.raises(PeerLost, match=r"the group broke while rank 0 of 1.*rank 2 \(host, process 17\) has left"):
        waiting()
    assert alone == [transport._group]
    with pytest.raises(PeerLost, match="rank 2"):
        wait_for_the_dead(transport)
    assert alone == [transport._group], "a group is aborted once"


def test_next_to_a_mesh_its_peers_are_watched(alone: list[Any]) -> None:
    class Peers:
        def hung_up(self) -> bool:
            raise PeerLost("the mesh says so")

        def break_off(self, why: str) -> NoReturn:
            raise AssertionError(why)

    transport = ProcessGroupTransport()
    transport.watched_by(Peers())
    with pytest.raises(PeerLost, match="the mesh says so"):
        wait_for_the_dead(transport)()
    assert alone == [transport._group]


def test_the_default_group_is_never_aborted(alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    called: list[Any] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", called.append)
    process_group._abort(dist.group.WORLD)
    assert called == []
    process_group._abort("another")
    assert called == ["another"]


def test_over_gloo_nothing_is_aborted(alone: list[Any]) -> None:
    transport = ProcessGroupTransport()
    assert not transport.takes_devices
    broken(transport)
    assert alone == []
    transport.close()


def test_torch_has_the_call() -> None:
    assert callable(dist.distributed_c10d._abort_process_group)


# -- who is waited for, who says so, and what ends the wait ------------------------------------------------------------


class Store:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.checks = 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self.checks += len(keys)
        return all(key in self.values for key in keys)


class Time:
    """A clock that is moved by who sleeps, and at whose moments something happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds <= LONGEST_POLL_SECONDS
        assert self.now < 2000, "nothing ends this wait"
        self.now += seconds
        for each in [each for each in self.due if each[0] <= self.now]:
            self.due.remove(each)
            each[1]()


@pytest.fixture
def said() -> Iterator[list[str]]:
    with notices() as heard:
        yield heard


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def time() -> Time:
    return Time()


def enter(store: Store, rank: int, world: int = 4, name: str = "attach 0") -> None:
    ArrivalRoll(store, name, rank, world).enter()


def wait(store: Store, time: Time, rank: int, seconds: float = 1800.0, gone: Callable[[], str] = lambda: "") -> None:
    progress = WaitProgress(rank, "gossamer.attach()", seconds, clock=time)
    monitored_barrier(ArrivalRoll(store, "attach 0", rank, 4), progress, gone, time.sleep)


def test_a_peer_that_still_loads_its_data_is_waited_for_aloud(store: Store, time: Time, said: list[str]) -> None:
    time.due = [(1.0, lambda: enter(store, 2)), (12.0, lambda: enter(store, 1)), (25.0, lambda: enter(store, 3))]
    wait(store, time, 0)
    assert 25 <= time.now < 25.2
    assert said == [
        "rank 0 has waited 10 s for ranks 1 and 3 to reach gossamer.attach(), and waits for 30 min at most "
        f"(GOSSAMER_TIMEOUT=1800). {BUSY}",
        "rank 0 has waited 20 s for rank 3 to reach gossamer.attach(), and waits for 30 min at most "
        "(GOSSAMER_TIMEOUT=1800).",
        "rank 0 continues: all reached gossamer.attach() after 25 s",
    ]


def test_a_rank_that_is_alone_in_attach_names_the_line_that_every_rank_needs() -> None:
    assert "Every rank must call it, not only if world.is_first" in BUSY


@pytest.mark.parametrize(("rank", "speaks"), [(2, True), (3, False)])
def test_the_lowest_rank_that_has_come_speaks(
    store: Store, time: Time, said: list[str], rank: int, speaks: bool
) -> None:
    for each in {1, 2, 3} - {1, rank}:
        enter(store, each)
    time.due = [(15.0, lambda: enter(store, 0)), (15.0, lambda: enter(store, 1))]
    wait(store, time, rank)
    assert bool(said) == speaks
    assert [each for each in said if "for ranks 0 and 1 to reach" in each] == said[:1]


def test_ranks_that_come_together_wait_for_a_moment_and_say_nothing(store: Store, time: Time, said: list[str]) -> None:
    for rank in (1, 2, 3):
        enter(store, rank)
    wait(store, time, 0)
    assert time.now == 0
    assert said == []


def test_a_barrier_counts_only_who_came_to_it(store: Store, time: Time) -> None:
    for rank in range(4):
        enter(store, rank, name="attach 1")
    with pytest.raises(ConnectError, match="ranks 0 to 2 did not reach"):
        wait(store, time, 3, seconds=5.0)


def test_a_peer_that_never_comes_is_named_when_the_time_is_up(store: Store, time: Time) -> None:
    enter(store, 1)
    with pytest.raises(ConnectError, match=r"ranks 0 and 3 did not reach gossamer\.attach\(\) within 30 min.*=7200"):
        wait(store, time, 2)
    assert 1800 <= time.now < 1801


def test_a_peer_that_has_left_is_waited_for_no_longer(store: Store, time: Time) -> None:
    with pytest.raises(
        PeerLost, match=r"rank 3 \(w3\) left while rank 0 waited for all ranks to reach gossamer\.attach"
    ):
        wait(store, time, 0, inf, lambda: "rank 3 (w3)" if time.now > 7 else "")
    assert time.now < 7.2


@pytest.mark.parametrize(("gone", "error"), [("rank 0", PeerLost), ("", RuntimeError)])
def test_where_the_store_ends_with_its_rank_that_is_named(
    store: Store, time: Time, monkeypatch: pytest.MonkeyPatch, gone: str, error: type[Exception]
) -> None:
    def check(keys: list[str]) -> bool:
        raise RuntimeError("got 0 bytes")

    monkeypatch.setattr(store, "check", check)
    with pytest.raises(error):
        wait(store, time, 1, gone=lambda: gone)


def test_a_long_wait_asks_the_store_little(store: Store, time: Time) -> None:
    """A thousand ranks ask one store."""
    time.due = [(600.0, lambda: [enter(store, rank) for rank in (0, 1, 2)])]
    wait(store, time, 3)
    assert store.checks < 11 * 600


# -- Through host: an engine sees tensors of this machine only, and answers come back to where the operation's lie

OPS: list[Any] = [
    AllReduceMean(torch.arange(3.0)),
    AllReduceMean(torch.arange(3.0), torch.empty(3)),
    AllGather((torch.arange(3.0), torch.tensor([1]))),
    AllToAll(((torch.arange(3.0),),)),
    NeighborAllGather((torch.arange(3.0),), ((0, 1.0),)),
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_answers_are_those_of_the_engine(op: Any) -> None:
    seen: list[Any] = []

    def begin(here: Any) -> Any:
        seen.append(here)
        return lambda: answer_all([here])[0]

    found, due = through_host(op, begin, 0)(), answer_all([op])[0]
    assert all(tensor.device.type == "cpu" for tensor in seen[0].tensors())
    if isinstance(op, AllReduceMean):
        assert torch.equal(found, due)
        assert op.out is None or found is op.out
    else:
        assert all(torch.equal(*pair) for pair in zip(found[0], due[0], strict=True))
