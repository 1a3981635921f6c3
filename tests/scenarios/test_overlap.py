"""Communication hides behind the backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.forwarding import ForwardingTransport
from support.sessions import sgd
from support.virtual_workers import Worker, batch, cluster, heard
from torch import Tensor, nn

from gossamer import events
from gossamer.base.ops import CollectiveOp
from gossamer.train.engine.bucket import assign_buckets


class Slow(ForwardingTransport):
    """Answers every op 50 ms late."""

    delay_seconds = 0.05

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        answered, due = self._inner.begin(op), time.perf_counter() + self.delay_seconds

        def wait() -> Any:
            time.sleep(max(0.0, due - time.perf_counter()))  # the link's delay, not a synchronisation
            return answered()

        return wait


class Pausing(torch.autograd.Function):
    """A layer whose backward takes 100 ms: twice an op's, since others use this machine, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.1)
        return grads[0]


def test_communication_hides_behind_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.train.synchronizers.stages.assign_buckets", partial(assign_buckets, bucket_bytes=1))
    buckets = 6

    def work(worker: Worker) -> None:
        layers = [nn.Linear(6, 6, bias=False).double() for _ in range(buckets)]
        model = nn.ModuleList(layers)
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            x, _ = batch(step, worker.rank)
            for layer in layers:
                x = layer(Pausing.apply(x.requires_grad_()))
            x.square().mean().backward()
            optimizer.step()

    with heard(events.StepEnded) as ended:
        cluster(work, 2, Slow)  # type: ignore[arg-type]
    waits = [event.waiting_seconds for event in ended if event.step > 1]
    # Of each step's ops, the first layer's cannot hide: it comes after backward. Another may arrive as late.
    fit = (buckets - 2) * Slow.delay_seconds
    hidden = [1 - (wait - 2 * Slow.delay_seconds) / fit for wait in waits]
    assert sorted(hidden)[len(hidden) // 2] >= 0.8, hidden
