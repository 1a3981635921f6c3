"""DDP guard: DistributedDataParallel around an attached model is refused before it averages anything."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from support.sessions import sgd
from support.virtual_workers import Worker, agree, cluster, network, parameters, train_step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.torch_hooks import MODULE_REGISTRATION, PARAMETER_REGISTRATION
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import AttachError
from gossamer.train.session.ddp_guard import DdpGuard
from gossamer.train.session.validation import refuse

ADVICE = r"Leave DDP out and call the attached model.*ddp\.register_comm_hook\(\*gossamer\.ddp_hook\("


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    """DDP needs a process group, and the virtual workers' own is none."""
    for session in open_sessions():  # of other tests, which the collector has not come to yet
        session.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    assert DistributedDataParallel._active_ddp_module is None, "later tests of this process would take it for theirs"


@pytest.fixture(autouse=True)
def passes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP keeps the pass in progress in one variable of the process: where threads overlap, it would stay set for good.

    Virtual workers are threads; real ones, processes, have a variable each.
    """
    inside, one_at_a_time = DistributedDataParallel._inside_ddp_forward, threading.Lock()

    @contextmanager
    def in_turn(self: DistributedDataParallel) -> Iterator[None]:
        with one_at_a_time, inside(self):
            yield

    monkeypatch.setattr(DistributedDataParallel, "_inside_ddp_forward", torch._disable_dynamo(in_turn, recursive=False))


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


# -- refusals ----------------------------------------------------------------------------------------------------------


def wrapped_before(worker: Worker, part: Callable[[nn.Module], nn.Module], forward: Callable[..., Tensor]) -> None:
    model = network(0)
    ddp = DistributedDataParallel(part(model))
    worker.attach(model, sgd(model), "TopK(0.1)")
    forward(ddp, model).sum().backward()


def inputs(model: nn.Module) -> Tensor:
    return torch.ones(2, next(model.parameters()).shape[1], dtype=torch.float64)


WHOLE, HEAD = (lambda model: model), (lambda model: model[0])


@pytest.mark.parametrize("part", [WHOLE, HEAD])
def test_a_pass_through_ddp_is_refused(part: Callable[[nn.Module], nn.Module]) -> None:
    """Also around a part of the model, whose own forward is never called then."""
    with pytest.raises(AttachError, match=r"is about to run this attached model.*averages of EveryStep.*" + ADVICE):
        cluster(lambda worker: wrapped_before(worker, part, lambda ddp, model: ddp(inputs(model))), 2)


def test_a_compiled_pass_through_ddp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(ddp: nn.Module, model: nn.Module) -> Tensor:
        torch._dynamo.reset()
        found: Tensor = torch.compile(ddp, backend="eager")(inputs(model))
        return found

    model = network(0)
    ddp = DistributedDataParallel(model)
    guard = DdpGuard(model, resolve("Dense()"))
    monkeypatch.setattr("gossamer.train.session.ddp_guard.open_sessions", lambda: [Holding(model)])
    with pytest.raises(AttachError, match="is about to run"):
        compiled(ddp, model)
    guard.remove()


class Holding:
    def __init__(self, model: nn.Module) -> None:
        self.model = model


@pytest.mark.parametrize("part", [WHOLE, HEAD])
def test_ddp_that_is_made_later_is_refused_at_once(part: Callable[[nn.Module], nn.Module]) -> None:
    def work(worker: Worker, steps: int) -> None:
        model, optimizer, _ = worker.start(network(0), sgd)
        for step in range(steps):
            train_step(model, optimizer, step, worker.rank)
        DistributedDataParallel(part(model))

    for steps in (0, 2):
        with pytest.raises(AttachError, match=r"was made around this attached model.*" + ADVICE):
            cluster(lambda worker, steps=steps: work(worker, steps), 2)  # type: ignore[misc]


def test_ddp_is_refused_by_attach_wherever_it_is() -> None:
    model = network(0)
    with pytest.raises(AttachError, match=r"this model is wrapped.*inside it, and call that one in the loop: model = "):
        refuse(DistributedDataParallel(model))
    model[1] = DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises(AttachError, match=r'"1" is wrapped'):
        refuse(model)


# -- what is served ----------------------------------------------------------------------------------------------------


def check_served(forward: Callable[[nn.Module, nn.Module], nn.Module]) -> None:
    """Training through `forward(ddp, model)` is that without DDP."""

    def work(worker: Worker, wraps: bool) -> Tensor:
        model = network(0)
        ddp = DistributedDataParallel(model) if wraps else None
        optimizer = sgd(model)
        worker.attach(model, optimizer, "TopK(0.1)")
        for step in range(3):
            train_step(model if ddp is None else forward(ddp, model), optimizer, step, worker.rank)
        return parameters(model)

    wrapped, plain = (agree(cluster(lambda worker, w=wraps: work(worker, w), 2)) for wraps in (True, False))  # type: ignore[misc]
    assert torch.equal(wrapped, plain)


def test_the_module_inside_is_served() -> None:
    """As AttachError advises."""
    check_served(lambda ddp, model: ddp.module)  # type: ignore[return-value]


def test_ddp_that_averages_nothing_is_served() -> None:
    class Silent(nn.Module):
        def __init__(self, ddp: nn.Module) -> None:
            super().__init__()
            self.ddp = ddp

        def forward(self, x: Tensor) -> Tensor:
            with self.ddp.no_sync():  # type: ignore[operator]
                found: Tensor = self.ddp(x)
            return found

        def parameters(self, recurse: bool = True):  # type: ignore[no-untyped-def]
            return self.ddp.parameters()

    check_served(lambda ddp, model: Silent(ddp))


def test_evaluation_and_other_models_are_served() -> None:
    def work(worker: Worker) -> None:
        model, other = network(0), network(1)
        ddp = DistributedDataParallel(model)
        session = worker.attach(model, sgd(model))
        with torch.no_grad():
            ddp(inputs(model))
        DistributedDataParallel(other)(inputs(other)).sum().backward()
        copied = copy.deepcopy(model)
        DistributedDataParallel(copied)(inputs(copied)).sum().backward()
        session.close()
        ddp(inputs(model)).sum().backward()
        DistributedDataParallel(model)

    cluster(work, 2)


def test_alone_ddp_is_served() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, sgd(model))
        DistributedDataParallel(model)(inputs(model)).sum().backward()

    cluster(work, 1)


# -- what is left behind -----------------------------------------------------------------------------------------------


class OwnIteration(nn.Sequential):
    """Overrides the iteration over its tensors without the arguments of torch's methods, as meta-learning models do."""

    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return super().parameters()

    def buffers(self) -> Iterator[Tensor]:  # type: ignore[override]
        return super().buffers()


def test_a_model_with_its_own_iteration_over_parameters_is_attached() -> None:
    def work(worker: Worker, made: Callable[..., nn.Module]) -> Tensor:
        model = made(*network(0), nn.BatchNorm1d(3).double())
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, "Dense()")
        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
        session.close()
        return torch.cat([parameters(model), *(each.flatten().double() for each in model.buffers())])

    overridden, usual = (
        agree(cluster(lambda worker, m=made: work(worker, m), 2)) for made in (OwnIteration, nn.Sequential)
    )  # type: ignore[misc]
    assert torch.equal(overridden, usual)


def test_the_guard_looks_at_one_pass_only() -> None:
    def work(worker: Worker, steps: int) -> tuple[int, int]:
        model, optimizer, session = worker.start(network(0), sgd)
        before = hooks_of(model)
        assert pickle.loads(pickle.dumps(model))(inputs(model)) is not None
        for step in range(steps):
            train_step(model, optimizer, step, worker.rank)
        session.close()
        return before, hooks_of(model)

    assert cluster(lambda worker: work(worker, 1), 2) == [(5, 0)] * 2, "one for the batch, and one a module"
    assert cluster(lambda worker: work(worker, 0), 2) == [(5, 0)] * 2


def test_no_hook_outlives_its_session() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        worker.attach(model, sgd(model)).close()

    before = MODULE_REGISTRATION.subscribers, PARAMETER_REGISTRATION.subscribers
    cluster(work, 2)
    assert (MODULE_REGISTRATION.subscribers, PARAMETER_REGISTRATION.subscribers) == before


def test_unreferenced_guard_is_collected() -> None:
    before = MODULE_REGISTRATION.subscribers
    model = network(0)
    guard = DdpGuard(model, resolve("Dense()"))
    assert MODULE_REGISTRATION.subscribers == before + 1
    model(inputs(model))
    del guard
    gc.collect()
    assert MODULE_REGISTRATION.subscribers == before


def test_compiled_models_keep_one_graph() -> None:
    torch._dynamo.reset()
    model = network(0)
    guard = DdpGuard(model, resolve("Dense()"))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(inputs(model)).sum().backward()
    assert torch.equal(compiled(inputs(model)), model(inputs(model)))
    guard.remove()
    assert hooks_of(model) == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_scripted_parts_are_left_alone() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 3))
    guard = DdpGuard(model, resolve("Dense()"))
    model(torch.ones(1, 3))
    assert hooks_of(model) == 0
    guard.remove()
