"""Local steps: what counts as one, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.virtual_workers import Worker, batch, cluster, heard, network, parameters
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import Parameter
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import NonFiniteError
from gossamer.train.engine.autograd_hooks import BackwardMonitor, LoopControls
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.step_decision import unchanged
from gossamer.train.synchronizers import local_step_counter
from gossamer.train.synchronizers.local_step_counter import LocalStepCounter, SilencedGradients, StepPhase, silence


class Loop:
    """One parameter, and everything that is reported."""

    def __init__(self, *, in_backward: bool = False) -> None:
        self.parameter, self.controls = Parameter(torch.ones(2)), LoopControls()
        self.counted, self.ended, self.judged = 0, list[Any](), list[Any]()
        state = SimpleNamespace(
            gradients=BackwardMonitor,
            agree=unchanged,
            ended=lambda *said: self.ended.append(said),
            judged=lambda *said: self.judged.append(said),
        )
        bucket = SimpleNamespace(parameters={"w": self.parameter})
        self.local = LocalStepCounter(
            self.controls, cast(LoopState, state), 3, [cast(Bucket, bucket)], self.count, in_backward=in_backward
        )

    def count(self) -> None:
        self.counted += 1

    def backward(self, factor: float = 1.0) -> None:
        (self.parameter * factor).sum().backward()


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("within", [0, 2])
def test_a_step_counts_once_however_many_passes_it_has(before: int, within: int) -> None:
    loop = Loop()
    for _ in range(before):
        loop.backward()
    loop.local.before_step(closure=within > 0)
    for _ in range(within):
        loop.backward()
    loop.local.after_step()
    assert (loop.counted, loop.local.phase) == (1, StepPhase.WAITING)


@pytest.mark.parametrize("muted", [False, True])
def test_muted_passes_do_not_count(muted: bool) -> None:
    loop = Loop(in_backward=True)
    loop.controls.muted = muted
    loop.backward()
    assert (loop.counted, loop.local.counted) == (not muted, not muted)


def test_the_weights_of_all_passes_of_a_step_add_up() -> None:
    loop = Loop()
    for weight in (2.0, 3.0):
        loop.controls.weight = weight
        loop.backward()
    assert loop.local.take_weight() == 5.0
    assert loop.local.take_weight() == 3.0  # a step without a pass of its own has the weight that was said last


def test_gradients_that_are_not_finite_are_dropped_and_the_step_reports_them_once() -> None:
    loop = Loop()
    loop.backward(torch.inf)
    loop.local.drop_nonfinite()
    loop.local.add(False, {"bytes_sent": 2})
    loop.local.add(False, {"bytes_sent": 3})
    loop.local.report()
    loop.local.report()
    assert loop.parameter.grad is None
    assert loop.judged == [("pass", (3, "w"))]
    assert loop.ended == [(True, {"waiting_seconds": 0.0, "bytes_sent": 5}), (False, {"waiting_seconds": 0.0})]


# -- Silenced gradients: zeros where one is not finite, without a wait, and told later ---------------------------------


def gradients(*values: float) -> list[Tensor]:
    return [torch.tensor([1.0, value, -2.0]) for value in values]


def test_finite_gradients_stay_as_they_are() -> None:
    given = [*gradients(3.0, 5.0), torch.tensor([65504.0], dtype=torch.float16)]
    before = [each.clone() for each in given]
    assert silence(given).tolist() == [False] * 3
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_that_is_not_makes_zeros_of_all(value: float) -> None:
    given = gradients(3.0, value, 5.0)
    assert silence(given).tolist() == [False, True, False]
    assert not any(each.any() for each in given)


def test_reasons_are_reported_in_order_once_known() -> None:
    held = {name: Parameter(torch.ones(3)) for name in ("a", "b", "empty")}
    held["empty"] = Parameter(torch.ones(0))
    thread = CommThread([torch.device("cpu")])
    silenced = SilencedGradients(held, thread)
    for value in (1.0, torch.nan):
        held["a"].grad, held["b"].grad, held["empty"].grad = *gradients(2.0, value), torch.ones(0)
        silenced.silence()
    thread.submit(lambda: None).wait()  # all before it are over
    assert list(silenced.pending_reasons()) == [None, "b"]
    assert list(silenced.pending_reasons()) == []
    thread.close()


def on(*devices: str) -> dict[str, Parameter]:
    """By number, parameters without memory, of which torch knows the devices: it raises where an operation mixes them,
    and where the host reads a number."""
    return {str(number): Parameter(torch.ones(3, device=device)) for number, device in enumerate(devices)}


def test_it_serves_gpus_alone() -> None:
    with FakeTensorMode():
        assert SilencedGradients.serves(on("cuda:0"))
        assert SilencedGradients.serves(on("cuda:0", "cuda:1"))
        assert not SilencedGradients.serves(on("cuda:0", "cpu"))
        assert not SilencedGradients.serves(on("cpu"))
        assert not SilencedGradients.serves(on("cpu", "meta"))
        assert not SilencedGradients.serves(on("meta"))
        assert not SilencedGradients.serves({})


def check_devices(silence: Callable[[list[Tensor]], Tensor]) -> None:
    with FakeTensorMode():
        gradients = [parameter.detach() for parameter in on("cuda:0", "cuda:1", "cuda:1", "cuda:0").values()]
        spoiled = silence(gradients)
        assert spoiled.device == torch.device("cuda", 0)
        assert spoiled.shape == (4,)


def test_gradients_on_several_gpus_are_silenced_without_a_wait() -> None:
    check_devices(silence)


def test_the_check_catches_the_firsts_word_on_the_second_and_a_host_that_reads() -> None:
    def mixes(gradients: list[Tensor]) -> Tensor:
        spoiled = silence(gradients)
        for gradient in gradients:
            gradient.masked_fill_(spoiled.any(), 0)
        return spoiled

    def reads(gradients: list[Tensor]) -> Tensor:
        spoiled = silence(gradients)
        for gradient in gradients if spoiled.any() else ():
            gradient.zero_()
        return spoiled

    with pytest.raises(RuntimeError, match=r"two (different )?devices"):
        check_devices(mixes)
    with pytest.raises(DataDependentOutputException):
        check_devices(reads)


# -- in sessions, as if these tensors lay on a GPU -----------------------------------------------------------------


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SilencedGradients, "serves", staticmethod(lambda parameters: True))


def poisoned(worker: Worker, recipe: str, bad: range) -> list[Tensor]:
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    session = worker.attach(model, optimizer, recipe)
    seen = []
    for step in range(12):
        optimizer.zero_grad()
        inputs, targets = batch(step, worker.rank)
        factor = torch.nan if worker.rank == 1 and step in bad else 1.0
        (mse_loss(model(inputs), targets) * factor).backward()
        optimizer.step()
        session._group.comm_thread.submit(lambda: None).wait()  # so that what is told does not depend on the machine
        seen.append(parameters(model))
    return seen


RECIPES = ["LocalSGD(period=3)", "DiLoCo(period=3) + Int8()", "DelayedAveraging(delay=1)", "Gossip()"]


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradient_that_is_not_finite_is_reported_and_not_applied(recipe: str) -> None:
    with heard(events.Skipped) as skipped:
        results = cluster(lambda worker: poisoned(worker, recipe, range(4, 5)), 2)
    assert all(seen.isfinite().all() for by_step in results for seen in by_step)
    assert [(event.rank, event.batch) for event in skipped] == [(1, None)]
    assert skipped[0].tensor in dict(network(0).named_parameters())


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_five_in_a_row_end_the_run() -> None:
    with pytest.raises(NonFiniteError, match=r'5 steps in a row.*"\d\.(weight|bias)" on rank 1'):
        cluster(lambda worker: poisoned(worker, "LocalSGD(period=3)", range(2, 12)), 2)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_the_check_catches_gradients_that_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks_only(given: Any) -> Tensor:
        return torch.tensor([not each.isfinite().all() for each in given])

    monkeypatch.setattr(local_step_counter, "silence", looks_only)
    with pytest.raises((AssertionError, NonFiniteError)):
        test_gradient_that_is_not_finite_is_reported_and_not_applied("LocalSGD(period=30)")
