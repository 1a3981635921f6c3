"""What a lost worker gave counts fully or not at all, and what compressors held back is conserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Loss
from support.elastic_training import again
from support.virtual_workers import Worker, seeded
from torch import Tensor, nn

from gossamer.algorithms.compressors import sharded
from gossamer.algorithms.compressors.sharded import is_group_residual, is_unsent
from gossamer.base.aggregation import AggregationContext, State
from gossamer.train.engine.bucket import Bucket, KeptInputs
from gossamer.train.session.session import Session

STEPS, SHAPE = 5, (4, 64)


def gradient(step: int, number: int) -> Tensor:
    """Small whole numbers."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randint(-8, 9, SHAPE, generator=generator).double()


@dataclass
class Given:
    """What one worker ends with: how far it went, and what it has still to send, after every step."""

    moved: Tensor
    unsent: list[Tensor] = field(default_factory=list)


def descend(recipe: str, weights: Sequence[float], givens: dict[int, Given], worker: Worker) -> Given:
    """Gradients that are the same wherever the parameters are."""
    with seeded(0):
        model = nn.Linear(SHAPE[1], SHAPE[0], bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session = worker.attach(model, optimizer, recipe)
    given = givens.setdefault(worker.rank, Given(torch.zeros(SHAPE)))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        session.set_batch_weight(weights[worker.rank])
        (model.weight * gradient(step, worker.rank)).sum().backward()
        optimizer.step()
        given.moved = -model.weight.detach().clone()
        given.unsent.append(held_back(session))
    return given


def held_back(session: Session) -> Tensor:
    """What one worker has still to send, as a part of its own gradients; what it owes to all counts for each worker."""
    found, world, rank = torch.zeros(SHAPE).double(), session._transport.world, session._transport.rank
    for key, each in session.state_dict()["state"].get("weight", {}).items():
        if is_group_residual(key):
            start = rank * -(-found.numel() // world)
            found.view(-1)[start : start + each.numel()] += world * each
        elif is_unsent(key):
            found += each
    return found


def mean(step: int, members: Sequence[int], weights: Sequence[float]) -> Tensor:
    total = sum(weights[each] for each in members)
    return torch.stack([weights[each] * gradient(step, each) for each in members]).sum(0) / total


def expected(lost_in: int, before: Sequence[int], after: Sequence[int], weights: Sequence[float]) -> Tensor:
    means = [mean(step, before if step < lost_in else after, weights) for step in range(STEPS)]
    return torch.stack(means).sum(0)


def lost(recipe: str, world: int, loss: Loss, weights: Sequence[float]) -> tuple[list[Given | None], dict[int, Given]]:
    givens: dict[int, Given] = {}
    with again(recipe, world, loss, weights):
        return ElasticRun(world, loss)(partial(descend, recipe, weights, givens)), givens


def check_counted_whole(op: int, answered: bool, deaf: frozenset[int], weights: Sequence[float]) -> None:
    results, _ = lost("Dense()", 3, Loss(victim=1, op=op, answered=answered, deaf=deaf), weights)
    first, third = (results[each] for each in (0, 2))
    assert first is not None
    assert third is not None
    assert torch.equal(first.moved, third.moved)
    matching = [
        step
        for step in range(STEPS + 1)
        if torch.allclose(first.moved, expected(step, (0, 1, 2), (0, 2), weights), atol=1e-9, rtol=0)
    ]
    assert len(matching) == 1, "a step counts the lost worker's gradients in part"


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 2.0, 5.0)])
@pytest.mark.parametrize("deaf", [None, frozenset(), frozenset({0}), frozenset({0, 2})])
def test_promise_21_a_lost_workers_gradients_count_fully_or_not_at_all(
    deaf: frozenset[int] | None, weights: Sequence[float]
) -> None:
    for op in range(3, 8):
        check_counted_whole(op, deaf is not None, deaf or frozenset(), weights)


def test_mutant_without_kept_inputs_gradients_are_weighted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found at one moment of a loss at least: whether a bucket was weighted already when it came is a race."""

    def check_at_all_moments() -> None:
        for op in range(3, 8):
            check_counted_whole(op, False, frozenset(), (1.0, 2.0, 5.0))

    monkeypatch.setattr(KeptInputs, "restores", lambda self, place, flat: False)
    with pytest.raises(AssertionError, match="in part"):
        check_at_all_moments()


def check_conserved(recipe: str, world: int, op: int, bound: float) -> None:
    """moved + (what survivors hold back) / now + (what was lost) / before = what was given."""
    victim, alike = world - 1, [1.0] * world
    results, givens = lost(recipe, world, Loss(victim=victim, op=op), alike)
    survivors = [each for each in results if each is not None]
    assert len(survivors) == world - 1
    made = len(givens[victim].unsent)
    taken = givens[victim].unsent[-1] / world if made else torch.zeros(SHAPE)
    held = torch.stack([each.unsent[-1] for each in survivors]).sum(0) / len(survivors)
    assert held.any(), "nothing was held back, so nothing is tested"
    given = expected(made, range(world), range(world - 1), alike)
    torch.testing.assert_close(survivors[0].moved + held + taken, given, atol=bound, rtol=0)


@pytest.mark.parametrize("recipe", ["Feedback(TopK(0.1))", "Feedback(RandomK(0.1))"])
@pytest.mark.parametrize(("world", "bound"), [(2, 0.0), (3, 1e-12), (4, 1e-12)])
def test_what_is_held_back_is_conserved_over_a_loss(recipe: str, world: int, bound: float) -> None:
    """With whole numbers and worlds of two and one nothing is rounded, so to the last bit."""
    for op in (6, 8, 10):
        check_conserved(recipe, world, op, bound)


@pytest.mark.parametrize("recipe", ["Feedback(Sharded(OneBit()))", "Feedback(SparseSum(TopK(0.1)))"])
@pytest.mark.parametrize("world", [3, 4])
def test_what_the_worker_of_a_part_holds_back_is_conserved_over_a_loss(recipe: str, world: int) -> None:
    """Parts have other sizes and other workers then."""
    for op in (6, 8, 10):
        check_conserved(recipe, world, op, 1e-12)


def test_mutant_that_begins_parts_without_what_was_owed_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(state: State, at: AggregationContext) -> None:
        """Nothing moves into the residuals."""

    monkeypatch.setattr(sharded, "settle", forget)
    with pytest.raises(AssertionError, match="not close"):
        check_conserved("Feedback(Sharded(OneBit()))", 3, 8, 1e-12)


def test_mutant_without_rescaling_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept_as_it_is(self: Any, factor: float) -> None:
        """Nothing is multiplied."""

    monkeypatch.setattr(Bucket, "rescale", kept_as_it_is)
    with pytest.raises(AssertionError, match=r"not close|not equal"):
        check_conserved("Feedback(TopK(0.1))", 2, 8, 0.0)
