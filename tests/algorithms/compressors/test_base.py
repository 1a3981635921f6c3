"""Base of compressors: what goes out where a worker's numbers cannot be sent."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group
from support.virtual_workers import Worker, cluster, loss_of, network, parameters
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Feedback, OneBit, TopK
from gossamer.algorithms.compressors.base import aggregate_finite, relayed
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.base.layout import FlatTensors
from gossamer.base.runner import simulate
from gossamer.errors import NotFinite

OWED, LARGE = 3e38, 1.5e308  # in float32 and in float64, two of which leave the range


@pytest.mark.parametrize("compressor", [Feedback(TopK(density=0.5)), Feedback(Int8()), Feedback(OneBit())], ids=repr)
def test_zeros_go_out_alone_where_a_gradient_overflows_what_is_owed(compressor: Compressor) -> None:
    """Not with what is owed, which may be what cannot be sent; and nothing of the attempt is remembered."""
    group = Group(compressor, 3, dtype=torch.float32)
    inputs = group.gradients()
    inputs[1].fill_(OWED)
    group.states[1][RESIDUAL].flat.fill_(OWED)
    with pytest.raises(NotFinite):
        next(compressor.aggregate(FlatTensors(inputs[1].clone(), LAYOUT), group.states[1], group.at(1)))
    lost: list[int] = []

    def script(rank: int, x: Tensor):  # type: ignore[no-untyped-def]
        packed = FlatTensors(x.clone(), LAYOUT)
        state, at = group.states[rank], group.at(rank)
        return aggregate_finite(compressor, packed, state, at, None, lambda: lost.append(rank))

    found = simulate([script(rank, x) for rank, x in enumerate(inputs)])
    assert lost == [1]
    assert all(staged.finite for staged in found)
    assert float(found[0].mean.abs().amax()) < 10, "what is owed went out"
    assert torch.equal(group.states[1][RESIDUAL].flat, torch.full_like(inputs[1], OWED))


@pytest.mark.parametrize("recipe", ["Feedback(OneBit())", "Feedback(TopK(0.5))"])
def test_the_step_is_skipped_on_all_ranks_and_nothing_is_raised(recipe: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        model, optimizer, session = worker.start(
            network(0), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), f"Route({recipe}, smallest=0)"
        )
        for step in range(3):
            before = parameters(model)
            if step == 1 and worker.rank == 1:
                for bucket in session._synchronizer.buckets:
                    for key in bucket.state:
                        if key.endswith(RESIDUAL):
                            bucket.state[key].flat.fill_(LARGE)
            optimizer.zero_grad()
            loss = loss_of(model, step, worker.rank)
            if step == 1 and worker.rank == 1:
                loss = loss + sum(LARGE * p.sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            if step == 1:
                skipped = parameters(model).equal(before)
        return parameters(model), torch.tensor(skipped)

    found = cluster(work, 2)
    assert all(skipped for _, skipped in found)
    assert torch.equal(found[0][0], found[1][0])


# -- what they ask and return is what `yield from` passes on, and nothing of it is kept alive --------------------------


class Large:
    """Something that can be seen to go."""


def script() -> Generator[Any, Any, int]:
    total = 0
    for place in range(3):
        total += yield place
    return total


def plain(inner: Generator[Any, Any, int]) -> Generator[Any, Any, int]:
    return (yield from inner)


def keeping(inner: Generator[Any, Any, int]) -> Generator[Any, Any, int]:
    """The twin: holds what is asked until it is answered, and what was answered until the next question."""
    answer = None
    while True:
        try:
            op = inner.send(answer)
        except StopIteration as ended:
            return int(ended.value)
        answer = yield op


def asked(relay: Callable[..., Any]) -> tuple[list[int], int]:
    run, ops, answer = relay(script()), [], None
    while True:
        try:
            ops.append(run.send(answer))
        except StopIteration as ended:
            return ops, ended.value
        answer = 10 + ops[-1]


def test_questions_answers_and_the_result_are_passed_on() -> None:
    assert asked(relayed) == asked(plain) == ([0, 1, 2], 33)


@pytest.mark.parametrize(("relay", "kept"), [(relayed, False), (plain, False), (keeping, True)])
def test_operations_are_not_kept_alive(relay: Callable[..., Any], kept: bool) -> None:
    def asks() -> Generator[Large, None, int]:
        yield Large()
        return 0

    run = relay(asks())
    op = weakref.ref(next(run))
    assert (op() is not None) == kept
