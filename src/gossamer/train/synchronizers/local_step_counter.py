"""Local step counter: counts the optimizer's steps between sync rounds, and reports what each of them took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from itertools import groupby
from math import inf
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind
from gossamer.comm.runtime.comm_thread import CommThread, Work
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.report import unchanged
from gossamer.train.engine.sparse_gradients import entries
from gossamer.train.engine.torch_hooks import LoopControls, drop_gradients, nonfinite_gradient


class StepPhase(Enum):
    """Where this rank stands between two steps of its optimizer."""

    WAITING = auto()  # the next step was not counted yet
    COUNTED = auto()  # it was, and the optimizer has not made it
    IN_CLOSURE = auto()  # it goes on, with a closure that computes gradients: it counts when it is over


class LocalStepCounter:
    """Counts the optimizer's steps of a rank that trains its own parameters, and adds up what they took.

    A step counts once, however many backward passes come before it; a pass that no step uses does not count.
    count: called once per step, before the optimizer uses the gradients where it can. in_backward: called when a
    backward pass is over instead, which must be the only one before its step. comm_thread: reads what only a GPU knows.
    """

    def __init__(
        self,
        controls: LoopControls,
        loop: LoopState,
        rank: int,
        buckets: Sequence[Bucket],
        count: Callable[[], None],
        *,
        in_backward: bool = False,
        comm_thread: CommThread | None = None,
    ) -> None:
        self._controls, self._loop, self._rank, self._buckets = controls, loop, rank, buckets
        self._count, self._in_backward = count, in_backward
        self.phase = StepPhase.WAITING
        self._weight: float | None = None  # of the passes since the last step
        self._skipped, self._waited = False, 0.0
        self._costs: dict[str, float] = {}
        parameters = {name: parameter for bucket in buckets for name, parameter in bucket.parameters.items()}
        self._monitor = loop.gradients(parameters, self._pass_over)
        there = comm_thread is not None and loop.agree is unchanged and SilencedGradients.serves(parameters)
        self._silenced = SilencedGradients(parameters, comm_thread) if there and comm_thread is not None else None

    def _pass_over(self) -> None:
        if self._controls.muted or self.phase is StepPhase.IN_CLOSURE:
            return
        self._weight = (self._weight or 0.0) + self._controls.weight
        if self._in_backward:
            self._count()
            self.phase = StepPhase.COUNTED

    @property
    def counted(self) -> bool:
        return self.phase is StepPhase.COUNTED

    @property
    def between_steps(self) -> bool:
        """Whether no backward pass was made since the last step."""
        return self.phase is StepPhase.WAITING and self._weight is None

    def take_weight(self) -> float:
        """The weight of all samples of the step that is counted now."""
        weight, self._weight = self._weight, None
        return self._controls.weight if weight is None else weight

    def count_once(self) -> None:
        """Count the step that is about to be made, or was, unless it was counted."""
        if not self.counted:
            self._count()
            self.phase = StepPhase.COUNTED

    def rest(self) -> None:
        """What comes next is a new step."""
        self.phase, self._weight = StepPhase.WAITING, None

    def before_step(self, *, closure: bool) -> None:
        if closure:
            self.phase = StepPhase.IN_CLOSURE
        else:
            self.count_once()

    def after_step(self) -> None:
        self.count_once()
        self.rest()

    def drop_nonfinite(self) -> None:
        """Take all gradients away where one is not finite, here or in another part of this replica of the model. Other
        replicas do not hear of it: what is local stays local. On a GPU they become zeros, and it is told later."""
        if self._silenced is not None:
            self._silenced.silence()
            self._tell_earlier(self._silenced.told())
            return
        name = nonfinite_gradient(self._buckets)
        blame = self._loop.agree(None if name is None else (self._rank, name))
        if blame is not None:
            drop_gradients(self._buckets)
        self.add(blame is not None, {})
        self._loop.judged("pass", blame)

    def _tell_earlier(self, found: Iterable[str | None]) -> None:
        for name in found:
            self.add(name is not None, {})
            self._loop.judged("earlier pass", None if name is None else (self._rank, name))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block the training thread waits."""
        asked = time.perf_counter()
        yield
        answered = time.perf_counter()
        self._waited += answered - asked
        if active.recorder is not None:
            active.recorder.add(SpanKind.WAITING, asked, answered)

    def add(self, skipped: bool, costs: Mapping[str, float]) -> None:
        """Count something as part of the step that is reported next."""
        self._skipped = self._skipped or skipped
        for name, value in costs.items():
            self._costs[name] = self._costs.get(name, 0) + value

    def report(self) -> None:
        """A step is over."""
        costs = {"waiting_seconds": self._waited, **self._costs}
        skipped, self._waited, self._costs, self._skipped = self._skipped, 0.0, {}, False
        self._loop.ended(skipped, costs)

    def close(self) -> None:
        self._monitor.close()


# -- gradients on a GPU that are not finite ----------------------------------------------------------------------------

# An optimizer without gradients does nothing, but to take them away the host has to know first, and it would wait for
# the GPU in every step. So all become zeros on the GPU: momentum continues for a step, weight decay as well, and no
# parameter is spoiled. The communication thread, whose stream may wait, reads which one it was.


def silence(gradients: Sequence[Tensor]) -> Tensor:
    """Fill all gradients with zeros if one holds a NaN or an infinity; which ones did: (gradients,) of bool, on the
    first one's device. The host waits for nothing, and one device for another."""
    first = gradients[0].device
    by_device = groupby(torch._foreach_norm(list(gradients), inf), attrgetter("device"))  # as layers mostly lie
    largest = [torch.stack([each.float() for each in norms]).to(first) for _, norms in by_device]
    spoiled = torch.cat(largest).isfinite().logical_not()
    any_spoiled = {device: spoiled.any().to(device) for device in {gradient.device for gradient in gradients}}
    for gradient in gradients:
        gradient.masked_fill_(any_spoiled[gradient.device], 0)
    return spoiled


class SilencedGradients:
    """The gradients of `parameters`, by name, which lie on GPUs."""

    def __init__(self, parameters: Mapping[str, Parameter], comm_thread: CommThread) -> None:
        self._parameters, self._comm_thread = parameters, comm_thread
        self._found: deque[Work[str | None]] = deque()  # by step

    @staticmethod
    def serves(parameters: Mapping[str, Parameter]) -> bool:
        """Whether all lie on devices of one kind, which is not the host's memory: no copy between them waits for it."""
        kinds = {parameter.device.type for parameter in parameters.values()}
        return len(kinds) == 1 and kinds.isdisjoint(("cpu", "meta"))

    @torch.no_grad()
    def silence(self) -> None:
        """A step is about to use them."""
        graded = {name: entries(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        held = {name: numbers for name, numbers in graded.items() if numbers.numel()}
        if held:
            spoiled = silence(list(held.values()))
            self._found.append(self._comm_thread.submit(partial(_first, list(held), spoiled)))

    def told(self) -> Iterator[str | None]:
        """For each of the steps that are known by now and were not told, in order: the name of the first gradient that
        was not finite, or None."""
        while self._found and self._found[0].is_done:
            yield self._found.popleft().wait()


def _first(names: Sequence[str], spoiled: Tensor) -> str | None:
    return next((name for name, found in zip(names, spoiled.tolist(), strict=True) if found), None)
