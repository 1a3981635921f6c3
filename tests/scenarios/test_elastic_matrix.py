"""Losses by strategy, victim, operation and who heard the last answer; one after the other, and within a recovery."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from support.elastic_groups import ElasticRun, Loss
from support.elastic_training import STEPS, Told, check_run, each_recipe, few_recipes, operations, told, trained
from support.nightly import nightly, once_each
from support.sessions import sgd
from support.virtual_workers import Worker, loss_of, network

from gossamer.comm.elastic.transport import ElasticTransport
from gossamer.errors import GossamerError

HEARD = {"by nobody": (False, ()), "by all": (True, ()), "by some": (True, (1,))}


def loss(victim: int, op: int, heard: str, world: int = 3, group: int = 2) -> Loss:
    answered, deaf = HEARD[heard]
    return Loss(
        victim=victim, op=op, answered=answered, deaf=frozenset((victim + each) % world for each in deaf), group=group
    )


@once_each("victim, heard", range(3), HEARD)
@each_recipe
def test_promise_1_survivors_of_any_rank_agree(recipe: str, victim: int, heard: str) -> None:
    op = Random(f"{recipe} {heard} {victim}").randrange(operations(recipe))
    assert len(check_run(recipe, 3, [loss(victim, op, heard)])) == 2


@few_recipes
def test_promise_1_one_loss_after_the_other(recipe: str) -> None:
    random, ops = Random(recipe), operations(recipe)
    for heard in HEARD:
        losses = [
            loss(random.randrange(4), random.randrange(ops // 2), heard, 4),
            loss(random.randrange(4), random.randrange(3, 3 + ops // 3), heard, 4, group=4),
        ]
        check_run(recipe, 4, losses)


@pytest.mark.parametrize("place", [0, 2, 3, *nightly(1, 4)])
@few_recipes
def test_promise_1_losses_within_a_recovery(recipe: str, place: int) -> None:
    """Operation 0 of a new group compares how far its members are, the next two give answers, and then their standings
    are gathered, before anything else."""
    random = Random(f"{recipe} {place}")
    first = loss(0, random.randrange(operations(recipe) - 1), "by some", 4)
    check_run(recipe, 4, [first, loss(random.randrange(1, 4), place, random.choice([*HEARD]), 4, group=4)])


@each_recipe
def test_a_world_of_one_continues(recipe: str) -> None:
    op = Random(recipe).randrange(operations(recipe) - 1)
    assert len(check_run(recipe, 2, [loss(1, op, "by nobody", 2)])) == 1
    assert len(check_run(recipe, 2, [loss(0, op, "by some", 2)])) == 1


def with_unused_passes(recipe: str, worker: Worker) -> Told:
    """After every step a pass whose average no optimizer uses, and an exchange as for a checkpoint. The next pass
    returns to the state before the average, which is as old as the group then."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    while session.steps < STEPS:
        for unused in (0, 50):
            loss_of(model, unused + session.steps, worker.rank).backward()
            if not unused:
                optimizer.step()
            optimizer.zero_grad()
        session._synchronizer.meet_to_save()
    return told(session)


@pytest.mark.parametrize("recipe", ["Feedback(Sharded(Int8()))", "Feedback(TopK(0.2))"])
def test_what_an_unused_average_had_left_moves_with_the_parts(recipe: str) -> None:
    for op in range(6, 16, 2):
        check_run(recipe, 3, [loss(op % 3, op, "by nobody")], work=with_unused_passes)


# -- broken twins ------------------------------------------------------------------------------------------------------


def fails(recipe: str, losses: list[Loss], world: int = 3) -> bool:
    try:
        check_run(recipe, world, losses)
    except (AssertionError, GossamerError, ValueError, TypeError, IndexError, KeyError, RuntimeError):
        return True
    return False


def caught(recipe: str, heard: str) -> bool:
    return any(fails(recipe, [loss(1, op, heard)]) for op in range(3, operations(recipe) - 1))


def test_mutant_without_agreement_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has not heard the answer makes the step again, the others go on."""

    def alone(self: ElasticTransport, group: object, view: object, began: float) -> bool:
        resolve = ElasticTransport._resolve.__wrapped__  # type: ignore[attr-defined]
        completed, self._completed = self._completed, 0
        try:
            return bool(resolve(self, group, view, began))
        finally:
            self._completed = completed

    alone.__wrapped__ = ElasticTransport._resolve  # type: ignore[attr-defined]
    monkeypatch.setattr("support.elastic_groups.SECONDS", 3.0)
    operations("Dense()")
    monkeypatch.setattr(ElasticTransport, "_resolve", alone)
    assert caught("Dense()", "by some")


def test_mutant_answers_of_another_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = ElasticTransport.complete

    def stale(self: ElasticTransport) -> None:
        answers = list(self._log._answers)
        complete(self)
        self._last._answers, self.stale = getattr(self, "stale", answers), answers  # type: ignore[attr-defined]

    operations("TopK(0.1)")
    monkeypatch.setattr("support.elastic_groups.SECONDS", 3.0)
    monkeypatch.setattr(ElasticTransport, "complete", stale)
    assert caught("TopK(0.1)", "by some")


def test_replays_are_reported() -> None:
    """Whatever fails says how to see it again."""

    def unequal(recipe: str, worker: Worker) -> Told:
        return replace(trained(recipe, worker), steps=worker.rank)

    with pytest.raises(AssertionError) as caught:
        check_run("Dense()", 2, work=unequal)
    assert caught.value.__notes__[0].startswith("Again: 'Dense()', 2")


def test_nothing_is_lost_without_a_fault() -> None:
    first, *others = ElasticRun(3)(partial(trained, "Dense()"))
    assert first.steps == STEPS
    assert all(torch.equal(each.agreed, first.agreed) for each in others)
