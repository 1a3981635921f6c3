"""Local step counter: counts optimizer steps between sync rounds and reports the costs of each step."""

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
from gossamer.train.engine.autograd_hooks import LoopControls, drop_gradients, nonfinite_gradient
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.sparse_gradients import entries
from gossamer.train.engine.step_decision import unchanged


class StepPhase(Enum):
    """Phase of this rank between two optimizer steps."""

    WAITING = auto()  # the next step is not counted
    COUNTED = auto()  # it is counted; the optimizer has not made it
    IN_CLOSURE = auto()  # it runs with a closure that computes gradients, and counts at its end


class LocalStepCounter:
    """Counts the optimizer steps of a rank that trains its own parameters, and sums their costs.

    A step counts once, regardless of the number of backward passes before it; a pass without a step does not count.

    Args:
        count: called once per step, if possible before the optimizer uses the gradients.
        in_backward: call `count` at the end of a backward pass instead, which must be the only one before its step.
        comm_thread: reads values that are known only on a GPU.
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
        """Total weight of the samples of the current step."""
        weight, self._weight = self._weight, None
        return self._controls.weight if weight is None else weight

    def count_once(self) -> None:
        """Count the current step unless it is counted already."""
        if not self.counted:
            self._count()
            self.phase = StepPhase.COUNTED

    def rest(self) -> None:
        """Prepare for a new step."""
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
        """Drop all gradients if one is not finite, here or in another part of this replica of the model.

        Other replicas are not informed, since the step is local. On a GPU the gradients become zeros, and the step is
        reported later.
        """
        if self._silenced is not None:
            self._silenced.silence()
            self._report_earlier(self._silenced.pending_reasons())
            return
        name = nonfinite_gradient(self._buckets)
        blame = self._loop.agree(None if name is None else (self._rank, name))
        if blame is not None:
            drop_gradients(self._buckets)
        self.add(blame is not None, {})
        self._loop.judged("pass", blame)

    def _report_earlier(self, found: Iterable[str | None]) -> None:
        for name in found:
            self.add(name is not None, {})
            self._loop.judged("earlier pass", None if name is None else (self._rank, name))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager that measures the time in which the training thread waits."""
        asked = time.perf_counter()
        yield
        answered = time.perf_counter()
        self._waited += answered - asked
        if active.recorder is not None:
            active.recorder.add(SpanKind.WAITING, asked, answered)

    def add(self, skipped: bool, costs: Mapping[str, float]) -> None:
        """Add costs to the step that is reported next."""
        self._skipped = self._skipped or skipped
        for name, value in costs.items():
            self._costs[name] = self._costs.get(name, 0) + value

    def report(self) -> None:
        """Report the end of a step."""
        costs = {"waiting_seconds": self._waited, **self._costs}
        skipped, self._waited, self._costs, self._skipped = self._skipped, 0.0, {}, False
        self._loop.ended(skipped, costs)

    def close(self) -> None:
        self._monitor.close()


# -- non-finite gradients on a GPU -------------------------------------------------------------------------------------

# An optimizer skips parameters without gradients, but to drop gradients the host must know of the failure, and would
# wait for the GPU in every step. Instead, all gradients are set to zero on the GPU. Momentum and weight decay continue
# for that step, and no parameter becomes NaN. The communication thread, whose stream may wait, reads the names of the
# gradients that were not finite.


def silence(gradients: Sequence[Tensor]) -> Tensor:
    """Fill all gradients with zeros if one holds a NaN or an infinity. Neither the host nor another device waits.

    Returns:
        Which gradients are not finite: (gradients,) of bool, on the device of the first one.
    """
    first = gradients[0].device
    by_device = groupby(torch._foreach_norm(list(gradients), inf), attrgetter("device"))  # layers are mostly grouped
    largest = [torch.stack([each.float() for each in norms]).to(first) for _, norms in by_device]
    spoiled = torch.cat(largest).isfinite().logical_not()
    any_spoiled = {device: spoiled.any().to(device) for device in {gradient.device for gradient in gradients}}
    for gradient in gradients:
        gradient.masked_fill_(any_spoiled[gradient.device], 0)
    return spoiled


class SilencedGradients:
    """Handles non-finite gradients of `parameters`, by name, on GPUs."""

    def __init__(self, parameters: Mapping[str, Parameter], comm_thread: CommThread) -> None:
        self._parameters, self._comm_thread = parameters, comm_thread
        self._found: deque[Work[str | None]] = deque()  # by step

    @staticmethod
    def serves(parameters: Mapping[str, Parameter]) -> bool:
        """Whether all parameters are on devices of one kind other than the CPU, so that no copy between them blocks."""
        kinds = {parameter.device.type for parameter in parameters.values()}
        return len(kinds) == 1 and kinds.isdisjoint(("cpu", "meta"))

    @torch.no_grad()
    def silence(self) -> None:
        """Replace non-finite gradients before a step uses them."""
        graded = {name: entries(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        held = {name: numbers for name, numbers in graded.items() if numbers.numel()}
        if held:
            spoiled = silence(list(held.values()))
            self._found.append(self._comm_thread.submit(partial(_first, list(held), spoiled)))

    def pending_reasons(self) -> Iterator[str | None]:
        """Yield one result per completed check, in order: the name of the first non-finite gradient, or None."""
        while self._found and self._found[0].is_done:
            yield self._found.popleft().wait()


def _first(names: Sequence[str], spoiled: Tensor) -> str | None:
    return next((name for name, found in zip(names, spoiled.tolist(), strict=True) if found), None)
