"""Members of an elastic run with servers: they come and go while no other worker waits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from support.elastic_members import LIKE, PATIENCE_SECONDS, ElasticRun

from gossamer.base.ops import AllReduceMean
from gossamer.comm.elastic.served_member import ServedMember
from gossamer.errors import LoopError, MismatchError, Stopped

T = TypeVar("T")
SERVERS = ("127.0.0.1:20001", "127.0.0.1:20002")


@pytest.fixture
def run() -> Iterator[ElasticRun]:
    found = ElasticRun(servers=SERVERS)
    yield found
    for agent in found.agents:
        agent.close()
    found.server.close()


def begin(run: ElasticRun, count: int = 2) -> list[ServedMember]:
    members = [ServedMember(each, each.first_view(PATIENCE_SECONDS), PATIENCE_SECONDS) for each in run.begin(count)]
    for member in members:
        member.attached(LIKE)
    return members


def newcomer(run: ElasticRun, place: int, fingerprint: str = LIKE) -> ServedMember:
    agent = run.agent(place)
    agent.here(("127.0.0.1", 1000 + place))
    member = ServedMember(agent, None, PATIENCE_SECONDS)
    assert member.is_newcomer
    member.join(fingerprint)
    return member


def wait_for(found: Callable[[], T | None]) -> T:
    until = time.monotonic() + PATIENCE_SECONDS
    while not (result := found()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return result


def test_all_workers_learn_the_addresses_of_the_servers(run: ElasticRun) -> None:
    begin(run)
    assert [agent.servers for agent in run.agents] == [",".join(SERVERS)] * 2


def test_a_newcomer_has_a_place_although_no_member_makes_a_step(run: ElasticRun) -> None:
    first, second = begin(run)
    third = newcomer(run, 2)
    assert (third.rank, third.world) == (2, 3)
    before, now = wait_for(first.look)
    assert (before.world, now.world, first.world) == (2, 3, 3)
    assert first.look() is None
    third.leave()
    wait_for(lambda: second.look() and second.world == 2)


def test_a_newcomer_that_differs_is_refused(run: ElasticRun) -> None:
    begin(run)
    with pytest.raises(MismatchError, match="recipe"):
        newcomer(run, 2, json.dumps({"torch": "2.13.0", "recipe": "Silent()"}))


def test_the_newest_member_leaves_a_run_that_becomes_smaller(run: ElasticRun) -> None:
    first, _ = begin(run)
    third = newcomer(run, 2)
    run.server.resize(2)
    with pytest.raises(Stopped):
        wait_for(third.look)
    assert third.released
    wait_for(lambda: first.look() and first.world == 2)


def test_collective_operations_name_what_works_instead(run: ElasticRun) -> None:
    first, _ = begin(run)
    with pytest.raises(LoopError, match="averaged_parameters"):
        first.answer(AllReduceMean(torch.zeros(1)))
