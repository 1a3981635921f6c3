"""Newcomers that receive the state while the others train: whenever they come, however long the copy takes, and
whichever worker is lost meanwhile, all workers have the same bits, and no step is lost or counted twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Join, Loss, VirtualGroup
from support.elastic_training import again, check_alike, few_recipes, told, trained
from support.sessions import sgd
from support.virtual_workers import Worker, loss_of, network, seeded
from torch import Tensor, nn

from gossamer.comm.elastic import newcomer_state
from gossamer.comm.elastic.newcomer_state import BackgroundCopy
from gossamer.comm.elastic.value_transfer import Outgoing

STEPS = 14
FIRST = 3  # operation after all have said what newcomers must be like
WHOLE = 5  # the group of members and newcomers of the second view
MOST_OPERATIONS = 12  # of such a group, until training uses it


@contextmanager
def copies(polls: int) -> Iterator[None]:
    """Every state is copied in the background, and a copy takes until this many polls have been made."""

    class Paced(BackgroundCopy):
        polled = 0

        def begin(self, outgoing: Outgoing, version: str) -> None:
            self.polled = 0
            super().begin(outgoing, version)

        def is_done(self) -> bool:
            self.polled += 1
            if self.polled <= polls:
                return False
            self._thread.join()
            return super().is_done()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(newcomer_state, "COPIED_BYTES", 0)
        patch.setattr(newcomer_state, "BackgroundCopy", Paced)
        yield


def check(recipe: Any, polls: int, join: Join, losses: tuple[Loss, ...] = (), newcomers: int = 1) -> int:
    """How many workers there are in the end."""
    with again(recipe, polls, join, losses), copies(polls):
        run = ElasticRun(3, losses, newcomers, join)
        return len(check_alike(run(partial(trained, recipe, steps=STEPS)), STEPS))


@few_recipes
def test_a_newcomer_agrees_with_the_others_however_long_its_copy_takes(recipe: str) -> None:
    random = Random(recipe)
    for polls in (0, 2):
        op = random.randrange(FIRST, FIRST + 4)
        assert check(recipe, polls, Join(op=op, member=op % 3)) == 4


@few_recipes
def test_losses_of_donors_and_newcomers_during_a_copy(recipe: str) -> None:
    random = Random(recipe)
    for place in random.sample(range(MOST_OPERATIONS), 2):
        join, answered = Join(op=FIRST + place % 3), place % 2 > 0
        newcomer = Loss(group=WHOLE, victim=3, op=place, answered=answered)
        donor = Loss(group=WHOLE, victim=place % 3, op=place, answered=answered, deaf=frozenset({3}))
        assert check(recipe, place % 3, join, (newcomer,)) == 3
        assert check(recipe, place % 3, join, (donor,)) in (2, 3)


@pytest.mark.parametrize(("recipe", "polls"), [("TopK(0.1)", 2), ("DiLoCo(4)", 0)])
def test_a_member_that_is_lost_from_the_training_group_during_a_copy(recipe: str, polls: int) -> None:
    """The copy of the broken view ends; the next view begins another one."""
    for op in range(4):
        loss = Loss(group=4, victim=1, op=op + 1, answered=op % 2 > 0)
        assert check(recipe, polls, Join(op=FIRST + 1), (loss,)) == 3


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(2)"])
def test_two_newcomers_at_once(recipe: str) -> None:
    assert check(recipe, 1, Join(op=FIRST), newcomers=2) == 5


def uneven(recipe: Any, worker: Worker) -> Any:
    """Ranks run out of data after different numbers of batches."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    while session.steps < 3 * STEPS:
        with session.epoch():
            for _ in range(5 + 3 * (worker.rank % 3)):
                loss_of(model, session.steps, worker.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
    return told(session)


@pytest.mark.parametrize("recipe", ["LocalSGD(4)", "DiLoCo(4, fragments=2, delay=1)", "TopK(0.1)"])
def test_a_copy_while_some_ranks_are_out_of_data(recipe: str) -> None:
    for polls, op in ((0, FIRST), (2, FIRST + 2)):
        with again(recipe, polls, op), copies(polls):
            results = ElasticRun(3, newcomers=1, join=Join(op=op))(partial(uneven, recipe))
            here = [each for each in results if each is not None]
            assert len(here) == 4
            check_alike(here, here[0].steps)


# -- what is sent, and when --------------------------------------------------------------------------------------------


def sent(recipe: Any, join: int, steps: int = STEPS) -> Mapping[str, int]:
    """Bytes that donors send to a newcomer: in the background, and while the others wait."""
    found = {"background": 0, "stall": 0}
    send = newcomer_state.send_values

    def counted(group: VirtualGroup, about: Any, *rest: Any) -> Any:
        deliver = group.deliver

        def counts(outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
            found["stall" if about.get("last") else "background"] += sum(map(len, outgoing.values()))
            return deliver(outgoing, incoming)

        group.deliver = counts  # type: ignore[method-assign]
        try:
            return send(group, about, *rest)
        finally:
            del group.deliver

    with pytest.MonkeyPatch.context() as patch, copies(0):
        patch.setattr(newcomer_state, "send_values", counted)
        run = ElasticRun(3, newcomers=1, join=Join(op=join))
        assert len(check_alike(run(partial(with_adam, recipe, steps)), steps)) == 4
    return found


def with_adam(recipe: Any, steps: int, worker: Worker) -> Any:
    with seeded(worker.rank):
        model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    session = worker.attach(model, optimizer, recipe)
    while session.steps < steps:
        optimizer.zero_grad()
        loss_of(model, session.steps, worker.rank).backward()
        optimizer.step()
    return told(session)


@pytest.mark.parametrize("recipe", ["LocalSGD(4)", "DiLoCo(4) + Int8()"])
def test_between_two_rounds_almost_nothing_is_sent_while_the_others_wait(recipe: str) -> None:
    found = sent(recipe, FIRST + 1)
    assert found["stall"] < 0.15 * found["background"], found


def test_in_lock_step_the_others_wait_for_a_difference_only() -> None:
    found = sent("Dense()", FIRST + 4)
    assert 0 < found["stall"] < 0.9 * found["background"], found


def test_a_small_state_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundCopy, "begin", lambda *_: pytest.fail("it was copied in the background"))
    run = ElasticRun(3, newcomers=1, join=Join(op=FIRST + 1))
    assert len(check_alike(run(partial(trained, "Dense()", steps=STEPS)), STEPS)) == 4
