"""Vectorized training: SGD steps of many devices in one vmapped call.

Devices are rows of one matrix. Each iteration takes the most common shape of the next batches, and all devices
with this shape make a step together. There is no padding, and every device makes exactly its own steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from gossamer.algorithms.strategies.federated_rules import FederatedStrategy, LocalWork
from gossamer.base.layout import Slot
from gossamer.errors import LoopError
from gossamer.federated.client.functions import STEPS, ClientFunction, SGDSteps, StepsFunction, checked_steps
from gossamer.federated.client.local_training import TrainingCheck, round_of
from gossamer.federated.client.script import Train, Trained
from gossamer.federated.model_state import ModelState
from gossamer.federated.virtual.training import DeviceTraining, OneByOne, device_named, seed_everything

MOST_TOGETHER = 64  # larger groups save little time and need more memory


def why_not_vectorized(model: nn.Module, state: ModelState) -> str:
    """Reason why a model cannot be vectorized; else empty."""
    if state.parameters < len(state.layout):
        return f"the model averages {state.layout.names[state.parameters]}, which every device must have separately"
    if any(each.dtype != state.dtype for each in state.tensors(model).values()):
        return f"the model's parameters are not all {state.dtype}"
    return ""


class ManyAtOnce(DeviceTraining):
    """Trains up to `most` devices in one call, for a function that returns SGDSteps."""

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        strategy: FederatedStrategy,
        function: StepsFunction,
        most: int = MOST_TOGETHER,
    ) -> None:
        """model: one that can be vectorized, see `why_not_vectorized`."""
        self._model, self._state, self._strategy, self._function, self._most = model, state, strategy, function, most
        self._device = next(model.parameters()).device
        self._queued: dict[int, tuple[Train, SGDSteps]] = {}  # by client, until it is trained
        self._check = TrainingCheck(strategy)

    @property
    def description(self) -> str:
        return f"up to {self._most} in one call"

    def fewest_steps(self, op: Train) -> int:
        steps = self._steps(op)
        self._queued[op.client] = op, steps
        return len(steps.batches)

    @property
    def most_together(self) -> int | None:
        return self._most

    def forget(self, op: Train) -> None:
        self._queued.pop(op.client, None)

    def train(self, ops: Sequence[Train]) -> Iterator[Trained]:
        for begin in range(0, len(ops), self._most):
            some = ops[begin : begin + self._most]
            crowd = [_Member(op, self._take(op)) for op in some]
            alike: dict[Hashable, list[_Member]] = {}
            for member in crowd:
                alike.setdefault(member.steps.loss, []).append(member)
            for members in alike.values():
                self._train(members)
            yield from (member.trained() for member in crowd)

    def _steps(self, op: Train) -> SGDSteps:
        seed_everything(op.task.seed)
        metrics_of = round_of(op, self._strategy)
        with device_named(op):
            steps = checked_steps(self._function(self._model, metrics_of), op.client)
            work = LocalWork(samples=steps.samples, steps=len(steps.batches))
            return replace(steps, samples=self._check.samples(metrics_of, work, touched=False))

    def _take(self, op: Train) -> SGDSteps:
        known, steps = self._queued.pop(op.client, (None, None))
        return steps if known is op and steps is not None else self._steps(op)

    def _check_momentum(self, members: Sequence[_Member]) -> None:
        why = self._strategy.why_plain_sgd
        for member in members if why is not None else ():
            if member.steps.momentum:
                raise LoopError(f"{why}, but client {member.op.client} has momentum. Write SGDSteps(momentum=0.0).")

    def _train(self, members: Sequence[_Member]) -> None:
        """Train devices with the same loss function."""
        self._check_momentum(members)
        self._model.train()
        crowd = _Crowd(self._model, self._state, self._strategy, members, self._device)
        left = set(range(len(members)))
        while left := {row for row in left if not members[row].done}:
            shape = max(Counter(members[row].next_shape for row in left).items(), key=_commonest)[0]
            try:
                crowd.step([row for row in sorted(left) if members[row].next_shape == shape])
            except RuntimeError as error:
                raise LoopError(
                    f"The loss of {members[0].steps.loss!r} cannot be computed for many devices at once ({error}). It "
                    "must be a pure function of the model and a batch: no dropout or other draws, no .item(), no "
                    "branch on a tensor's value. Otherwise mark the function with @gossamer.federated.client alone, "
                    "and train in a loop."
                ) from error
        for member, flat in zip(members, crowd.rows.cpu().unbind(), strict=True):
            member.flat = flat


def _commonest(counted: tuple[Any, int]) -> tuple[int, str]:
    shape, number = counted
    return number, str(shape)  # break ties by the text, deterministically


@dataclass
class _Member:
    """One device of a group that is trained together."""

    op: Train
    steps: SGDSteps
    taken: int = 0
    losses: list[float] = field(default_factory=list)
    flat: Tensor | None = None

    @property
    def done(self) -> bool:
        return self.taken == len(self.steps.batches)

    @property
    def next_shape(self) -> Hashable:
        return tuple((tensor.shape, tensor.dtype) for tensor in self.steps.batches[self.taken])

    def trained(self) -> Trained:
        assert self.flat is not None
        count = len(self.steps.batches)
        work = LocalWork(
            samples=self.steps.samples, steps=count, learning_rate=self.steps.learning_rate if count else 0.0
        )
        return Trained(flat=self.flat, work=work, metrics=self.steps.metrics_with_loss(self.losses))


class _Crowd:
    """Devices as rows: parameters (k, n), momentum (k, n)."""

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        strategy: FederatedStrategy,
        members: Sequence[_Member],
        device: torch.device,
    ) -> None:
        self._slots, self._strategy, self._members = state.layout.slots, strategy, members
        self.rows = torch.stack([member.op.anchor for member in members]).to(device)
        self._rates = _column([member.steps.learning_rate for member in members], self.rows)
        self._momenta = _column([member.steps.momentum for member in members], self.rows)
        self._velocity = torch.zeros_like(self.rows) if bool(self._momenta.any()) else None
        self._gradients = _vectorized_gradients(model, members[0].steps.loss)
        self._fixed: dict[str, Any] = {}
        if strategy.changes_gradients:
            self._fixed = {
                "anchor": self.rows.clone(),
                "shared": {key: _stacked(members, "shared", key, device) for key in members[0].op.shared},
                "memory": {key: _stacked(members, "memory", key, device) for key in members[0].op.memory},
            }

    def step(self, who: Sequence[int]) -> None:
        """One step of these rows, which have next batches of the same shape."""
        everyone = len(who) == len(self.rows)
        at = torch.tensor(who, device=self.rows.device)
        rows = self.rows if everyone else self.rows[at]
        some = [self._members[row] for row in who]
        batches = zip(*(member.steps.batches[member.taken] for member in some), strict=True)
        parameters = {slot.name: _view(rows, slot) for slot in self._slots}
        found, losses = self._gradients(parameters, *(torch.stack(each) for each in batches))
        gradients = torch.empty_like(rows)
        for slot in self._slots:
            _view(gradients, slot).copy_(found[slot.name])
        if self._fixed:
            self._correct(gradients, rows, at)
        if self._velocity is not None:
            gradients = self._velocity[at].mul_(self._momenta[at]).add_(gradients)
            self._velocity[at] = gradients
        rows.sub_(gradients.mul(self._rates[at]))
        if not everyone:
            self.rows[at] = rows
        for member, loss in zip(some, losses.tolist(), strict=True):
            member.losses.append(loss)
            member.taken += 1

    def _correct(self, gradients: Tensor, rows: Tensor, at: Tensor) -> None:
        """Apply the strategy's correction in place, one parameter at a time for all devices."""
        for slot in self._slots:
            here = slice(slot.offset, slot.end)
            anchor = self._fixed["anchor"][at, here]
            shared, memory = (
                {key: each[at, here] for key, each in self._fixed[kind].items()} for kind in ("shared", "memory")
            )
            changed = vmap(self._corrected)(gradients[:, here], rows[:, here], anchor, shared, memory)
            gradients[:, here] = changed

    def _corrected(self, gradient: Tensor, parameters: Tensor, anchor: Tensor, shared: Any, memory: Any) -> Tensor:
        gradient = gradient.clone()
        self._strategy.correct(gradient, parameters, anchor, shared, memory)
        return gradient


class _Loss(nn.Module):
    """A loss as a module, for functional_call."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.model, *batch)


def _vectorized_gradients(model: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """(parameters with a leading device axis, batches with one) -> (gradients, losses)."""
    module = _Loss(model, loss)

    def metrics_of(parameters: dict[str, Tensor], *batch: Tensor) -> Tensor:
        found: Tensor = functional_call(module, {f"model.{name}": each for name, each in parameters.items()}, batch)
        return found

    return vmap(grad_and_value(metrics_of), randomness="error")


def _view(rows: Tensor, slot: Slot) -> Tensor:
    """One parameter of every row: (k, *shape)."""
    return rows.as_strided(
        (len(rows), *slot.shape), (rows.stride(0), *slot.stride), rows.storage_offset() + slot.offset
    )


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).unsqueeze(1)


def _stacked(members: Sequence[_Member], kind: str, key: str, device: torch.device) -> Tensor:
    return torch.stack([getattr(member.op, kind)[key] for member in members]).to(device)


def training_of(
    function: ClientFunction, model: nn.Module, state: ModelState, strategy: FederatedStrategy
) -> DeviceTraining:
    steps = getattr(function, STEPS, None)
    if steps is None:
        return OneByOne(model, state, strategy, function)
    why = why_not_vectorized(model, state)
    return OneByOne(model, state, strategy, function, why) if why else ManyAtOnce(model, state, strategy, steps)
