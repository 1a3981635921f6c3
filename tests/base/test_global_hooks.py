"""Global hooks: sessions may begin and end while other threads build modules and step optimizers."""

from __future__ import annotations

from typing import Any

from support.sessions import sgd
from support.virtual_workers import Worker, cluster, network
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import SGD
from torch.utils.hooks import RemovableHandle

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.global_hooks import MODULE_REGISTRATION, OPTIMIZER_STEP, PARAMETER_REGISTRATION, GlobalHook
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
    hook, order = GlobalHook(registered.append), []

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
