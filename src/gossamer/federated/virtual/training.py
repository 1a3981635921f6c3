"""Training of simulated devices: answers the Trains of a round, each with its own seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy
import torch
from torch import Tensor, nn

from gossamer.algorithms.strategies.federated import FederatedStrategy
from gossamer.events import notice
from gossamer.federated.client.functions import ClientFunction
from gossamer.federated.client.local_training import Trainer
from gossamer.federated.client.script import Train, Trained
from gossamer.federated.model_state import ModelState


def seed_everything(seed: int) -> None:
    """Seed the global generators, which a user's function may draw from."""
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the global generators afterwards as they were before."""
    kept = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        numpy.random.set_state(kept[2])


class DeviceTraining(Protocol):
    """Trains devices. Who is trained together, or before whom, does not matter to a device."""

    @property
    def description(self) -> str:
        """How, in a few words that follow "devices train"."""

    def fewest_steps(self, op: Train) -> int:
        """Steps that it takes at least, known before it was trained."""
        return 0

    @property
    def most_together(self) -> int | None:
        """How many in one call, whose results depend on each other by rounding; None: each is by itself."""
        return None

    def forget(self, op: Train) -> None:
        """It is not to be trained after all."""
        return None

    def train(self, ops: Sequence[Train]) -> Iterator[Trained]:
        """In the order of the ops. What the user's function raises carries a note with the device and the round."""


class OneByOne(DeviceTraining):
    """One device after another, by the user's own loop."""

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        strategy: FederatedStrategy,
        function: ClientFunction,
        why: str = "",
    ) -> None:
        """why: no better way was taken."""
        self._trainer = Trainer(model, state, strategy, function)
        self._model, self._why = model, why
        self._counters = _counters(model, state)

    @property
    def description(self) -> str:
        return f"one after another{self._why and f' ({self._why})'}"

    def train(self, ops: Sequence[Train]) -> Iterator[Trained]:
        for op in ops:
            seed_everything(op.task.seed)
            self._model.zero_grad(set_to_none=True)  # gradients of the device before, for loops that clear them late
            for buffer, first in self._counters:
                buffer.copy_(first)
            with device_named(op):
                trained = self._trainer(op)
            yield trained


@contextmanager
def device_named(op: Train) -> Iterator[None]:
    """Name the device and the round where the user's function raises, in a note and, for programs that show no notes,
    in a notice."""
    try:
        yield
    except Exception as error:
        error.add_note(f"It was client {op.client} in round {op.task.round}, in virtual time.")
        notice(
            f"The client function raised {type(error).__name__} for client {op.client} in round {op.task.round}, and "
            f"the simulation ends: {str(error)[:200]}"
        )
        raise


def _counters(model: nn.Module, state: ModelState) -> list[tuple[Tensor, Tensor]]:
    """Buffers that do not travel, and what each was at first: every device begins with its own."""
    travels = set(state.layout.names)
    return [(each, each.clone()) for name, each in model.named_buffers() if name not in travels]
