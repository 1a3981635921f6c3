"""What an elastic exchange is made again from, and what others are given, stays as it was though little is copied."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from support.elastic_groups import ElasticRun, Loss
from support.elastic_training import STEPS, Told, check_alike, check_run, each_recipe, operations, told, trained
from support.sessions import sgd
from support.virtual_workers import Worker, loss_of, network
from torch import Tensor

from gossamer.comm.elastic import transport
from gossamer.comm.elastic.interrupted_operations import OperationLog
from gossamer.train.engine.bucket import Bucket, KeptInputs


def tensors_of(answer: Any) -> list[Tensor]:
    if isinstance(answer, Tensor):
        return [answer]
    return [tensor for each in answer for tensor in tensors_of(each)] if isinstance(answer, list | tuple) else []


class CheckedLog(OperationLog):
    """Looks, before it forgets its answers, whether they are still what they were."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, list[Tensor]] = {}

    def keep_copies(self, place: int, op: Any, answer: Any, rank: int) -> None:
        super().keep_copies(place, op, answer, rank)
        self._seen[place] = [tensor.clone() for tensor in tensors_of(self._answers[place])]

    def clear(self) -> None:
        for place, seen in self._seen.items():
            for now, before in zip(tensors_of(self._answers[place]), seen, strict=True):
                assert torch.equal(now, before), f"answer {place} was written to while others might have needed it"
        self._seen.clear()
        super().clear()


class CheckedInputs(KeptInputs):
    """Looks, before what went in is forgotten or needed, whether what was trusted to stay has stayed."""

    def __init__(self, buckets: Iterable[Bucket] = ()) -> None:
        super().__init__(buckets)
        self.trusted: dict[int, Tensor] = {}

    def restores(self, place: int, flat: Tensor) -> bool:
        if place in self._there:
            assert torch.equal(flat, self.trusted.setdefault(place, flat.clone())), "an input was written to"
        return super().restores(place, flat)

    def clear(self) -> None:
        super().clear()
        self.trusted.clear()


def clipped(recipe: str, worker: Worker) -> Told:
    """As nearly every loop does, it writes to the gradients before the step."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    while session.steps < STEPS:
        loss_of(model, session.steps, worker.rank).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return told(session)


def check_clipped() -> None:
    """Somebody has the mean, and clips it, when another asks for it."""
    for op in range(3, operations("Dense()") - 1):
        check_run("Dense()", 3, [Loss(victim=0, op=op, answered=True, deaf=frozenset({2}))], work=clipped)


@each_recipe
def test_answers_stay_as_they_are_until_nobody_can_need_them(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "OperationLog", CheckedLog)
    check_alike(ElasticRun(3)(partial(trained, recipe)))


def test_the_check_catches_means_that_are_written_over_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "OperationLog", CheckedLog)
    monkeypatch.setattr(Bucket, "exchanged", lambda self: None)
    with pytest.raises(AssertionError, match="was written to"):
        check_alike(ElasticRun(3)(partial(trained, "Dense()")))


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.2)", "Int8()", "PowerSGD(rank=1)"])
def test_inputs_that_are_not_copied_stay_as_they_are(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.train.synchronizers.gradients.KeptInputs", CheckedInputs)
    for op in range(3, operations(recipe) - 1, 2):
        check_run(recipe, 3, [Loss(victim=1, op=op)])


def test_clipped_means_are_given_as_they_were() -> None:
    check_clipped()


def test_mutant_a_log_of_means_that_the_loop_clips_parts_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "keep_inputs", lambda self: None)
    monkeypatch.setattr(OperationLog, "_copy", lambda self, at, tensor: tensor)
    with pytest.raises(AssertionError, match="different bits"):
        check_clipped()


def check_little_is_copied() -> None:
    """Of a step whose workers count alike, nothing but what the optimizer sees: neither inputs nor means."""
    for each in check_alike(ElasticRun(3)(partial(trained, "Dense()"))):
        synchronizer: Any = each.session._synchronizer
        log = synchronizer._context.transport._log
        copied = [*synchronizer._kept._copies.values(), *log._rooms.values()]
        assert sum(copy.nbytes for copy in copied) < min(bucket.flat.nbytes for bucket in synchronizer.buckets)


def test_a_step_copies_neither_inputs_nor_means() -> None:
    check_little_is_copied()


def test_mutant_means_over_their_inputs_are_copied_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "keep_inputs", lambda self: None)
    with pytest.raises(AssertionError):
        check_little_is_copied()
