"""Delayed gradients: the optimizer uses the mean gradient of some steps ago, which is exchanged during training."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import LoopError
from gossamer.train.engine.averaged_state import AveragedState
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.step_decision import Flags, Presence
from gossamer.train.synchronizers.in_flight import InFlightRound, RoundResult, RoundTask, taken_along


class DelayedGradients(RoundTask):
    """Offers the gradients of every backward pass, and replaces them by the mean of an earlier pass."""

    in_backward = keeps_alike = True

    def __init__(self, buckets: Sequence[Bucket], loop: LoopState) -> None:
        self._buckets, self._loop = buckets, loop
        self._names = [name for bucket in buckets for name in bucket.layout.names]

    def check_pass(self, *, counted: bool) -> None:
        for begin in self._loop.extensions.pass_began:
            begin()
        if counted:
            raise LoopError(
                "a second backward() before optimizer.step() would send the mean that arrived with the first one "
                "again, added to its own gradients. Accumulate with `with session.no_sync():` around all but the last "
                "backward(), or use EveryStep(accumulate=...). Also write it around a backward() with discarded "
                "gradients, such as a GAN generator's pass for the discriminator; without a step after it, the first "
                "backward() was such a pass."
            )

    def check_step(self, *, closure: bool) -> None:
        if closure:
            raise LoopError(
                "delayed gradients are those of an earlier step, but a closure computes gradients for immediate use. "
                "Use EveryStep() with such an optimizer."
            )

    @torch.no_grad()
    def offer(self, bucket: Bucket, presence: Presence) -> Tensor:
        """A copy, since several may be in flight, and the loss scale may change before they land."""
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

    def averaged_state(self, number: int, landed: InFlightRound | None = None) -> AveragedState:
        return AveragedState.of(taken_along(self._loop.averaged(), landed))

    def used(self, buckets: Sequence[Bucket], presence: Presence) -> Flags:
        graded = [p.grad is not None for bucket in buckets for p in bucket.parameters.values()]
        return np.array(graded) & (presence == Presence.TRAINING)

    def apply(self, landed: InFlightRound, result: RoundResult) -> None:
        used = {name for name, was_used in zip(self._names, result.used, strict=True) if was_used}
        self._show([mean.mul_(self._loop.scale() or 1.0) for mean in result.means], used)
        if result.averaged_state is not None:
            self.averaged_state(landed.number, landed).replace(result.averaged_state, 0.0, landed.sent)

    def revert(self, landed: InFlightRound) -> None:
        self.nothing_landed()

    def nothing_landed(self) -> None:
        """Make no step on any rank. A GradScaler needs infinite gradients for that; it rejects missing ones."""
        infinite = [torch.full_like(bucket.flat, torch.inf) for bucket in self._buckets]
        self._show(infinite, set(self._names) if self._loop.scale() is not None else set())

    def _show(self, flats: Sequence[Tensor], used: Set[str]) -> None:
        """Write gradients. Optimizers skip parameters without a gradient, but not those with a gradient of zeros."""
        for place, bucket in enumerate(self._buckets):
            for slot in bucket.layout:
                bucket.parameters[slot.name].grad = slot.view(flats[place]) if slot.name in used else None

    def end_epoch(self, missed: int) -> int:
        self._show((), set())
        return missed
