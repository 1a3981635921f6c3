"""Pipeline tuning in sessions: which depths are tried, the same on all ranks."""

from __future__ import annotations

import pytest
import torch
from support.virtual_workers import Worker, batch, cluster, network

from gossamer.comm.runtime.pipeline import DEPTH, FIRST_TRIAL, TRIAL_DEPTHS, Pipeline, PipelineTuner

FIRST = FIRST_TRIAL + len(TRIAL_DEPTHS)  # exchanges until the first comparison


def check_sessions_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """One window an exchange, on both ranks."""
    seen: list[int] = []
    honest = Pipeline.__init__

    def noted(self: Pipeline, window: int = DEPTH) -> None:
        seen.append(window)
        honest(self, window)

    monkeypatch.setattr(Pipeline, "__init__", noted)

    def work(worker: Worker) -> None:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.attach(model, optimizer, "PowerSGD(rank=2)")
        for step in range(FIRST):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    cluster(work, 2)
    assert seen[::2] == seen[1::2] == [2, 2, 2, 1, 2, 2, 1, 1, 2, 2, 1]


def test_sessions_try_both(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sessions_try(monkeypatch)


def test_a_session_that_forgets_what_it_tried_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineTuner, "ended", lambda self, seconds: None)
    with pytest.raises(AssertionError):
        check_sessions_try(monkeypatch)
