"""Trainer: answers a device's Train by the user's function, with hooks on the optimizers that it makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.algorithms.strategies.federated import FederatedStrategy, LocalWork
from gossamer.base.peer_ops import PeerScript
from gossamer.errors import LoopError
from gossamer.federated.client.functions import ClientFunction, Round, Update
from gossamer.federated.client.local_training import LocalTraining
from gossamer.federated.client.script import ClientScript, Train, Trained
from gossamer.federated.client.training_check import TrainingCheck
from gossamer.federated.model_state import ModelState

Answer = Callable[[Train], Trained]


class Trainer:
    """Trains one model for any number of devices, one after another: a device is its data, and the model is given."""

    def __init__(
        self, model: nn.Module, state: ModelState, strategy: FederatedStrategy, function: ClientFunction
    ) -> None:
        self._model, self._state, self._strategy, self._function = model, state, strategy, function
        self._check = TrainingCheck(strategy)
        self._rounds_off = any(each.dtype != state.dtype for each in state.tensors(model).values())

    def __call__(self, op: Train) -> Trained:
        """Raises LoopError where the function returns no Update, or trains another model."""
        self._state.write(op.anchor, self._model)
        anchor = self._state.read(self._model).flat if self._rounds_off else op.anchor
        told = round_of(op, self._strategy)
        local = LocalTraining(self._strategy, self._state, self._model, anchor, op.shared, op.memory)
        began = time.perf_counter()
        self._model.train()
        with local.watching():
            update = self._function(self._model, told)
        if not isinstance(update, Update):
            raise LoopError(
                f"The client function returned {update!r} for client {op.client}, and a device has to tell how many "
                "samples it trained on. End it with `return gossamer.federated.Update(samples=len(data))`."
            )
        flat = self._state.read(self._model).flat
        work = LocalWork(samples=update.samples, steps=local.steps, learning_rate=local.learning_rate)
        return Trained(
            flat=flat,
            anchor=anchor if self._rounds_off else None,
            work=replace(work, samples=self._check.samples(told, work, self._touched(flat, anchor))),
            metrics=dict(update.metrics),
            seconds=time.perf_counter() - began,
        )

    def _touched(self, flat: Tensor, anchor: Tensor) -> bool:
        """A scaler of gradients may have skipped all steps."""
        return not torch.equal(flat, anchor) or any(each.grad is not None for each in self._model.parameters())


def round_of(op: Train, strategy: FederatedStrategy) -> Round:
    """What a device is told of its part."""
    return Round(
        index=op.task.round,
        client=op.client,
        config=op.task.config,
        seed=op.task.seed,
        local_steps=strategy.local_steps,
        local_epochs=strategy.epochs,
    )


def answered(script: ClientScript, train: Answer) -> PeerScript:
    """A device's script whose Train is answered here, so that any runner of peers can run it."""
    answer: Any = None
    try:
        while True:
            op = script.send(answer)
            answer = train(op) if isinstance(op, Train) else (yield op)
    except StopIteration as stop:
        return stop.value
