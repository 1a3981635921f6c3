"""Process groups that broke: over NCCL they are aborted, once and at once; survivors make another one beside.

No GPU takes part: what an engine is, is told by a name, and torch's abort is noted instead of called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support.paths import SUPPORT
from support.processes import free_port, succeed

from gossamer.errors import PeerLost
from gossamer.transports import process_group
from gossamer.transports.process_group import ProcessGroupTransport


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
    again = transport.rebuilt([0])
    assert (again.rank, again.world, again.groups) == (0, 1, [(0,)])
    assert again.all_gather_text("here") == ["here"]
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    transport.close()
    assert destroyed == [], "what was aborted is not waited for"
    own = again._group
    again.close()
    assert destroyed == [own]
    monkeypatch.undo()


def test_over_nccl_a_group_that_broke_is_aborted_and_rebuilt_beside(
    alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        check_aborted(alone, patch)


def test_the_check_catches_a_group_that_is_left_as_it_is(alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroupTransport, "_abort", lambda self: None)
    with pytest.raises(AssertionError, match="dead peer"):
        check_aborted(alone, monkeypatch)


def test_over_gloo_nothing_is_aborted(alone: list[Any]) -> None:
    transport = ProcessGroupTransport()
    assert not transport.takes_devices
    broken(transport)
    assert alone == []
    transport.close()


def test_torch_has_the_call() -> None:
    assert callable(dist.distributed_c10d._abort_process_group)


@pytest.mark.processes
def test_survivors_of_a_real_group_go_on_in_one_beside_it() -> None:
    said = succeed([str(SUPPORT / "rebuilt_group.py")], 3)
    assert ["went on" in text for text in said] == [True, True, False]
