"""Gradients that are used some steps after they were computed, and travel meanwhile."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import LoopError
from gossamer.reducer.averaged_state import AveragedState
from gossamer.reducer.bucket import Bucket
from gossamer.reducer.step_report import Flags, Presence
from gossamer.strategies import PeriodicSchedule
from gossamer.synchronizers.base import SyncContext
from gossamer.synchronizers.in_flight import Fragment, InFlightRound, RoundResult
from gossamer.synchronizers.scheduled import ScheduledSynchronizer


class DelayedGradients(ScheduledSynchronizer):
    """Offers the gradients of every backward pass, and puts the mean of earlier ones in their place."""

    def __init__(
        self,
        delay: int,
        buckets: Sequence[Bucket],
        context: SyncContext,
    ) -> None:
        super().__init__(PeriodicSchedule(1, delay=delay), [buckets], context)
        self._arrived = False

    def _count(self) -> None:
        self._loop.scale()  # a step that the scaler skipped is over, which shows in it
        if self._counted:
            raise LoopError(
                "a second backward() before optimizer.step() would send once more, among its own gradients, the mean "
                "that arrived with the first. Accumulate with `with session.no_sync():` around all but the last "
                "backward(), or use EveryStep(accumulate=...)."
            )
        super()._count()
        self._arrived = False
        self._boundary()
        if not self._arrived:
            self._show_nothing()

    @torch.no_grad()
    def _offer(self, bucket: Bucket, presence: Presence) -> Tensor:
        """A copy: more than one is under way, and the loss scale may have changed before it lands."""
        flat = torch.zeros_like(bucket.flat)
        pairs = [
            (slot.view(flat), parameter.grad)
            for slot in bucket.layout
            if (parameter := bucket.parameters[slot.name]).grad is not None and presence == Presence.TRAINING
        ]
        if pairs:
            views, gradients = zip(*pairs, strict=True)
            torch._foreach_copy_(views, gradients)
        return flat.div_(self._loop.scale() or 1.0)

    def _land(self, flight: InFlightRound, arrival: RoundResult) -> None:
        used = {name for name, someone in zip(self._fragments[0].names, arrival.used, strict=True) if someone}
        self._show([mean.mul_(self._loop.scale() or 1.0) for mean in arrival.means], used)
        self._arrived = True
        if arrival.averaged_state is not None:
            self._averaged_state(flight.turn.fragment).replace(arrival.averaged_state, 0.0)

    def _lost(self, flight: InFlightRound) -> None:
        self._show_nothing()
        self._arrived = True

    def _show_nothing(self) -> None:
        """Nobody makes a step; a GradScaler learns of it from gradients that are infinite, and refuses to find none."""
        infinite = [torch.full_like(bucket.flat, torch.inf) for bucket in self.buckets]
        self._show(infinite, set(self._fragments[0].names) if self._loop.scale() is not None else set())

    def _show(self, flats: Sequence[Tensor], used: Set[str]) -> None:
        """Unlike a gradient of zeros, none lets an optimizer do nothing."""
        for place, bucket in enumerate(self.buckets):
            for slot in bucket.layout:
                bucket.parameters[slot.name].grad = slot.view(flats[place]) if slot.name in used else None

    def _used(self, fragment: Fragment, presence: Presence) -> Flags:
        graded = [p.grad is not None for bucket in fragment.buckets for p in bucket.parameters.values()]
        return np.array(graded) & (presence == Presence.TRAINING)

    def _averaged_state(self, fragment: int) -> AveragedState:
        return AveragedState(self._loop.averaged())

    def before_step(self, *, closure: bool) -> None:
        if closure:
            raise LoopError(
                "gradients that arrive late are those of an earlier step, and a closure computes gradients that are "
                "used at once. Use EveryStep() with such an optimizer."
            )
        if not self._counted:
            self._count()  # no gradient hook fired here: the others wait for this rank

    def after_step(self) -> None:
        self._counted = False
        self._tell()

    def end_epoch(self) -> int:
        missed = super().end_epoch()
        self._show((), set())
        return missed
