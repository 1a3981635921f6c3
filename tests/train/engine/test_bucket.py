"""Gradients that come to lie in a bucket while backward goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from support.virtual_workers import Worker, cluster, loss_of, network, parameters
from torch import Tensor
from torch.nn import Parameter

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.strategies import EveryStep
from gossamer.base.aggregation import AggregationContext
from gossamer.errors import LayoutError
from gossamer.train.engine import bucket as module
from gossamer.train.engine.bucket import EARLY_BYTES, Bucket, KeptInputs, assign_buckets

LARGE = EARLY_BYTES // 4
STEPS, WORLD = 3, 2
OUTPUTS = 3  # of support.virtual_workers.network


def bucket_of(**sizes: int) -> Bucket:
    parameters = {name: Parameter(torch.zeros(size)) for name, size in sizes.items()}
    return Bucket(parameters, Dense(), AggregationContext(world=WORLD))


def give(bucket: Bucket, name: str) -> Tensor:
    """A gradient of ones."""
    gradient = torch.ones_like(bucket.parameters[name])
    bucket.parameters[name].grad = gradient
    return gradient


def test_a_large_gradient_lies_there_at_once_and_its_own_memory_is_free() -> None:
    bucket = bucket_of(large=LARGE, small=LARGE - 1)
    alive = {name: weakref.ref(give(bucket, name)) for name in ("large", "small")}
    for name in bucket.early:
        bucket.take(name, bucket.parameters[name])
    assert alive["large"]() is None
    assert alive["small"]() is not None
    assert bucket.parameters["large"].grad is bucket.views["large"]
    assert bool((bucket.views["large"] == 1).all())
    new, held = bucket.new_gradients()
    assert [view.numel() for view, _ in new] == [LARGE - 1]
    assert not held


def test_the_first_bucket_of_each_dtype_has_its_own_size() -> None:
    sizes = {"wide": torch.float32, "narrow": torch.bfloat16}
    parameters = {
        f"{kind} {place}": Parameter(torch.empty(2**10, dtype=dtype))
        for place in range(9)
        for kind, dtype in sizes.items()
    }
    found = assign_buckets(parameters, bucket_bytes=2**14, first_bytes=2**12 + 1)
    assert [next(iter(each)) for each in found] == ["wide 8", "narrow 8", "wide 6", "narrow 5", "wide 2"]
    assert [len(each) for each in found] == [2, 3, 4, 6, 3]


def test_a_first_bucket_is_never_larger_than_the_others() -> None:
    parameters = {f"{place}": Parameter(torch.empty(2**10)) for place in range(9)}
    for first_bytes in (2**12, 2**20):
        assert [len(each) for each in assign_buckets(parameters, 2**12, first_bytes)] == [1] * 9


def test_a_gradient_that_lay_there_before_the_pass_is_told_from_one_that_came_in_it() -> None:
    bucket = bucket_of(large=LARGE)
    give(bucket, "large")
    bucket.take("large", bucket.parameters["large"])
    bucket.expect_all()  # the next pass
    bucket.take("large", bucket.parameters["large"])
    assert bucket.new_gradients() == ([], True)


def test_a_gradient_of_another_shape_is_told_of_when_the_bucket_leaves() -> None:
    bucket = bucket_of(large=LARGE)
    bucket.parameters["large"].data = torch.zeros(2 * LARGE)
    give(bucket, "large")
    bucket.take("large", bucket.parameters["large"])
    with pytest.raises(LayoutError, match=f"was \\({LARGE},\\) at attach and is \\({2 * LARGE},\\) now"):
        bucket.new_gradients()


def trained(worker: Worker, change: Callable[[Tensor], None]) -> Tensor:
    """The user's own hooks run after ours, and may still change a gradient in its place."""
    model, optimizer, _ = worker.start(
        network(worker.rank), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), EveryStep()
    )
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(change)
    for step in range(STEPS):
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


@pytest.mark.parametrize("early_bytes", [0, 2**62])
def test_when_gradients_come_to_lie_there_changes_no_bit(early_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = cluster(lambda worker: trained(worker, lambda parameter: None), WORLD)
    monkeypatch.setattr(module, "EARLY_BYTES", early_bytes)
    found = cluster(lambda worker: trained(worker, lambda parameter: None), WORLD)
    assert all(torch.equal(a, b) for a, b in zip(honest, found, strict=True))


def double(parameter: Tensor) -> None:
    """Of the last layer, whose gradients are there first: the bucket leaves later."""
    if parameter.grad is not None and len(parameter) == OUTPUTS:
        parameter.grad.mul_(2)


def test_what_a_hook_of_the_user_makes_of_a_gradient_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EARLY_BYTES", 2**62)
    late = cluster(lambda worker: trained(worker, double), WORLD)
    monkeypatch.setattr(module, "EARLY_BYTES", 0)
    assert all(torch.equal(a, b) for a, b in zip(late, cluster(lambda w: trained(w, double), WORLD), strict=True))


def test_the_check_catches_a_gradient_that_is_only_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: the parameter keeps its own gradient, and what a later hook makes of that is lost."""
    monkeypatch.setattr(module, "EARLY_BYTES", 2**62)
    late = cluster(lambda worker: trained(worker, double), WORLD)
    monkeypatch.setattr(Bucket, "take", lambda self, name, parameter: self.views[name].copy_(parameter.grad))
    monkeypatch.setattr(Bucket, "new_gradients", lambda self: ([], False))
    found = cluster(lambda worker: trained(worker, double), WORLD)
    assert not all(torch.equal(a, b) for a, b in zip(late, found, strict=True))


# -- What a reduction was given, from which it can be made again -------------------------------------------------------


def test_copies_are_put_back_as_often_as_asked_for() -> None:
    kept, flat = KeptInputs(), torch.arange(4.0)
    kept.keep(0, flat)
    for _ in range(2):
        flat.fill_(-1.0)
        assert kept.restores(0, flat)
        assert torch.equal(flat, torch.arange(4.0))
    kept.clear()
    assert not kept.restores(0, flat)


def test_what_stays_is_there_and_is_not_copied() -> None:
    kept, flat = KeptInputs(), torch.arange(4.0)
    kept.trust(0)
    assert kept.restores(0, flat)
    assert torch.equal(flat, torch.arange(4.0))
    assert not kept.restores(1, flat)
    kept.clear()
    assert not kept.restores(0, flat)


def test_what_stayed_and_is_now_to_be_written_over_is_copied_first() -> None:
    kept, flat = KeptInputs(), torch.arange(4.0)
    kept.trust(0)
    kept.keep(0, flat)
    flat.zero_()
    assert kept.restores(0, flat)
    assert torch.equal(flat, torch.arange(4.0))


def test_what_was_copied_once_is_not_copied_again_as_it_is_by_now() -> None:
    kept, flat = KeptInputs(), torch.arange(4.0)
    kept.keep(0, flat)
    flat.mul_(2.0)
    kept.keep(0, flat)
    assert torch.equal(flat, torch.arange(4.0))
