"""Process groups that broke: over NCCL they are aborted, once and at once, and who has left is named.

No GPU takes part: what an engine is, is told by a name, and torch's abort is noted instead of called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from support.processes import free_port

from gossamer.comm import peer_watch, process_group
from gossamer.comm.communicator import Communicator
from gossamer.comm.process_group import ProcessGroupTransport
from gossamer.errors import PeerLost


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
    monkeypatch.setattr(peer_watch, "GRACE_SECONDS", 0.0)
    transport = ProcessGroupTransport()
    waiting = wait_for_the_dead(transport)
    monkeypatch.setattr(process_group, "gone", lambda: "rank 2 (host, process 17)")
    with pytest.raises(PeerLost, match=r"the group broke while rank 0 of 1.*rank 2 \(host, process 17\) has left"):
        waiting()
    assert alone == [transport._group]
    with pytest.raises(PeerLost, match="rank 2"):
        wait_for_the_dead(transport)
    assert alone == [transport._group], "a group is aborted once"


def test_beside_a_mesh_its_peers_are_watched(alone: list[Any]) -> None:
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
