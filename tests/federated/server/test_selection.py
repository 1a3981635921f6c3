"""Selection: who is chosen, by chance, by loss, by speed, by how often before; and that a restart changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf, sqrt

import pytest

from gossamer.federated.messages import Report
from gossamer.federated.server.selection import (
    NAMED,
    LeastTrained,
    PowerOfChoice,
    SelectionPolicy,
    Uniform,
    WithinDeadline,
)

POLICIES: list[Callable[[], SelectionPolicy]] = [Uniform, LeastTrained, PowerOfChoice, lambda: WithinDeadline(10.0)]


def tell(policy: SelectionPolicy, client: int, loss: float = 1.0, seconds: float = 1.0, samples: int = 1) -> None:
    policy.record_report(client, Report(samples=samples, steps=1, metrics={"loss": loss}), seconds)


@pytest.mark.parametrize("make", POLICIES)
def test_as_many_as_wanted_of_those_that_are_there_and_the_same_again(make: Callable[[], SelectionPolicy]) -> None:
    policy, again = make(), make()
    for index in range(20):
        available = [client for client in range(30) if (client + index) % 3]
        chosen = policy.choose(available, 5, index)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == 5
        assert set(chosen) <= set(available)
        assert again.choose(available, 5, index) == chosen
        for client in chosen:
            tell(policy, client, loss=client / 7, seconds=client)
        again.load_state_dict(policy.state_dict())  # as after a restart
    assert policy.choose([3, 4], 2, 99) == [3, 4]


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("before", POLICIES)
def test_what_another_policy_remembered_is_nothing_to_it(
    before: Callable[[], SelectionPolicy], make: Callable[[], SelectionPolicy]
) -> None:
    """As after a restart with another one."""
    told, found = before(), make()
    for client in range(8):
        tell(told, client, loss=client, seconds=2.0 * client)
    found.load_state_dict(told.state_dict())
    if type(told) is not type(found):
        assert found.choose(range(8), 3, 0) == make().choose(range(8), 3, 0)


def test_policies_have_names() -> None:
    made = {name: make(7, 60.0) for name, make in NAMED.items()}
    assert [type(each) for each in made.values()] == [Uniform, LeastTrained, PowerOfChoice, WithinDeadline]
    assert {each.seed for each in made.values()} == {7}  # type: ignore[attr-defined]
    assert made["within-deadline"] == WithinDeadline(60.0, 7)
    with pytest.raises(ValueError, match=r"add --round-seconds 600, or write --selection uniform"):
        NAMED["within-deadline"](7, inf)


def test_uniform_is_uniform() -> None:
    counts = Counter(client for index in range(2000) for client in Uniform(1).choose(range(10), 3, index))
    spread = sqrt(2000 * 0.3 * 0.7)
    assert max(abs(count - 600) for count in counts.values()) < 4 * spread
    assert Uniform(1).choose(range(10), 3, 0) != Uniform(2).choose(range(10), 3, 0)


def test_those_who_trained_least_come_first() -> None:
    policy = LeastTrained()
    for client in (0, 0, 1, 2):
        tell(policy, client)
    assert policy.choose([0, 1, 2, 3], 1, 0) == [3]
    assert policy.choose([0, 1, 2], 2, 0) == [1, 2]


def test_power_of_choice_takes_the_largest_losses_among_the_candidates() -> None:
    policy = PowerOfChoice(candidates=100.0)
    for client in range(8):
        tell(policy, client, loss=client)
    assert policy.choose(range(8), 3, 0) == [5, 6, 7]
    assert policy.choose(range(9), 1, 0) == [8]  # told none yet
    narrow = PowerOfChoice(candidates=1.0)
    narrow.losses = dict(policy.losses)
    assert len({tuple(narrow.choose(range(8), 3, index)) for index in range(20)}) > 10  # as uniform


def test_candidates_are_drawn_by_their_samples() -> None:
    policy = PowerOfChoice(candidates=1.0)
    for client in range(4):
        tell(policy, client, samples=9 if client == 0 else 1)
    hits = sum(policy.choose(range(4), 1, index) == [0] for index in range(2000))
    assert abs(hits - 1500) < 4 * sqrt(2000 * 0.75 * 0.25)


def test_slow_devices_are_left_out_while_there_are_others() -> None:
    policy = WithinDeadline(10.0, explored=0.0)
    for client, seconds in enumerate((1.0, 30.0, 20.0, 9.0)):
        tell(policy, client, seconds=seconds)
    policy.missed(4, 10.0)
    assert policy.choose(range(5), 2, 0) == [0, 3]
    assert policy.choose(range(5), 3, 0) == [0, 3, 4]
    assert policy.choose(range(6), 3, 0) == [0, 3, 5]  # not tried yet
    assert policy.choose(range(5), 4, 0) == [0, 2, 3, 4]
    curious = WithinDeadline(10.0, explored=1.0)
    curious.seconds = dict(policy.seconds)
    assert curious.choose(range(5), 3, 0) == [1, 2, 4]


@pytest.mark.parametrize(
    "make",
    [lambda: PowerOfChoice(candidates=0.5), lambda: WithinDeadline(0.0), lambda: WithinDeadline(1.0, explored=2)],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], SelectionPolicy]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()
