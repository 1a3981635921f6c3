"""Ray groups: settings of workers, and numbers between two reports."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gossamer import events
from gossamer.comm.environment.run_token import TOKEN_BYTES, run_token
from gossamer.events import StepEnded
from gossamer.integrations import ray_group
from gossamer.integrations.ray_group import GroupSettings, SessionNumbers, enter_group, leave_group, start_group


@dataclass(frozen=True)
class Place:
    """Worker `rank` of several, of whom `local` are on each machine."""

    rank: int
    world: int
    local: int

    def get_world_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.world

    def get_local_rank(self) -> int:
        return self.rank % self.local

    def get_local_world_size(self) -> int:
        return self.local

    def get_node_rank(self) -> int:
        return self.rank // self.local


def settings(**options: Any) -> GroupSettings:
    return GroupSettings(address="10.0.0.7", port=4321, timeout_seconds=60.0, **options)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield
    leave_group()


def test_a_worker_learns_its_place_and_where_rank_0_is() -> None:
    told = settings().variables(Place(rank=3, world=4, local=2))
    ranks = {name: told[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")}
    assert list(ranks.values()) == ["3", "4", "1", "2", "1"]
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("10.0.0.7", "4321")
    assert told["GOSSAMER_TIMEOUT"] == "60"
    assert not told.keys() & {"GOSSAMER_TLS", "GLOO_SOCKET_IFNAME"}


def test_workers_of_one_machine_are_reached_from_nowhere_else() -> None:
    assert settings().variables(Place(rank=1, world=2, local=2))["MASTER_ADDR"] == "127.0.0.1"


def test_encryption_and_an_interface_are_asked_for() -> None:
    told = settings(tls="/certificates", interface="eth1").variables(Place(rank=0, world=2, local=1))
    assert (told["GOSSAMER_TLS"], told["GLOO_SOCKET_IFNAME"]) == ("/certificates", "eth1")


def test_the_token_is_never_printed() -> None:
    held = settings(token=b"secret of thirty-two bytes here!")
    assert "secret" not in repr(held)
    assert "port=4321" in repr(held)
    assert not any("secret" in value for value in held.variables(Place(0, 2, 2)).values())


def test_a_worker_keeps_the_token_to_its_user_and_only_while_it_trains() -> None:
    given = bytes(range(TOKEN_BYTES))
    enter_group(settings(token=given), lambda: Place(0, 2, 2))
    file = Path(os.environ["GOSSAMER_TOKEN_FILE"])
    assert file.read_bytes() == given
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run_token()
    leave_group()
    assert not file.parent.exists()
    leave_group()  # once more harms nothing


def test_a_group_that_is_started_again_forgets_the_one_before() -> None:
    enter_group(settings(), lambda: Place(0, 2, 2))
    before = Path(os.environ["GOSSAMER_TOKEN_FILE"])
    enter_group(settings(), lambda: Place(0, 2, 2))
    assert not before.exists()
    assert Path(os.environ["GOSSAMER_TOKEN_FILE"]).exists()


class RecordingGroup:
    """Calls nothing, and remembers what was to be called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def execute(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.calls.append((function, *arguments))
        return []

    def execute_single(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        assert rank == 0
        return function(*arguments)


def test_all_enter_before_any_joins_and_each_start_has_its_own_secret() -> None:
    def place() -> Place:
        return Place(0, 2, 2)

    groups = [RecordingGroup(), RecordingGroup()]
    for group in groups:
        start_group(group, lambda: ("10.0.0.7", 4321), place, timeout_seconds=60.0)
        assert [call[0] for call in group.calls] == [enter_group, ray_group._join]
    first, second = (group.calls[0][1] for group in groups)
    assert (first.address, first.port) == (second.address, second.port) == ("10.0.0.7", 4321)
    assert len({first.token, second.token}) == len({first.run, second.run}) == 2


def steps(*seconds: float, bytes_sent: float = 100.0, skipped: bool = False) -> None:
    for number, each in enumerate(seconds):
        waiting = each / 4
        events.emit(
            StepEnded(step=number, seconds=each, waiting_seconds=waiting, bytes_sent=bytes_sent, skipped=skipped)
        )


def test_each_report_has_the_steps_since_the_last() -> None:
    numbers = SessionNumbers()
    end = numbers.watch()
    try:
        steps(1.0, 3.0)
        steps(8.0, bytes_sent=400.0, skipped=True)
        assert numbers.take() == {
            "gossamer/steps": 3,
            "gossamer/skipped": 1,
            "gossamer/step_seconds": 4.0,
            "gossamer/waiting_seconds": 1.0,
            "gossamer/bytes_per_step": 200.0,
        }
        assert numbers.take() == {}
        steps(2.0)
        assert numbers.take()["gossamer/step_seconds"] == 2.0
    finally:
        end()
    steps(2.0)
    assert numbers.take() == {}


def test_notices_still_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It shows none, so it must not keep them from who does."""
    end = SessionNumbers().watch()
    try:
        events.notice("said once")
    finally:
        end()
    assert "said once" in caplog.text
