"""Ray training: trains the devices of a round as Ray tasks on a cluster, with the same bits as local training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from math import ceil
from typing import Any

import torch
from torch import nn

from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.errors import LoopError
from gossamer.federated.client.functions import ClientFunction
from gossamer.federated.client.script import Train, Trained
from gossamer.federated.model_state import ModelState
from gossamer.federated.virtual.training import DeviceTraining
from gossamer.federated.virtual.vectorized_training import training_of


class RayTraining(DeviceTraining):
    """Trains devices as Ray tasks.

    Devices of one vectorized call are one task; otherwise devices are divided over all cores. The function, its data
    and the model are sent once. A task uses as many torch threads as the local engine, since the number of threads
    determines the order of long sums.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        strategy: FederatedStrategy,
        function: ClientFunction,
        threads: int = 1,
    ) -> None:
        """Raises LoopError if Ray is not installed."""
        self._ray = _ray()
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False, include_dashboard=False)
        self._here = training_of(function, model, state, strategy)
        bundle = (model, state, strategy, function, threads)
        self._bundle = self._ray.put(_pickled(bundle, function))
        self._task = self._ray.remote(_train_some)
        self._cores = max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    @property
    def description(self) -> str:
        return f"{self._here.description}, as tasks of Ray on {self._cores} cores"

    @property
    def most_together(self) -> int | None:
        return self._here.most_together

    def fewest_steps(self, op: Train) -> int:
        return self._here.fewest_steps(op)

    def forget(self, op: Train) -> None:
        self._here.forget(op)

    def train(self, ops: Sequence[Train]) -> Iterator[Trained]:
        size = self.most_together or ceil(len(ops) / self._cores)
        for op in ops:
            self._here.forget(op)
        tasks = [self._task.remote(self._bundle, ops[begin : begin + size]) for begin in range(0, len(ops), size)]
        for task in tasks:
            yield from self._ray.get(task)


def _ray() -> Any:
    try:
        return import_module("ray")
    except ModuleNotFoundError:
        raise LoopError(
            "Ray is not installed, so it cannot train devices. Install it: pip install 'gossamer[ray]'; or "
            'leave engine at "local", which gives the same bits.'
        ) from None


def _pickled(bundle: Any, function: ClientFunction) -> bytes:
    """Pickle the bundle, by value if the function's script was not imported as a module."""
    cloudpickle, module = import_module("ray.cloudpickle"), sys.modules.get(function.__module__)
    if module is not None and module.__spec__ is None:
        cloudpickle.register_pickle_by_value(module)
    found: bytes = cloudpickle.dumps(bundle)
    return found


_AT_HAND: dict[bytes, DeviceTraining] = {}  # in a Ray process: training of the last federation


def _train_some(bundle: bytes, ops: Sequence[Train]) -> list[Trained]:
    """Train some devices in a Ray process."""
    if bundle not in _AT_HAND:
        model, state, strategy, function, threads = import_module("ray.cloudpickle").loads(bundle)
        torch.set_num_threads(threads)
        _AT_HAND.clear()
        _AT_HAND[bundle] = training_of(function, model, state, strategy)
    return [_own(trained) for trained in _AT_HAND[bundle].train(ops)]


def _own(trained: Trained) -> Trained:
    """Copy the result, since a row of a matrix would be pickled with the whole matrix."""
    return replace(trained, flat=trained.flat.clone())
