"""Scalars: numbers, or tensors as they come out of a loop; what is neither is named."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.virtual_workers import heard, subscribed
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer import events
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.train.session import scalars
from gossamer.train.session.scalars import DeferredMetrics


def logged(*named: Any, **metrics: Any) -> dict[str, float]:
    model = nn.Linear(3, 2)
    with heard(events.Logged) as found, gossamer.attach(model, SGD(model.parameters(), 0.1)) as session:
        session.log(*named, **metrics)
    (event,) = found
    return dict(event.values)


def test_a_loss_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of numbers out of a graph, and warnings are errors here."""
    loss = torch.tensor(2.0, requires_grad=True) * 3
    assert logged(loss=loss, rate=0.5, count=3, accuracy=torch.tensor([0.25])) == {
        "loss": 6.0,
        "rate": 0.5,
        "count": 3.0,
        "accuracy": 0.25,
    }
    monkeypatch.setattr(scalars, "number_in", float)
    with pytest.raises(UserWarning):
        logged(loss=torch.tensor(2.0, requires_grad=True) * 3)


def test_a_dict_of_metrics_is_logged_as_keywords_are() -> None:
    assert logged({"train/loss": 2.0, "rate": torch.tensor(0.5)}, epoch=3) == {
        "train/loss": 2.0,
        "rate": 0.5,
        "epoch": 3,
    }
    assert logged(metrics=1.0) == {"metrics": 1.0}


@pytest.mark.parametrize("given", [3.0, torch.tensor(1.0), [("loss", 1.0)], {1: 2.0}])
def test_metrics_without_names_are_refused_with_the_line_to_write(given: Any) -> None:
    with pytest.raises(TypeError, match=r'session\.log\(loss=loss\) or session\.log\(\{"loss": loss\}\)'):
        logged(given)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x", "'x'"),
        (None, "None"),
        (torch.zeros(2, 3), r"a tensor of shape \(2, 3\)"),
        (torch.zeros(2, requires_grad=True), r"a tensor of shape \(2,\)"),
    ],
)
def test_an_invalid_number_is_named(value: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"session\.log\(name=\.\.\.\) got {shown}.*session\.log\(name=loss"):
        logged(name=value)


@pytest.mark.parametrize("value", [None, "3", -1, float("nan"), float("inf"), torch.ones(2), [1], 10**400, 1j, 1e308])
def test_an_invalid_weight_is_named(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"a batch weight must be a number of samples.*session\.set_batch_weight\(len\(batch\)\)"
    ):
        scalars.sample_weight(value)


def test_weights_are_numbers_or_tensors_of_one() -> None:
    assert scalars.sample_weight(0) == 0.0
    assert scalars.sample_weight(torch.tensor([3], requires_grad=False)) == 3.0
    assert scalars.sample_weight(torch.tensor(2.5, requires_grad=True)) == 2.5


# -- Deferred metrics: numbers on a GPU are logged from the communication thread, as they were when they were given


@pytest.fixture
def thread() -> Any:
    made = CommThread([torch.device("cpu")])
    yield made
    made.close()


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every tensor lay on a GPU."""
    monkeypatch.setattr(scalars, "_is_on_other_device", torch.is_tensor)


def test_metrics_on_the_cpu_are_logged_immediately(thread: CommThread) -> None:
    with heard(events.Logged) as told:
        DeferredMetrics(thread).log(3, {"loss": torch.tensor(2.0), "rate": 0.5})
        assert [(event.step, dict(event.values)) for event in told] == [(3, {"loss": 2.0, "rate": 0.5})]


@pytest.mark.usefixtures("_elsewhere")
def test_metrics_on_a_gpu_are_logged_by_the_communication_thread(thread: CommThread) -> None:
    by, told = list[str](), list[Any]()

    def listen(event: events.Event) -> None:
        by.append(threading.current_thread().name)
        told.append(event)

    metrics, loss, held = DeferredMetrics(thread), torch.tensor(2.0), threading.Event()
    with subscribed(listen):
        thread.submit(held.wait)
        metrics.log(3, {"loss": loss})
        assert told == []
        loss.fill_(7.0)
        held.set()
        metrics.finish()
    assert [dict(event.values) for event in told] == [{"loss": 2.0}]
    assert by == ["gossamer-comm"]


@pytest.mark.usefixtures("_elsewhere")
def test_metrics_after_close_are_logged_immediately(thread: CommThread) -> None:
    thread.close()
    with heard(events.Logged) as told:
        DeferredMetrics(thread).log(1, {"loss": torch.tensor(2.0)})
        assert [dict(event.values) for event in told] == [{"loss": 2.0}]


def test_an_invalid_number_is_refused_at_once(thread: CommThread) -> None:
    with pytest.raises(TypeError, match=r"session\.log\(loss=loss\.mean\(\)\)"):
        DeferredMetrics(thread).log(1, {"loss": torch.ones(2, device="meta")})


@pytest.mark.usefixtures("_elsewhere")
def test_an_invalid_number_next_to_one_on_a_gpu_is_refused_at_once(thread: CommThread) -> None:
    with heard(events.Logged) as told, pytest.raises(TypeError, match=r"session\.log\(accuracy=\.\.\.\) got None"):
        DeferredMetrics(thread).log(1, {"loss": torch.tensor(2.0), "accuracy": None})  # type: ignore[dict-item]
    assert thread.submit(lambda: "alive").wait() == "alive"
    assert told == []
