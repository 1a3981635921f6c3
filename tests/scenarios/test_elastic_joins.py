"""Newcomers: what they hold is the group's, in the moment when they are let in and after every step, and they do not
come in half."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Join, Loss, VirtualMembers
from support.elastic_training import (
    IN_STEP,
    STEPS,
    Told,
    check_run,
    few_recipes,
    operations,
    told,
    trained,
)
from support.sessions import sgd
from support.virtual_workers import Worker, loss_of, network, notices
from torch import Tensor

from gossamer.errors import MismatchError
from gossamer.train.session.group_changes import GroupChanges
from gossamer.train.session.session import Session

FIRST = 3  # operation after all have said what newcomers must be like


@few_recipes
def test_promise_13_a_newcomer_agrees_with_the_others_whenever_it_comes(recipe: str) -> None:
    # Rounds on their way land before it is let in, and the last exchange of gossip is a mean, before which it is not
    before_the_last_round = operations(recipe) - (5 if "Sharded" in recipe else 3)  # which has two encodings then
    slow = any(each in recipe for each in ("elay", "Gossip", "NoLoCo"))
    last = FIRST + 4 if slow else before_the_last_round
    for op in sorted({FIRST, *Random(recipe).sample(range(FIRST, last), 2)}):
        assert len(check_run(recipe, 3, join=Join(op=op, member=op % 3), newcomers=1)) == 4, op


@few_recipes
def test_newcomers_come_while_another_is_lost_and_are_lost_while_they_come(recipe: str) -> None:
    random, ops = Random(recipe), operations(recipe)
    op = random.randrange(FIRST, ops - 3)
    join = Join(op=op, member=0)
    check_run(recipe, 3, [Loss(victim=1, op=op, answered=True, deaf=frozenset({2}))], join, 1)
    for place in random.sample(range(8), 2):
        newcomer = Loss(group=5, victim=3, op=place, answered=place % 2 > 0, deaf=frozenset({place % 3}))
        donor = Loss(group=5, victim=place % 3, op=place, answered=place % 2 > 0, deaf=frozenset({3, (place + 1) % 3}))
        assert len(check_run(recipe, 3, [newcomer], join, 1)) == 3
        assert len(check_run(recipe, 3, [donor], join, 1)) in (2, 3)  # one that was let in by some alone is put out


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "LocalSGD(2)", "EveryStep(delay=1)"])
def test_two_newcomers_at_once(recipe: str) -> None:
    for op in (FIRST, 6):
        assert len(check_run(recipe, 2, join=Join(op=op), newcomers=2)) == 4


def test_newcomers_let_others_in_once_they_have_made_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, all would move again from where they stood before both came, which the first newcomer cannot."""
    made = []

    def attached(members: VirtualMembers, number: int) -> None:
        transport = members._transports[number]
        made.append(transport._completed - transport._began_at)

    monkeypatch.setattr(VirtualMembers, "attached", attached)
    check_run("Dense()", 2, join=Join(op=6), newcomers=2)
    assert made == [1, 1]


# -- what they are given ----------------------------------------------------------------------------------------------


@dataclass
class AllStates:
    """What workers hold right after the same step."""

    by_step: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def note(self, step: int, state: dict[str, Any]) -> None:
        self.by_step.setdefault(step, []).append(state)


def with_everything(states: AllStates, firsts: list[Tensor], recipe: str, worker: Worker, *, passed: bool) -> Told:
    """Adam, a scheduler and a GradScaler; all of it is noted after every step. firsts: what newcomers have to send."""
    model = network(worker.rank, torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    session = worker.attach(model, optimizer, recipe, scaler=scaler if passed else None)
    session.track(scheduler=scheduler)
    if worker.rank >= worker.world:
        firsts += [unsent for bucket in session._synchronizer.buckets for unsent in bucket.unsent]
        firsts[:] = [each.clone() for each in firsts]
    while session.steps < STEPS:
        step = session.steps
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, worker.rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        adam = [value for each in optimizer.state.values() for value in each.values()]
        tensors = [each.detach().clone() for each in (*adam, *model.parameters())]
        numbers = {"rate": scheduler.get_last_lr(), "at": scheduler.last_epoch, "scaler": scaler.state_dict()}
        states.note(session.steps, {"tensors": tensors, **numbers})
    return told(session)


def check_everything(recipe: str, op: int, *, passed: bool = True) -> None:
    states, firsts = AllStates(), list[Tensor]()
    results = ElasticRun(3, newcomers=1, join=Join(op=op))(
        partial(with_everything, states, firsts, recipe, passed=passed)
    )
    assert results[3] is not None
    assert not any(bool(each.any()) for each in firsts), "a newcomer had something to send"
    together = [step for step, noted in states.by_step.items() if len(noted) == 4]
    assert together, "the newcomer made no step"
    for noted in states.by_step.values():
        for each in noted[1:]:
            assert {key: each[key] for key in ("rate", "at", "scaler")} == {
                key: noted[0][key] for key in ("rate", "at", "scaler")
            }
            assert all(torch.equal(a, b) for a, b in zip(each["tensors"], noted[0]["tensors"], strict=True))


def test_a_newcomer_takes_the_scale_of_a_scaler_that_attach_was_not_given() -> None:
    check_everything("Dense()", 3, passed=False)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "Int8()", "PowerSGD(rank=2)", "SharedMask(density=0.1)"])
def test_a_newcomer_has_parameters_optimizer_scheduler_and_scaler_of_the_others(recipe: str) -> None:
    for op in (FIRST + 2, operations(recipe) // 2):
        check_everything(recipe, op)


def test_mutant_a_newcomer_without_the_optimizer_is_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    take_up, state_hash = Session._take_up, GroupChanges.state_hash

    def forgetful(self: Session, alike: Any, own: Any) -> None:
        take_up(self, alike, own)
        self.optimizer.state.clear()

    monkeypatch.setattr(Session, "_take_up", forgetful)
    with pytest.raises(MismatchError, match="differs from the group's after the transfer"):
        check_everything("Dense()", 6)
    monkeypatch.setattr(GroupChanges, "state_hash", lambda self: state_hash(self)[:0])
    with pytest.raises((AssertionError, ValueError)):
        check_everything("Dense()", 6)


def test_promise_11_a_newcomer_with_another_model_is_refused() -> None:
    def work(worker: Worker) -> Told:
        if worker.rank < 3:
            return trained("Dense()", worker)
        with pytest.raises(MismatchError):
            worker.start(torch.nn.Linear(6, 3).double(), sgd, "Dense()")
        return Told(0, torch.empty(0), torch.empty(0), None)  # type: ignore[arg-type]

    results = ElasticRun(3, newcomers=1, join=Join(op=6))(work)
    assert [each.steps for each in results[:3]] == [STEPS] * 3


def test_in_lock_step_a_newcomer_has_the_same_bits_after_every_step() -> None:
    def noted(seen: dict[int, list[Tensor]], recipe: str, worker: Worker) -> Told:
        model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
        while session.steps < STEPS:
            optimizer.zero_grad()
            for part in range(2 if "accumulate" in recipe else 1):
                loss_of(model, 10 * session.steps + part, worker.rank).backward()
            optimizer.step()
            state = torch.cat([each.detach().flatten() for each in model.parameters()])
            seen.setdefault(session.steps, []).append(state)
        return told(session)

    for recipe in IN_STEP:
        seen: dict[int, list[Tensor]] = {}
        check_run(recipe, 3, join=Join(op=8, member=1), newcomers=1, work=partial(noted, seen))
        assert 4 in [len(each) for each in seen.values()]
        for states in seen.values():
            assert all(torch.equal(each, states[0]) for each in states[1:])


# -- what they are not given ------------------------------------------------------------------------------------------


def with_scheduler(tracks: bool, worker: Worker) -> Told:
    """Made after attach, as loops do that know the number of their steps only then."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, "LocalSGD(2)")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if tracks:
        session.track(scheduler=scheduler)
    while session.steps < STEPS:
        optimizer.zero_grad()
        loss_of(model, session.steps, worker.rank).backward()
        optimizer.step()
        scheduler.step()
    return told(session)


@pytest.mark.parametrize("tracks", [True, False])
def test_a_newcomer_whose_scheduler_began_again_reports_it_once(tracks: bool) -> None:
    with notices() as said:
        ElasticRun(2, newcomers=1, join=Join(op=operations("LocalSGD(2)", 2) - 4))(partial(with_scheduler, tracks))
    found = [each for each in said if "starts from the beginning" in " ".join(each.split())]
    assert len(found) == (not tracks), said
    assert all("session.track(scheduler=scheduler)" in each for each in found)
