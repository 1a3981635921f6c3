"""Sessions of an elastic run with servers: other workers come and go between two steps, and nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.elastic.served_member import ServedMember
from gossamer.comm.membership.view import Member, View
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import AttachError, CheckpointError, LoopError, Stopped
from gossamer.train.engine.extension import Extensions
from gossamer.train.session.arrays import _refuse_servers
from gossamer.train.session.group_changes import ServedChanges, WorldChange
from gossamer.train.session.recipe_choice import refuse_inelastic
from gossamer.train.synchronizers.server_averaging import ServerAveraging
from gossamer.train.world_state import WorldState


def view(number: int, *members: int) -> View:
    where = tuple(Member(number=each, host="h", port=1) for each in members)
    return View(number=number, members=where, newcomers=frozenset(), secret=bytes(16))


class Agent:
    """A membership that a test changes."""

    def __init__(self, number: int) -> None:
        self.number, self.began = number, 2
        self.now: View | None = None
        self.released, self.left = False, list[bool]()
        self.reported: list[str] = []

    def newer_view(self, number: int) -> View | None:
        if self.released:
            raise Stopped
        return self.now if self.now is not None and self.now.number > number else None

    def attached(self, fingerprint: str) -> None:
        self.reported.append("attached")

    def ready(self, fingerprint: str) -> None:
        self.reported.append("ready")
        self.now = view(2, 1, 2, self.number)

    def view_after(self, number: int, seconds: float) -> View:
        assert self.now is not None
        return self.now

    def leave(self, *, finished: bool = False) -> None:
        self.left.append(finished)


class Setting:
    """One session's changes, with a stand-in for the session."""

    def __init__(self, number: int, first: View | None) -> None:
        self.agent, self.left = Agent(number), 0
        self.member = ServedMember(self.agent, first, 1.0)  # type: ignore[arg-type]
        self.world = WorldState(rank=0, size=2, local_rank=0, device=torch.device("cpu"), joins=first is None)
        self.session = SimpleNamespace(_world=self.world, _synchronizer=self, request_stop=lambda: None)
        self.comm_thread = CommThread([], fixed=False)
        self.extensions = Extensions()
        self.changes = ServedChanges(self.member, self.session, self.comm_thread, self.extensions)  # type: ignore[arg-type]
        self.seen: list[WorldChange] = []
        self.changes.listen(self.seen.append)
        self.changes.admit({"torch": "1"})

    step, passes, buckets = 7, 7, ()

    def leave(self) -> None:
        self.left += 1


@pytest.fixture
def setting() -> Iterator[Setting]:
    found = Setting(2, view(1, 1, 2))
    yield found
    found.comm_thread.close()


def test_the_loop_is_called_back_after_the_step_in_which_workers_came_or_went(setting: Setting) -> None:
    assert (setting.world.rank, setting.world.size) == (1, 2)
    setting.changes.after_step()
    assert not setting.seen
    setting.agent.now = view(4, 2, 5, 6)
    setting.changes.after_step()
    assert setting.seen == [WorldChange(size=3, size_before=2, rank=0, lost=(0,), joined=2, step=7)]
    assert (setting.world.rank, setting.world.size) == (0, 3)


def test_the_data_of_a_worker_stay_when_others_come_and_go(setting: Setting) -> None:
    shard = setting.world.shard(range(100))
    before = list(shard)
    setting.agent.now = view(4, 2, 5, 6)
    setting.changes.after_step()
    assert shard.rank == 1
    assert len(before) == len(list(shard)) == 50


def test_a_newcomer_has_a_place_before_it_connects_to_the_servers() -> None:
    setting = Setting(9, None)
    assert setting.agent.reported == ["ready"]
    assert (setting.world.rank, setting.world.size) == (2, 3)
    setting.comm_thread.close()


def test_a_worker_that_must_leave_sends_what_it_has_and_leaves_the_servers(setting: Setting) -> None:
    setting.agent.released = True
    with pytest.raises(Stopped):
        setting.changes.after_step()
    assert setting.left == 1
    assert setting.changes.ended("finished") == "interrupted"


def test_a_worker_that_has_finished_says_so_once(setting: Setting) -> None:
    setting.changes.farewell()
    setting.member.leave()
    assert setting.agent.left == [True]
    assert setting.changes.ended("finished") == "finished"


def test_the_group_of_one_worker_is_no_group_alone(setting: Setting) -> None:
    assert not setting.comm_thread.is_alone(1)


def test_checkpoints_of_all_workers_are_refused_with_the_line_to_write(setting: Setting) -> None:
    with pytest.raises(CheckpointError, match="load_state_dict"):
        setting.changes.refuse_loaded()
    synchronizer: Any = SimpleNamespace(_elastic=True)
    with pytest.raises(LoopError, match=r"torch\.save"):
        ServerAveraging.meet_to_save(synchronizer)


@pytest.mark.parametrize(
    ("recipe", "servers", "hint"),
    [
        ("AsyncDiLoCo(period=24)", 0, "--servers 1"),
        ("ParameterServer()", 1, r"AsyncDiLoCo\(period=24\)"),
        ("Dense()", 1, "Leave out --servers"),
        ("AsyncDiLoCo(period=24, quorum=9)", 1, "quorum=8"),
    ],
)
def test_recipes_that_servers_cannot_keep_elastic_are_refused(recipe: str, servers: int, hint: str) -> None:
    with pytest.raises(AttachError, match=hint):
        refuse_inelastic(resolve(recipe), range(2, 9), servers=servers)


def test_sessions_of_arrays_are_refused(setting: Setting) -> None:
    with pytest.raises(AttachError, match="torch model"):
        _refuse_servers(setting.member)


def test_asyncdiloco_is_elastic_with_servers() -> None:
    refuse_inelastic(resolve("AsyncDiLoCo(period=24, quorum=8, pull=Int8()) + Int8()"), range(2, 9), servers=1)


def test_newcomers_draw_data_in_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(order: int) -> list[int]:
        monkeypatch.setenv("GOSSAMER_DATA_ORDER", str(order))
        world = WorldState(rank=1, size=2, local_rank=0, device=torch.device("cpu"))
        return list(world.shard(range(100)))

    assert drawn(0) != drawn(1) != drawn(2)
    assert drawn(2**20) == drawn(2**20)


def test_changes_are_recorded(setting: Setting) -> None:
    seen: list[events.Event] = []
    unsubscribe = events.subscribe(seen.append)
    setting.agent.now = view(2, 1, 2, 3)
    setting.changes.after_step()
    unsubscribe()
    assert [each.world for each in seen if isinstance(each, events.GroupChanged)] == [3]
