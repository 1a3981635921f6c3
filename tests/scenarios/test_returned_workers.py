"""Lost workers that come back alone."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm import environment
from gossamer.comm.detached import DetachedTransport
from gossamer.comm.environment import NO_GROUP, JobEnvironment, comebacks, join
from gossamer.errors import AttachError
from gossamer.train import world_state
from gossamer.train.sampler import Shard
from gossamer.train.session.transport_setup import transport_for
from gossamer.train.world_state import WorldState

JOB = JobEnvironment(rank=1, world=3, local_rank=1, local_world=3, master_address="127.0.0.1", master_port=1)


@pytest.fixture
def back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "GOSSAMER_SERVERS": "127.0.0.1:1",
        "GOSSAMER_REJOIN": "1",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(world_state, "_states", WeakKeyDictionary())


@pytest.mark.usefixtures("back")
def test_a_worker_that_comes_back_knows_its_place_and_waits_for_no_rank() -> None:
    found = gossamer.init()
    assert (found.rank, found.size) == (1, 3)
    assert not dist.is_initialized()
    assert join(JOB, seconds=0.1) == NO_GROUP


@pytest.mark.usefixtures("back")
def test_comebacks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comebacks() == 2
    monkeypatch.delenv("GOSSAMER_REJOIN")
    assert comebacks() == 0, "all were started again, which is not coming back"


def check_other_samples(shards: list[Shard]) -> None:
    first, second, third = (list(shard) for shard in shards)
    assert len({len(first), len(second), len(third)}) == 1
    assert first != second != third != first
    assert all(set(each) <= set(range(30)) and len(set(each)) == 10 for each in (first, second, third))


def test_a_worker_that_comes_back_begins_with_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(rejoin: str, count: int) -> Shard:
        monkeypatch.setenv("GOSSAMER_REJOIN", rejoin)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        return Shard(range(30), rank=1, size=3, seed=4)

    check_other_samples([made("", 0), made("1", 1), made("1", 2)])
    with pytest.raises(AssertionError):  # all were started again, and resume elsewhere
        check_other_samples([made("", 0), made("", 1), made("", 2)])


def test_epochs_after_a_comeback_differ_and_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "comebacks", lambda: 1)
    shard = Shard(range(30), rank=0, size=3)
    first, second = list(shard), list(shard)
    assert first != second
    monkeypatch.undo()
    other = Shard(range(30), rank=0, size=3)
    other.load_state_dict({"epoch": shard.epoch, "drawn": 0})
    assert list(other) == second


@pytest.mark.usefixtures("back")
@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)", "Gossip() + Ring()", "DelayedAveraging(delay=1)"])
def test_in_lock_step_nobody_is_taken_back(recipe: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(AttachError, match=r"rank 1 was lost and restarted alone.*gossamer run --servers 1"):
        gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe)


@pytest.mark.usefixtures("back")
def test_servers_of_their_own_take_a_worker_back(monkeypatch: pytest.MonkeyPatch) -> None:
    place = WorldState(rank=1, size=3, local_rank=1, device=torch.device("cpu"))
    transport = transport_for(place, resolve("ParameterServer()", 3))
    assert isinstance(transport, DetachedTransport)
    monkeypatch.delenv("GOSSAMER_SERVERS")  # servers beside workers are lost with them
    with pytest.raises(AttachError):
        transport_for(place, resolve("ParameterServer()", 3))


@pytest.mark.usefixtures("back")
def test_single_neighbours_take_a_worker_back(monkeypatch: pytest.MonkeyPatch) -> None:
    place = WorldState(rank=1, size=3, local_rank=1, device=torch.device("cpu"))
    monkeypatch.delenv("GOSSAMER_SERVERS")  # they need none
    assert isinstance(transport_for(place, resolve("Gossip('pairwise')", 3)), DetachedTransport)
    with pytest.raises(AttachError, match=r"Gossip\('pairwise'\)"):
        transport_for(place, resolve("Gossip() + Ring()", 3))
