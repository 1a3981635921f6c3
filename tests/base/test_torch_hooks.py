"""Hooks: sessions begin and end while other threads build modules and step optimizers; copies of models lose hooks."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, heard, network
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import SGD
from torch.utils.hooks import RemovableHandle

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.spans import active
from gossamer.base.torch_hooks import MODULE_REGISTRATION, OPTIMIZER_STEP, PARAMETER_REGISTRATION, GlobalHook
from gossamer.train.session.ddp_guard import DdpGuard


class Calls:
    """A subscriber that counts, and subscribes or unsubscribes others within a call."""

    def __init__(self, *acts: Any) -> None:
        self.count, self.acts = 0, list(acts)

    def called(self, *args: Any) -> None:
        self.count += 1
        if self.acts:
            self.acts.pop()()


def begin_and_end_sessions() -> None:
    def work(worker: Worker) -> None:
        _, _, session = worker.start(network(0), sgd)
        session.close()

    cluster(work, 2)


def test_sessions_begin_and_end_within_a_call_of_a_hook() -> None:
    """As in another thread, while torch iterates over its hooks of modules and optimizers."""

    for hook in (MODULE_REGISTRATION, PARAMETER_REGISTRATION, OPTIMIZER_STEP):
        calls, later = Calls(begin_and_end_sessions), Calls()
        subscriptions = [hook.subscribe(each.called) for each in (calls, later)]
        module = nn.Sequential(nn.Linear(2, 2))
        SGD(module.parameters(), 0.1).step()
        assert not calls.acts
        assert later.count
        for each in subscriptions:
            each.remove()


def test_subscribers_are_called_in_order_until_they_are_removed_or_collected() -> None:
    registered: list[Any] = []
    hook, order = GlobalHook(registered.append, breaks_graphs=False), []

    class Subscriber:
        def __init__(self, name: str) -> None:
            self.name = name

        def called(self, *args: Any) -> None:
            order.append((self.name, *args))

    assert registered == [], "nothing is registered before the first subscription"
    first, second, third = (Subscriber(name) for name in ("first", "second", "third"))
    subscriptions = [hook.subscribe(each.called) for each in (first, second, third)]
    assert len(registered) == 1
    registered[0](1, 2)
    assert order == [("first", 1, 2), ("second", 1, 2), ("third", 1, 2)]
    del second
    subscriptions[0].remove()
    subscriptions[0].remove()
    registered[0]()
    assert order[3:] == [("third",)]
    assert hook.subscribers == 1


def test_hooks_that_others_register_and_remove_are_kept_apart() -> None:
    """Of a profiler, for example."""
    seen: list[str] = []
    handles: list[RemovableHandle] = [
        register_module_module_registration_hook(lambda module, name, child: seen.append(name))
    ]
    guard = DdpGuard(nn.Linear(2, 2), resolve("Dense()"))
    nn.Sequential(nn.Linear(2, 2))
    guard.remove()
    nn.Sequential(nn.Linear(2, 2))
    handles.pop().remove()
    nn.Sequential(nn.Linear(2, 2))
    assert seen == ["0", "0"]


# -- copies of attached models -----------------------------------------------------------------------------------------


class Named(nn.Module):
    """A part that no forward pass reaches, and an input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = network(0), nn.Linear(2, 2)

    def forward(self, *, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_copies_of_an_attached_model_are_free_of_gossamer(steps: int, traced: bool, tmp_path: Path) -> None:
    """A file of torch.save(model) is read where Gossamer is not installed, and copies train as the model does."""
    x = torch.ones(2, 6, dtype=torch.float64)

    def work(worker: Worker) -> None:
        model = Named()
        optimizer = sgd(model)
        session = worker.attach(model, optimizer)
        for _ in range(steps):
            model(x=x).sum().backward()
            optimizer.step()
        written = pickle.dumps(model)
        assert b"gossamer" not in written
        expected = model(x=x)
        for other in (pickle.loads(written), copy.deepcopy(model)):
            other(x=x).sum().backward()
            assert torch.equal(other(x=x), expected)
        session.close()

    if traced:
        active.begin(tmp_path, 0, 1)
    try:
        with heard():  # a session measures its steps if an observer is subscribed
            cluster(work, 2)
    finally:
        active.end()


def test_a_copy_of_an_attached_model_is_compiled_in_one_graph() -> None:
    model = network(0)
    guard = DdpGuard(model, resolve("Dense()"))
    torch._dynamo.reset()
    x = torch.ones(2, 6, dtype=torch.float64)
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    guard.remove()
