"""Local steps: counts backward passes between sync rounds, and reports what each step of the optimizer took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto

from gossamer.reducer.backward_hooks import BackwardMonitor, drop_nonfinite_gradients
from gossamer.reducer.bucket import Bucket
from gossamer.synchronizers.base import LoopControls, LoopState


class StepPhase(Enum):
    """Where this rank stands between two steps of its optimizer."""

    WAITING = auto()  # no backward pass was counted since the last step
    COUNTED = auto()  # one was, and the optimizer has not made its step
    IN_CLOSURE = auto()  # a step goes on whose closure computes gradients: its passes count as one, after it
    COUNTED_IN_CLOSURE = auto()  # the same, and a pass before it was counted


class LocalSteps:
    """Counts backward passes of a rank that trains its own parameters, and adds up what its steps took.

    count: called once per step, or per backward pass where there are several before one step; on_pass: called instead
    when a backward pass is over.
    """

    def __init__(
        self,
        controls: LoopControls,
        loop: LoopState,
        rank: int,
        buckets: Sequence[Bucket],
        count: Callable[[], None],
        on_pass: Callable[[], None] | None = None,
    ) -> None:
        self._controls, self._loop, self._rank, self._buckets = controls, loop, rank, buckets
        self._count, self._on_pass = count, on_pass or count
        self.phase = StepPhase.WAITING
        self._skipped, self._waited = False, 0.0
        self._costs: dict[str, float] = {}
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters.values()]
        self._monitor = BackwardMonitor(parameters, self._pass_over)

    def _pass_over(self) -> None:
        if not self._controls.muted and self.phase in (StepPhase.WAITING, StepPhase.COUNTED):
            self._on_pass()
            self.phase = StepPhase.COUNTED

    @property
    def counted(self) -> bool:
        return self.phase in (StepPhase.COUNTED, StepPhase.COUNTED_IN_CLOSURE)

    def count_missed_pass(self) -> None:
        """Count one where none was counted before the optimizer's step."""
        if not self.counted:
            self._count()
            self.phase = StepPhase.COUNTED

    def rest(self) -> None:
        """What comes next is a new step."""
        self.phase = StepPhase.WAITING

    def before_step(self, *, closure: bool) -> None:
        if closure:
            self.phase = StepPhase.COUNTED_IN_CLOSURE if self.counted else StepPhase.IN_CLOSURE

    def after_step(self) -> None:
        self.count_missed_pass()  # the step had no backward pass of its own, or many within it
        self.rest()

    def drop_nonfinite(self) -> None:
        """Take all gradients away where one is not finite. Other ranks do not hear of it: what is local stays local."""
        name = drop_nonfinite_gradients(self._buckets)
        self.add(name is not None, {})
        self._loop.guarded(None if name is None else (self._rank, name))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block the training thread waits."""
        asked = time.perf_counter()
        yield
        self._waited += time.perf_counter() - asked

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
