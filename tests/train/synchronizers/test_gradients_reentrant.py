"""Reentrant activation checkpointing changes no bit of what is trained, whatever its segments share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.virtual_workers import Worker, agree, cluster, parameters, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.errors import LoopError
from gossamer.train.engine import torch_hooks
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.reduction import PendingReduction
from gossamer.train.synchronizers import stages

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of nested segments
WORLD, STEPS = 2, 4
STEPS_COUNT_LATER = ("LocalSGD(2)",)  # when the optimizer makes them
Run = Callable[..., Tensor]


class SignSteps(torch.optim.Optimizer):
    """Parameters stay integers, or halves of them where they are averaged."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= parameter.grad.sign()


def plain(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def reentrant(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=True)


class Layers(nn.Module):
    """Four layers of one shape; integers in, so that sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(4))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape).double())

    def forward(self, x: Tensor, run: Run) -> Tensor:
        for layer in self.layers:
            x = run(layer, x)
        return x


class Mixed(Layers):
    """The first and the third run as they are."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return run(d, c(run(b, a(x))))


class PlainBefore(Layers):
    """Nothing but the last layer is seen outside of a segment, and first of all."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return d(run(c, run(b, run(a, x))))


class Shared(Layers):
    """Two segments use the same layer."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return run(a, run(c, run(b, run(a, x)))) + run(d, x)


class Tied(Layers):
    """The layer that runs last, as it is, is used in the first segment as well: its first part comes very early."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return d(run(c, run(b, run(lambda x: d(a(x)), x))))


class Nested(Layers):
    """Segments within a segment."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return run(lambda x: run(b, run(a, x)), run(lambda x: d(run(c, x)), x))


class Unused(Layers):
    """A segment's input is a dummy that it does not use, as is done where the real one needs no gradient."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        dummy = torch.zeros(1, requires_grad=True)
        for layer in self.layers:
            x = run(lambda _, x, layer=layer: layer(x), dummy, x.detach()) + x.detach()
        return x


SHAPES: list[type[Layers]] = [Layers, Mixed, PlainBefore, Shared, Tied, Nested, Unused]


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-2, 3, (3, 4), generator=generator).double().requires_grad_()


def trained(worker: Worker, shape: type[Layers], run: Run, recipe: str = "Dense()", passes: int = 1) -> Tensor:
    with seeded(0):
        model = shape()
    optimizer = SignSteps(model)
    session = worker.attach(model, optimizer, recipe)
    for step in range(STEPS):
        optimizer.zero_grad()
        with session.no_sync():
            for again in range(passes - 1):
                model(inputs(50 + again, worker.rank), run).square().sum().backward()
        for again in range(2 if "accumulate" in recipe else 1):
            model(inputs(step + 10 * again, worker.rank), run).square().sum().backward()
        assert session.steps == step + (recipe not in STEPS_COUNT_LATER), "backward() returned before the exchange"
        optimizer.step()
    assert session.steps == STEPS
    return parameters(model)


@pytest.fixture
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket for each tensor, so that most leave during backward."""
    whole = stages.assign_buckets
    monkeypatch.setattr(stages, "assign_buckets", lambda parameters: whole(parameters, 1))


def same(shape: type[Layers], recipe: str = "Dense()", passes: int = 1) -> bool:
    def found(run: Run) -> Tensor:
        return agree(cluster(lambda worker: trained(worker, shape, run, recipe, passes), WORLD))

    return torch.equal(found(reentrant), found(plain))


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("shape", SHAPES)
def test_checkpointing_changes_no_bit(shape: type[Layers]) -> None:
    assert same(shape)


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("recipe", ["EveryStep(accumulate=2)", "TopK(0.3)", "LocalSGD(2)", "EveryStep(delay=1)"])
@pytest.mark.parametrize("shape", [Shared, Tied])
def test_every_way_of_averaging_sees_the_outermost_pass(shape: type[Layers], recipe: str) -> None:
    assert same(shape, recipe)


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("shape", [Mixed, Shared])
def test_gradients_that_add_up_before(shape: type[Layers]) -> None:
    assert same(shape, passes=3)


@pytest.mark.usefixtures("_small_buckets")
def test_the_check_catches_an_inner_end_that_is_taken_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: whatever is going on counts as the outermost pass."""
    monkeypatch.setattr(torch_hooks, "outermost_function", lambda: None)
    with pytest.raises((AssertionError, LoopError)):
        assert same(Layers)


@pytest.mark.usefixtures("_small_buckets")
def test_the_check_catches_a_part_that_is_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: a bucket leaves with the first part of a gradient that comes in two."""
    send = PendingReduction.send

    def send_at_once(self: PendingReduction, *args: Any) -> None:
        send(self, *args)
        self._work[-1].wait()

    monkeypatch.setattr(PendingReduction, "send", send_at_once)
    assert same(Tied)
    monkeypatch.setattr(Bucket, "arrive", lambda self, name: self.missing.discard(name))
    assert not same(Tied)


def test_a_part_that_comes_too_late_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the passes before it no segment shared anything, so that gradients left as soon as they were there."""

    def work(worker: Worker) -> None:
        with seeded(0):
            model: Any = Tied()
        worker.attach(model, SignSteps(model))
        for shape in (PlainBefore, Tied):
            model.__class__ = shape
            model(inputs(0, worker.rank), reentrant).sum().backward()
            model.zero_grad()

    whole = stages.assign_buckets
    monkeypatch.setattr(stages, "assign_buckets", lambda parameters: whole(parameters, 1))
    with pytest.raises(LoopError, match=r"layers\.3\.(weight|bias).*another part.*use_reentrant=False"):
        cluster(work, WORLD)


def test_a_pass_that_failed_within_a_segment_leaves_the_next_one_alone() -> None:
    """Nothing was sent yet; the loop throws the batch away and goes on."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise MemoryError

    def work(worker: Worker, fails: bool) -> Tensor:
        with seeded(0):
            model = Shared()
        optimizer = SignSteps(model)
        worker.attach(model, optimizer)
        for step in range(STEPS):
            if fails and step == 2:
                with pytest.raises(MemoryError):
                    model(Fails.apply(inputs(9, worker.rank)), reentrant).sum().backward()
                optimizer.zero_grad()
            optimizer.zero_grad()
            model(inputs(step, worker.rank), reentrant).square().sum().backward()
            optimizer.step()
        return parameters(model)

    assert torch.equal(
        agree(cluster(lambda worker: work(worker, True), WORLD)),
        agree(cluster(lambda worker: work(worker, False), WORLD)),
    )
