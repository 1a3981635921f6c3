"""Foreign optimizers' steps in attached parameters: served where they mean the same on every rank, else refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, agree, batch, cluster, joined, loss_of, network, parameters
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer

import gossamer
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.torch_hooks import OPTIMIZER_STEP
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import GossamerError, LoopError
from gossamer.train.engine.parameter_views import trainable
from gossamer.train.session.foreign_optimizers import ForeignOptimizerGuard
from gossamer.train.session.session import Session
from gossamer.train.session.step_hooks import StepHooks

AROUND = [
    "LocalSGD(period=4)",
    "PostLocalSGD(period=4, start=100)",
    "DiLoCo(period=4)",
    "DelayedAveraging(delay=2)",
    "ParameterServer('sync')",
    "ParameterServer('async')",
    "Gossip() + Ring()",
    "Gossip(mixing='pairwise')",
]
OWN_MOMENTUM = ["DGC(density=0.1)", "OneBitAdam(warmup=10)", "AdamUpdate()"]
IN_BACKWARD = ["Dense()", "TopK(0.1)", "PowerSGD(rank=2)", "EveryStep(accumulate=2)", "EveryStep(delay=1)", "Int8()"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    for session in open_sessions():  # of other tests, which the collector has not come to yet
        with suppress(GossamerError):  # some of them are of workers that were lost
            session.close()
    earlier = OPTIMIZER_STEP.subscribers  # a job that other tests simulate, of which a thread still waits
    yield
    assert OPTIMIZER_STEP.subscribers <= earlier, "a hook of all optimizers outlived the last session"


class Wrapper(Optimizer):
    """Makes steps through another optimizer, as SAM and Lookahead do. hidden: where nobody finds it."""

    def __init__(self, held: Iterable[Parameter], inner: Optimizer, *, hidden: bool = False) -> None:
        super().__init__(held, {})
        self.inner: Any = (lambda: inner) if hidden else [inner]
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        (self.inner() if callable(self.inner) else self.inner[0]).step()


def beside_sgd(recipe: str, model: nn.Module) -> ForeignOptimizerGuard:
    return ForeignOptimizerGuard(model, sgd(model), resolve(recipe, 4), trainable(model))


# -- which steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "share"),
    [(recipe, slice(None)) for recipe in (*AROUND, *OWN_MOMENTUM)]
    + [(recipe, share) for recipe in AROUND for share in (slice(1), slice(-1, None))],
)
def test_second_optimizer_is_refused_by_recipes_that_act_around_steps(recipe: str, share: slice) -> None:
    """Also where they have a part of the parameters only, beside some of their own."""
    model = network(0)
    others = [*list(model.parameters())[share], nn.Parameter(torch.zeros(2))]
    found = beside_sgd(recipe, model)
    with pytest.raises(LoopError, match=r"Adam .*another optimizer, SGD, .*close\(\) and gossamer\.attach\(model, new"):
        found.check(Adam(others), local=False)
    found.check(found._attached, local=False)
    found.check(Adam(network(0).parameters()), local=True)


@pytest.mark.parametrize("recipe", IN_BACKWARD)
def test_gradients_that_are_averaged_serve_all(recipe: str) -> None:
    model = network(0)
    beside_sgd(recipe, model).check(Adam(model.parameters()), local=False)
    with pytest.raises(LoopError, match=r"within session\.no_sync\(\)"):
        beside_sgd(recipe, model).check(Adam(model.parameters()), local=True)


def test_momentum_is_the_attached_ones_only_where_it_has_moved() -> None:
    model = network(0)
    found = beside_sgd("DGC(density=0.1)", model)
    matrices, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    found.check(Adam(biases), local=False)
    with pytest.raises(LoopError, match=r"DGC\(.*has added the attached one's momentum to gradients"):
        found.check(Adam(matrices), local=False)


@pytest.mark.parametrize("outer_is_attached", [False, True])
def test_wrapper_is_accepted_as_its_inner_optimizer(outer_is_attached: bool) -> None:
    def check(*, hidden: bool) -> None:
        model = network(0)
        inner = sgd(model)
        outer = Wrapper(model.parameters(), Wrapper(model.parameters(), inner), hidden=hidden)
        attached, other = (outer, inner) if outer_is_attached else (inner, outer)
        ForeignOptimizerGuard(model, attached, resolve("LocalSGD(period=4)"), trainable(model)).check(
            other, local=False
        )

    check(hidden=False)
    with pytest.raises(LoopError):
        check(hidden=True)


class SharpnessAware(Optimizer):
    """Two passes per step, and the step is the inner optimizer's, as in SAM."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def climb(self, rho: float) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad.sign(), alpha=rho)

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def sharpness_aware(worker: Worker, recipe: str, *, outer: bool) -> Tensor:
    model = network(0)
    optimizer = SharpnessAware(sgd(model))
    session = worker.attach(model, optimizer if outer else optimizer.base_optimizer, recipe)
    for step in range(6):
        for rho in (0.5, -0.5):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.climb(rho)
        optimizer.base_optimizer.step()
    with session.averaged_parameters(model):
        return parameters(model)


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)"])
def test_steps_of_the_inner_optimizer_alone_are_refused_with_its_name(recipe: str) -> None:
    with pytest.raises(LoopError, match=r"gossamer\.attach\(model, optimizer\.base_optimizer"):
        cluster(lambda worker: sharpness_aware(worker, recipe, outer=True), 2)


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)"])
def test_inner_optimizer_is_attached_where_it_makes_the_steps(recipe: str) -> None:
    ended = agree(cluster(lambda worker: sharpness_aware(worker, recipe, outer=False), 2))
    assert not torch.equal(ended, parameters(network(0)))


def test_second_optimizer_of_unfrozen_parameters() -> None:
    model = network(0)
    first, *_ = model.parameters()
    first.requires_grad_(False)
    found = beside_sgd("Dense()", model)
    later = SGD([first], 0.1)
    found.check(later, local=False)
    first.requires_grad_(True)
    first.grad = torch.zeros_like(first)
    with pytest.raises(
        LoopError, match=r'frozen or missing at attach.*"0\.weight".*session\.add_parameters\(\) on every rank'
    ):
        found.check(later, local=False)


# -- in a loop ---------------------------------------------------------------------------------------------------------


def train(worker: Worker, recipe: str, make: Callable[[nn.Module], list[Optimizer]]) -> tuple[Tensor, str]:
    """Two steps with the attached optimizer, then three with all that `make` gives; what was refused, if anything."""
    model, first, session = worker.start(network(0), sgd, recipe)
    others = make(model)
    for step in range(5):
        loss_of(model, step, worker.rank).backward()
        before = parameters(model)
        try:
            for optimizer in [first] if step < 2 else others:
                optimizer.step()
        except LoopError as error:
            assert torch.equal(parameters(model), before), "a step that is refused changes nothing"
            return before, str(error)
        model.zero_grad()
    session.close()
    return parameters(model), ""


def two_parts(model: nn.Module) -> list[Optimizer]:
    first, *rest = model.parameters()
    return [SGD([first], 0.05, momentum=0.9), Adam(rest, 0.01)]


def check_phases(recipe: str) -> None:
    """No rank goes on apart from the others without a word."""
    results = cluster(lambda worker: train(worker, recipe, lambda model: [SGD(model.parameters(), 0.05)]), 2)
    if not all(refused for _, refused in results):
        agree([ended for ended, _ in results])


@pytest.mark.parametrize("recipe", ["DiLoCo(period=50)", "Gossip(mixing='push-sum') + Ring()", "LocalSGD(period=50)"])
def test_a_new_optimizer_in_mid_run(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_phases(recipe)
    monkeypatch.setattr(StepHooks, "_before_foreign_step", lambda self, *step: None)
    monkeypatch.setattr("gossamer.train.synchronizers.gossip.GossipAveraging.end_run", lambda self: None)
    with pytest.raises(AssertionError):
        check_phases(recipe)


def test_two_optimizers_of_one_model_equal_one_process() -> None:
    results = cluster(lambda worker: train(worker, "Dense()", two_parts), 2)
    assert [refused for _, refused in results] == ["", ""]
    model = network(0)
    first, others = sgd(model), two_parts(model)
    for step in range(5):
        inputs, targets = joined(batch(step, rank) for rank in range(2))
        model.zero_grad()
        mse_loss(model(inputs), targets).backward()
        for optimizer in [first] if step < 2 else others:
            optimizer.step()
    torch.testing.assert_close(agree([ended for ended, _ in results]), parameters(model))


def test_gradients_of_one_rank_alone_are_no_ones_else() -> None:
    def work(worker: Worker, muted: bool) -> Tensor:
        model = network(0)
        session = worker.attach(model, sgd(model))
        other = SGD(model.parameters(), 0.1)
        with session.no_sync():
            mse_loss(*_seen(model, 0, worker.rank)).backward()
        if not muted:
            mse_loss(*_seen(model, 1, worker.rank)).backward()
        other.step()
        session.close()
        return parameters(model)

    agree(cluster(lambda worker: work(worker, False), 2))
    with pytest.raises(LoopError, match=r"within session\.no_sync\(\)"):
        cluster(lambda worker: work(worker, True), 2)


def _seen(model: nn.Module, step: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(step, rank)
    return model(inputs), targets


def test_an_attached_optimizer_that_changes_on_another_thread_is_searched() -> None:
    """A scheduler sets an attribute of its optimizer while another thread steps an optimizer of its own."""
    model = network()
    attached, other = sgd(model), sgd(model)

    class Changing:
        @property
        def __class__(self) -> Any:  # read by isinstance
            vars(attached)[f"attribute {len(vars(attached))}"] = 0
            return object

    vars(attached)["value"] = Changing()
    ForeignOptimizerGuard(model, attached, resolve("Dense()"), trainable(model)).refuse_inner(other)
    assert "attribute" in " ".join(vars(attached))


def test_two_sessions_do_not_disturb_each_other() -> None:
    """As with a generator and a discriminator; where one optimizer holds of both, that is found."""

    def work(worker: Worker, astray: bool) -> None:
        models = [network(0), network(1)]
        mine = [sgd(model) for model in models]
        sessions = [
            worker.attach(model, optimizer, "LocalSGD(period=2)") for model, optimizer in zip(models, mine, strict=True)
        ]
        for step in range(3):
            for model, optimizer in zip(models, mine, strict=True):
                mse_loss(*_seen(model, step, worker.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
        if astray:
            SGD([nn.Parameter(torch.zeros(1)), next(models[1].parameters())], 0.1).step()
        for session in sessions:
            session.close()

    cluster(lambda worker: work(worker, False), 2)
    with pytest.raises(LoopError, match="SGD is about to change"):
        cluster(lambda worker: work(worker, True), 2)


def test_alone_any_optimizer_may_step() -> None:
    model = nn.Linear(3, 2)
    with gossamer.attach(model, SGD(model.parameters(), 0.1), "LocalSGD(period=2)"):
        model(torch.ones(1, 3)).sum().backward()
        Adam(model.parameters()).step()


# -- who is heard ------------------------------------------------------------------------------------------------------


def check_nothing_is_kept() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), 0.1)
    session = gossamer.attach(model, optimizer)
    gone = weakref.ref(session)
    del model, optimizer, session
    gc.collect()
    for left in open_sessions():
        left.close()
    assert gone() is None, "the hook that hears of every optimizer keeps a session that nobody has"


def test_unreferenced_session_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    check_nothing_is_kept()
    monkeypatch.setattr(weakref, "WeakMethod", lambda method: lambda: method)
    with pytest.raises(AssertionError, match="keeps a session"):
        check_nothing_is_kept()
    monkeypatch.undo()
    _session().close()


def _session() -> Session:
    model = nn.Linear(3, 2)
    return gossamer.attach(model, SGD(model.parameters(), 0.1))


def test_hook_of_all_optimizers_is_subscribed_while_a_session_is_open() -> None:
    earlier = OPTIMIZER_STEP.subscribers
    first, second = _session(), _session()
    assert OPTIMIZER_STEP.subscribers - earlier == 2
    first.close()
    assert OPTIMIZER_STEP.subscribers - earlier == 1
    second.close()
    second.close()
    assert OPTIMIZER_STEP.subscribers - earlier == 0
