"""Validation: which optimizer is attached where it is wrapped."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.virtual_workers import notices
from torch import nn
from torch.optim import SGD, Optimizer

import gossamer
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import AttachError
from gossamer.train.session import validation
from gossamer.train.session.validation import check_devices, innermost, refuse_sparse_gradients


class Accelerated(Optimizer):
    """As Accelerate's: a subclass without a base's attributes, which passes everything on."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.scaler: Any = None

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Other:
    """No subclass at all."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Lookahead(Optimizer):
    """Was built as an optimizer, with hooks and a step of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_wrappers_without_hooks_are_seen_through() -> None:
    inner = SGD(nn.Linear(3, 2).parameters(), 0.1)
    assert innermost(inner) is inner
    assert innermost(Accelerated(inner)) is inner
    assert innermost(Other(Accelerated(Other(inner)))) is inner
    outer = Lookahead(inner)
    assert innermost(outer) is outer
    assert innermost(Accelerated(outer)) is outer


@pytest.mark.parametrize("strange", [Other(None), Other(Other(3)), Accelerated("SGD"), object()])
def test_wrapper_without_an_optimizer_is_refused(strange: Any) -> None:
    with pytest.raises(AttachError, match=r"is not a torch\.optim\.Optimizer.*super\(\)\.__init__\(\), or attach"):
        innermost(strange)


class WithoutInit(Optimizer):
    """Like timm's Lookahead, it leaves out the constructor that makes `step` call hooks, but has the dicts of hooks."""

    def __init__(self, base: Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._base_optimizer, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        return self._base_optimizer.step(closure)


def test_an_optimizer_that_calls_no_hooks_is_refused_with_the_one_to_attach() -> None:
    model = nn.Linear(3, 2)
    optimizer = WithoutInit(SGD(model.parameters(), 0.1))
    with pytest.raises(
        AttachError, match=r"no step hooks.*gossamer\.attach\(model, optimizer\._base_optimizer, \.\.\.\)"
    ):
        gossamer.attach(model, optimizer)
    with gossamer.attach(model, optimizer._base_optimizer) as session:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert session.steps == 1


def test_a_wrapped_optimizer_makes_the_sessions_steps() -> None:
    model = nn.Linear(3, 2)
    optimizer = Accelerated(SGD(model.parameters(), 0.1))
    with gossamer.attach(model, optimizer, clip_norm=0.01) as session:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert session.optimizer is optimizer.optimizer
        assert session.steps == 1


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("EveryStep(delay=1)", r"Write EveryStep\(\), or"),
        ("EveryStep(accumulate=4)", r"`with session.no_sync\(\):` around all but the last of 4 backward\(\) calls"),
        ("ParameterServer()", r"Write EveryStep\(\), or"),
        ("DGC(density=0.1)", r"applies the optimizer's momentum.*such as TopK\(density"),
    ],
)
def test_recipes_that_cannot_take_sparse_gradients_name_the_line_to_write(recipe: str, says: str) -> None:
    def attached(sparse: bool) -> None:
        model = nn.Sequential(nn.EmbeddingBag(5000, 3, sparse=sparse), nn.Linear(3, 2))
        refuse_sparse_gradients(model, resolve(recipe, 2))

    with pytest.raises(AttachError, match=rf'"0.weight" has sparse gradients \(sparse=True\), .*{says}'):
        attached(True)
    attached(False)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "LocalSGD(4)", "DiLoCo(4)", "Gossip()"])
def test_a_table_with_sparse_gradients_is_attached(recipe: str) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    with gossamer.attach(model, SGD(model.parameters(), 0.1), recipe):
        pass


def test_the_scaler_in_a_wrapper_is_the_loops() -> None:
    model = nn.Linear(3, 2)
    optimizer = Accelerated(SGD(model.parameters(), 0.1))
    with gossamer.attach(model, optimizer) as session:
        assert session.scaler is None
    optimizer.scaler = torch.amp.GradScaler("cpu")
    with gossamer.attach(model, optimizer) as session:
        assert session.scaler is optimizer.scaler
    other = torch.amp.GradScaler("cpu")
    with gossamer.attach(model, optimizer, scaler=other) as session:
        assert session.scaler is other


# -- other kinds of things ---------------------------------------------------------------------------------------------


def built() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    return model, SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda model, optimizer: (None, optimizer), r"not a torch\.nn\.Module.*gossamer\.attach\(model, optimizer\)"),
        (lambda model, optimizer: (optimizer, model), r"this SGD is not a torch\.nn\.Module.*model = Net"),
        (lambda model, optimizer: (nn.Linear, optimizer), r"the class Linear is not.*Net\(\)"),
        (lambda model, optimizer: (list(model.parameters()), optimizer), r"this list is not a torch\.nn\.Module"),
        (lambda model, optimizer: (model, None), r"is not an optimizer.*torch\.optim\.AdamW\(model\.parameters\(\)\)"),
        (lambda model, optimizer: (model, SGD), "the class SGD is not an optimizer"),
        (lambda model, optimizer: (model, model), "this Linear is not an optimizer"),
    ],
)
def test_objects_that_are_no_model_or_optimizer_are_named(given: Any, says: str) -> None:
    with pytest.raises(AttachError, match=says):
        gossamer.attach(*given(*built()))


@pytest.mark.parametrize("scaler", ["cpu", True, 1024.0, torch.amp.GradScaler])
def test_an_invalid_scaler_is_named(scaler: Any) -> None:
    with pytest.raises(AttachError, match=r"is not a GradScaler.*attach\(\.\.\., scaler=scaler\)"):
        gossamer.attach(*built(), scaler=scaler)


@pytest.mark.parametrize("norm", ["1", [1.0], {}, torch.ones(2)])
def test_an_invalid_norm_is_named(norm: Any) -> None:
    with pytest.raises(ValueError, match=r"clip_norm must be positive, got .*clip_norm=1\.0"):
        gossamer.attach(*built(), clip_norm=norm)


def test_a_model_of_empty_parameters_has_nothing_to_average() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 3))])
    with pytest.raises(AttachError, match="no trainable parameters, or only empty ones"):
        gossamer.attach(model, SGD(model.parameters(), 0.1))
    model.append(nn.Parameter(torch.zeros(1)))
    gossamer.attach(model, SGD(model.parameters(), 0.1)).close()


def test_a_scheduler_that_was_not_built_is_named() -> None:
    with pytest.raises(AttachError, match="the class StepLR, which has no state_dict"):
        gossamer.attach(*built(), scheduler=torch.optim.lr_scheduler.StepLR)  # type: ignore[arg-type]
    for session in open_sessions():
        session.close()


# -- a cell that runs again --------------------------------------------------------------------------------------------


def test_a_session_is_replaced_where_that_is_asked_for() -> None:
    model, optimizer = built()
    first = gossamer.attach(model, optimizer)
    other = gossamer.attach(*built())
    with pytest.raises(AttachError, match=r"gossamer\.attach\(\.\.\., replace=True\)"):
        gossamer.attach(model, optimizer)
    second = gossamer.attach(nn.Sequential(model), SGD(model.parameters(), 0.2), replace=True)
    assert first not in open_sessions()
    assert {second, other} <= set(open_sessions())
    model(torch.ones(1, 3)).sum().backward()
    second.optimizer.step()
    assert (first.steps, second.steps) == (0, 1)
    second.close()
    other.close()


# -- optimizers that send parameters themselves ------------------------------------------------------------------------


def test_zero_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharding(SGD):
        optim = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])

    class Loaded:
        ZeroRedundancyOptimizer = Sharding

    model = nn.Linear(3, 2)
    monkeypatch.setitem(sys.modules, "torch.distributed.optim", Loaded)  # type: ignore[arg-type]
    with pytest.raises(
        AttachError, match=r"ZeroRedundancyOptimizer shards.*torch\.optim\.AdamW\(model\.parameters\(\)"
    ):
        gossamer.attach(model, Sharding(model.parameters(), 0.1))
    gossamer.attach(model, SGD(model.parameters(), 0.1)).close()


# -- Device check: where the model lies beside where its worker computes -----------------------------------------------

Told = Callable[..., list[str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What is said of a model whose parameters lie on some devices."""

    def check(devices: list[str], own: str, workers: int = 2) -> list[str]:
        held = {name: SimpleNamespace(device=torch.device(name)) for name in devices}
        monkeypatch.setattr(validation, "trainable", lambda model: held)
        with notices() as said:
            check_devices(nn.Module(), torch.device(own), workers)
        return said

    return check


@pytest.mark.parametrize(
    ("devices", "own", "workers"),
    [
        (["cpu"], "cpu", 2),
        (["cuda:1"], "cuda:1", 2),
        (["cuda:0", "cuda:1", "cpu"], "cuda:0", 2),  # layers of one model on several
        (["cuda:0"], "cpu", 2),  # workers that share a GPU
        (["cuda:0"], "cuda:1", 1),
    ],
)
def test_valid_devices_cause_no_notice(told: Told, devices: list[str], own: str, workers: int) -> None:
    assert told(devices, own, workers) == []


def test_a_gpu_that_stays_idle_is_reported(told: Told) -> None:
    (said,) = told(["cpu"], "cuda:1")
    assert "this worker has cuda:1" in said
    assert "model.to(world.device)" in said


def test_another_workers_gpu_is_refused(told: Told) -> None:
    with pytest.raises(AttachError, match=r"on cuda:0, but this worker's device is cuda:1.*model\.to\(world\.dev"):
        told(["cuda:0"], "cuda:1")
