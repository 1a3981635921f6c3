"""Training of simulated devices: answers the Train ops of a round, each with its own seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy
import torch
from torch import Tensor, nn

from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.events import notice
from gossamer.federated.client.functions import ClientFunction
from gossamer.federated.client.local_training import Trainer
from gossamer.federated.client.script import Train, Trained
from gossamer.federated.model_state import ModelState


def seed_everything(seed: int) -> None:
    """Seed the global generators, which the user's function may use."""
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators at the end."""
    kept = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        numpy.random.set_state(kept[2])


class DeviceTraining(Protocol):
    """Trains devices. The result of a device does not depend on the order or grouping of devices."""

    @property
    def description(self) -> str:
        """A few words that follow "devices train"."""

    def fewest_steps(self, op: Train) -> int:
        """Lower bound of the steps of this training, known in advance."""
        return 0

    @property
    def most_together(self) -> int | None:
        """Devices per call, if results depend on their grouping by rounding; None: devices are independent."""
        return None

    def forget(self, op: Train) -> None:
        """Cancel a training."""
        return None

    def train(self, ops: Sequence[Train]) -> Iterator[Trained]:
        """Train in the order of the ops. Exceptions of the user's function have a note with the device and round."""


class OneByOne(DeviceTraining):
    """Trains one device after another, by the user's loop."""

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        strategy: FederatedStrategy,
        function: ClientFunction,
        why: str = "",
    ) -> None:
        """why: reason why a faster way was not used."""
        self._trainer = Trainer(model, state, strategy, function)
        self._model, self._why = model, why
        self._counters = _counters(model, state)

    @property
    def description(self) -> str:
        return f"one after another{self._why and f' ({self._why})'}"

    def train(self, ops: Sequence[Train]) -> Iterator[Trained]:
        for op in ops:
            seed_everything(op.task.seed)
            self._model.zero_grad(set_to_none=True)  # clear gradients of the previous device
            for buffer, first in self._counters:
                buffer.copy_(first)
            with device_named(op):
                trained = self._trainer(op)
            yield trained


@contextmanager
def device_named(op: Train) -> Iterator[None]:
    """Add the device and the round to exceptions of the user's function, as a note, and as a notice for programs that
    print no notes."""
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
    """Buffers that are not averaged, with their initial values: every device starts with these."""
    travels = set(state.layout.names)
    return [(each, each.clone()) for name, each in model.named_buffers() if name not in travels]
