"""Two ways of talking at once: gradients within a site in every step, parameters between all from time to time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gossamer.reducer.bucket import Bucket
from gossamer.reducer.step_report import Presence
from gossamer.strategies import AveragingStrategy
from gossamer.synchronizers.base import NonFiniteOrigin, SyncContext
from gossamer.synchronizers.gradients import GradientSynchronizer
from gossamer.synchronizers.parameter_averaging import ParameterAveraging


class HierarchicalLocalSGD(ParameterAveraging):
    """Merges among all workers, between which the workers of a site average their gradients by `inside`."""

    def __init__(
        self,
        inside: GradientSynchronizer,
        strategy: AveragingStrategy,
        fragments: Sequence[Sequence[Bucket]],
        optimizer: Optimizer,
        context: SyncContext,
        start: int = 0,
    ) -> None:
        self._inside = inside
        inside.tell_instead(self._add, self._judged_inside)
        super().__init__(strategy, fragments, optimizer, context, start, guards=False)

    def _judged_inside(self, blame: NonFiniteOrigin | None) -> None:
        """By the rank among all, not within the site."""
        if blame is not None and blame[0] is not None:
            first = self._transport.rank - self._inside.rank
            blame = first + blame[0], blame[1]
        self._loop.guarded(blame)

    @property
    def weight(self) -> float:
        return self._inside.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._inside.weight = weight

    @property
    def muted(self) -> bool:
        return self._inside.muted

    @muted.setter
    def muted(self, muted: bool) -> None:
        self._inside.muted = muted

    @property
    def touched(self) -> bool:
        return self._inside.touched

    def rest(self) -> None:
        self._inside.rest()

    def before_step(self, *, closure: bool) -> None:
        self._inside.before_step(closure=closure)
        super().before_step(closure=closure)

    def after_step(self) -> None:
        self._inside.after_step()
        super().after_step()

    def end_epoch(self) -> int:
        """A rank that is done keeps its site company first, and comes to everyone's turns along with it."""
        ended = self.step
        while not self.stopping and self._inside.finish(Presence.OUT_OF_DATA).verdict.active:
            self.step += 1
            self._boundary()
            self._tell()
        self._inside.rest()
        if self.step > max(ended, self._turn(self._number - 1).launch):
            self.step -= 1  # steps of its site are missing here since the last merge: one more brings all together
        return super().end_epoch()

    def meet_to_save(self) -> None:
        """The site first: whoever trains on waits for this rank there."""
        self._inside.meet_to_save()
        super().meet_to_save()

    def progress(self) -> dict[str, Any]:
        return {**super().progress(), "inside": self._inside.progress()}

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().resume(progress, remembered)
        self._inside.resume(progress["inside"], {})

    def close(self) -> None:
        self._inside.close()
        super().close()
