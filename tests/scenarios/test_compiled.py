"""Models and whole steps compiled after attach: nothing of the session is in their graph, nor compiled itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.nightly import nightly, once_each
from support.sessions import sgd
from support.virtual_workers import Worker, batch, cluster, network, parameters
from torch._dynamo.exc import Unsupported
from torch.nn.functional import mse_loss

import gossamer
from gossamer.base.torch_hooks import OPTIMIZER_STEP, OPTIMIZER_STEPPED
from gossamer.train.session.first_batch import FirstBatch


def train(step: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.Tensor:
    """Three steps alone."""
    torch._dynamo.reset()
    model = network(0)
    optimizer = sgd(model)
    with gossamer.attach(model, optimizer):
        called = step(model)
        for number in range(3):
            called(batch(number, 0)[0]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="eager", fullgraph=True)


def looks_while_compiling(self: FirstBatch, model: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    self.hash = hash(args[0].numpy().tobytes())


def test_the_graph_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here, and a hook that reads bytes while it is followed would break the graph."""
    assert torch.equal(train(compiled), train(lambda model: model))
    monkeypatch.setattr(FirstBatch, "see", looks_while_compiling)
    with pytest.raises(Unsupported):
        train(compiled)


@once_each("recipe, backend", ["Dense()", "TopK(0.1)", "LocalSGD(period=2) + Int8()"], ["eager", "aot_eager"])
def test_workers_that_compile_come_to_the_bits_of_those_that_do_not(recipe: str, backend: str) -> None:
    """Compiled forward and backward call the session's hooks as any other: between workers, too."""
    compiling = threading.Lock()  # the compiler is one for all threads

    def work(worker: Worker, *, compiles: bool) -> list[torch.Tensor]:
        model, optimizer, _ = worker.start(network(0), sgd, recipe)
        called, seen = (torch.compile(model, backend=backend) if compiles else model), []
        for step in range(5):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            with compiling:
                loss = mse_loss(called(inputs), targets)
            loss.backward()
            optimizer.step()
            seen.append(parameters(model))
        return seen

    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        found.append(cluster(partial(work, compiles=compiles), 2))
    for plain, compiled_ones in zip(*found, strict=True):
        assert all(torch.equal(*pair) for pair in zip(plain, compiled_ones, strict=True))


# -- forward, backward and optimizer.step() in one compiled function ---------------------------------------------------

of_torch = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # its own


@of_torch
@pytest.mark.parametrize("recipe", ["Dense()", *nightly("LocalSGD(period=2) + Int8()")])
def test_workers_that_compile_whole_steps_get_the_bits_of_those_that_do_not(recipe: str) -> None:
    """Warnings are errors here: Dynamo warns about code of hooks that it compiles."""

    def work(worker: Worker, *, compiles: bool) -> list[torch.Tensor]:
        model, optimizer, _ = worker.start(network(0), sgd, recipe)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()

        called = torch.compile(step, backend="eager") if compiles else step
        for number in range(4):
            called(*batch(number, worker.rank))
        return [each.detach().clone() for each in model.parameters()]

    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        found.append(cluster(partial(work, compiles=compiles), 2))
    for parameters_of_ranks in zip(*found[0], *found[1], strict=True):
        assert all(torch.equal(parameters_of_ranks[0], each) for each in parameters_of_ranks)


@of_torch
def test_compiled_steps_call_the_subscribers_of_steps() -> None:
    class Calls:
        count = 0

        def called(self, *_: Any) -> None:
            self.count += 1

    torch._dynamo.reset()
    before, after, model = Calls(), Calls(), network(0)
    optimizer = sgd(model)
    subscriptions = OPTIMIZER_STEP.subscribe(before.called), OPTIMIZER_STEPPED.subscribe(after.called)
    mse_loss(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        step()
    for each in subscriptions:
        each.remove()
    assert (before.count, after.count) == (3, 3)
