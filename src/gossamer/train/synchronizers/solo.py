"""Solo synchronizer: plain training in a world of one, bit for bit; counts steps and sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import StepCosts
from gossamer.train.engine.report import Presence
from gossamer.train.synchronizers.base import NamedState, Synchronizer


class SoloSynchronizer(Synchronizer):
    """Counts the optimizer's steps and reports each to `ended`; has no bucket, no state and no other rank."""

    in_step = False  # with no other rank that could have missed a step

    def __init__(self, ended: Callable[[bool, StepCosts], None]) -> None:
        super().__init__()
        self._ended = ended

    @property
    def buckets(self) -> Sequence[Bucket]:
        return ()

    def before_step(self, *, closure: bool) -> None:
        pass

    def after_step(self) -> None:
        self.step += 1
        self._ended(False, {})
        self.stopping = self.asked_to_stop

    def end_epoch(self) -> int:
        return 0

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        pass

    def remembered(self) -> NamedState:
        return {}

    def progress(self) -> dict[str, Any]:
        return {}

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.begin_at(progress["step"])  # progress of several workers, folded

    def close(self) -> None:
        pass
