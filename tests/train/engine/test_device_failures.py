"""Device failures: memory that runs out undoes a step on every rank, and names the bucket; a driver's error is told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.sessions import sgd, train
from support.virtual_workers import Worker, agree, cluster, loss_of, network, parameters
from torch import Tensor

from gossamer.algorithms.compressors import Int8, TopK
from gossamer.algorithms.compressors.base import Compressor
from gossamer.base.layout import FlatTensors
from gossamer.errors import DeviceError, MemoryShortage
from gossamer.train.engine import bucket_reduction
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.device_failures import describe, device_failure, shortage

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


def failing(monkeypatch: pytest.MonkeyPatch, kind: type[Any], method: str, error: BaseException, rank: int = 1) -> None:
    """Let rank 1 fail in step 2."""
    honest = getattr(kind, method)

    def fails(self: Any, x: Any, *more: Any, **options: Any) -> Any:
        at = next((each for each in more if hasattr(each, "world")), None)
        if at is not None and (at.rank, at.step) == (rank, 2) and not x.flat.is_meta:
            monkeypatch.setattr(kind, method, honest)  # once
            raise error
        return honest(self, x, *more, **options)

    monkeypatch.setattr(kind, method, fails)


def remembered(session: Any) -> list[Tensor]:
    return [tensor.clone() for kept in session.state_dict()["state"].values() for tensor in kept.values()]


def trained(worker: Worker, recipe: str, steps: int = 5) -> tuple[Tensor, str]:
    """Parameters in the end, and what was raised in between; a step that was undone is made again."""
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    said = ""
    for step in range(steps):
        optimizer.zero_grad()
        own = torch.autograd.grad(loss_of(model, step, worker.rank), list(model.parameters()))
        before = parameters(model), remembered(session)
        try:
            loss_of(model, step, worker.rank).backward()
        except MemoryShortage as failure:
            said = str(failure)
            assert torch.equal(parameters(model), before[0])
            assert all(torch.equal(*pair) for pair in zip(remembered(session), before[1], strict=True))
            gradients = [parameter.grad for parameter in model.parameters()]
            assert all(g is not None and torch.equal(g, mine) for g, mine in zip(gradients, own, strict=True))
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
        optimizer.step()
    return parameters(model), said


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA), MemoryError("no more")], ids=["device", "host"])
@pytest.mark.parametrize(("recipe", "kind"), [("Int8()", Int8), ("TopK(0.1)", TopK)])
def test_memory_that_runs_out_undoes_the_step_on_every_rank(
    recipe: str, kind: type[Compressor], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = agree([found for found, _ in cluster(lambda worker: trained(worker, recipe), 3)])
    failing(monkeypatch, kind, "encode", error)
    results = cluster(lambda worker: trained(worker, recipe), 3)
    assert torch.equal(agree([found for found, _ in results]), undisturbed)
    (said,) = {text for _, text in results}
    assert 'rank 1 ran out of memory on cpu for the bucket of the 6 tensors from "' in said
    assert ("2.00 GiB more was requested" if "CUDA" in str(error) else "more than available was requested") in said
    assert "Reduce the batch size" in said


def test_the_check_catches_a_step_that_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_reduction.PendingReduction, "_withdraw", lambda self: [b.clear() for b in self.buckets])
    with pytest.raises(AssertionError):
        test_memory_that_runs_out_undoes_the_step_on_every_rank("Int8()", Int8, MemoryError(), monkeypatch)


@pytest.mark.parametrize("recipe", ["LocalSGD(period=1) + Int8()", "EveryStep(delay=1) + Int8()"])
def test_a_round_is_undone_on_every_rank(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, Int8, "encode", torch.OutOfMemoryError(CUDA))

    def work(worker: Worker) -> str:
        model, optimizer, _ = worker.start(network(worker.rank), sgd, recipe)
        said = ""
        for step in range(6):
            optimizer.zero_grad()
            try:
                loss_of(model, step, worker.rank).backward()
                optimizer.step()
            except MemoryShortage as failure:
                said = str(failure)
        return said

    (said,) = set(cluster(work, 2))
    assert "rank 1 ran out of memory" in said


def test_memory_that_runs_out_later_ends_this_worker_and_names_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Int8.decode

    def fails(self: Int8, *given: Any) -> None:
        if not given[2].is_meta:
            raise torch.OutOfMemoryError(CUDA)
        honest(self, *given)

    monkeypatch.setattr(Int8, "decode", fails)
    with pytest.raises(MemoryShortage, match=r"2\.00 GiB more was requested, after parts of it had been exchanged"):
        cluster(lambda worker: train(worker, "Int8()"), 2)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), RuntimeError("HIP error: 1")]
)
def test_a_drivers_error_says_what_it_is(error: RuntimeError) -> None:
    x = FlatTensors.pack({"w": torch.ones(3)})
    whole = r'rank 4 failed while the bucket of "w" \(12 bytes\).*gossamer run'
    told = device_failure(x, 4, error)
    assert isinstance(told, DeviceError)
    assert re.search(whole, str(told))
    assert "\nmore" not in str(told)


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, Int8, "encode", RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ") as raised:
        cluster(lambda worker: train(worker, "Int8()"), 2)
    assert type(raised.value) is RuntimeError


def test_gradients_that_lie_in_a_bucket_are_taken_away_and_others_stay() -> None:
    held = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    bucket = Bucket(held, Int8(), None)  # type: ignore[arg-type]
    own = torch.ones(2)
    held["a"].grad, held["b"].grad = bucket.views["a"], own
    bucket.withdraw()
    assert held["a"].grad is None
    assert held["b"].grad is own


def test_texts_name_one_tensor_or_the_first_and_the_last() -> None:
    x = FlatTensors.pack({name: torch.ones(2) for name in ("a", "b", "c")})
    assert describe(x) == 'the bucket of the 3 tensors from "a" to "c" (24 bytes)'
    assert "rank 2" in shortage(x, 2, MemoryError())
