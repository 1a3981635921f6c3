"""Graph capture: a session refuses to be recorded into a CUDA graph, with the line to write instead."""

from __future__ import annotations

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, loss_of, network, parameters

from gossamer.errors import LoopError
from gossamer.train.engine.autograd_hooks import refuse_capture
from gossamer.train.session import step_hooks

RECIPES = ["Dense()", "TopK(0.1)", "LocalSGD(period=2)", "EveryStep(delay=1)", "Gossip()"]


def records(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had used a GPU, and its stream recorded a graph."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_nothing_is_asked_where_no_gpu_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("a build for processors fails"))
    refuse_capture("loss.backward()")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recorded_backward_is_refused_at_its_first_gradient(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(worker: Worker) -> None:
        model, _, _ = worker.start(network(0), sgd, recipe)
        before = parameters(model)
        with pytest.raises(LoopError, match=r"around loss\.backward\(\).*make_graphed_callables\(model, \(inputs,\)\)"):
            loss_of(model, 0, worker.rank).backward()
        assert torch.equal(parameters(model), before)

    with monkeypatch.context() as patch:
        records(patch)
        cluster(work, 2)


def test_a_recorded_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(worker: Worker) -> None:
        _, optimizer, _ = worker.start(network(0), sgd, "LocalSGD(period=2)")
        with pytest.raises(LoopError, match=r"around optimizer\.step\(\)"):
            optimizer.step()

    records(monkeypatch)
    cluster(work, 2)


def test_the_check_catches_a_session_that_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_hooks, "refuse_capture", lambda what: None)
    with pytest.raises(pytest.fail.Exception):
        test_a_recorded_step_is_refused(monkeypatch)
