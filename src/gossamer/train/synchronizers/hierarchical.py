"""Hierarchical local SGD: gradients are averaged within a site at every step, parameters between sites periodically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gossamer.algorithms.strategies import PeriodicSchedule
from gossamer.train.engine.autograd_hooks import LoopControls
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import JudgedAt, StepCosts
from gossamer.train.engine.sparse_gradients import SparseGradients
from gossamer.train.engine.step_decision import NonFiniteOrigin, Presence
from gossamer.train.synchronizers.base import SyncContext, Synchronizer
from gossamer.train.synchronizers.gradients import GradientSynchronizer
from gossamer.train.synchronizers.in_flight import RoundTask
from gossamer.train.synchronizers.scheduled import ScheduledSynchronizer


class HierarchicalLocalSGD(ScheduledSynchronizer):
    """Rounds among all workers; between them, the workers of a site average their gradients."""

    def __init__(
        self,
        site_buckets: Sequence[Bucket],
        sparse: SparseGradients,
        site: SyncContext,
        schedule: PeriodicSchedule,
        fragments: Sequence[Sequence[Bucket]],
        task: RoundTask,
        context: SyncContext,
        start: int = 0,
    ) -> None:
        controls = LoopControls()
        self._first_of_site = context.transport.rank - site.transport.rank
        check = site.loop.check.within_site(site.transport.rank, self._first_of_site)
        loop = replace(site.loop, ended=self._site_step_ended, judged=self._site_judged, check=check)
        site = replace(site, loop=loop)
        self._inside = GradientSynchronizer(site_buckets, sparse, site, controls=controls)
        super().__init__(schedule, fragments, task, context, start, controls)

    def _site_step_ended(self, skipped: bool, costs: StepCosts) -> None:
        self._local.add(skipped, costs)

    def _site_judged(self, what: JudgedAt, blame: NonFiniteOrigin | None) -> None:
        """Pass on the rank among all workers instead of the rank within the site."""
        if blame is not None and blame[0] is not None:
            blame = self._first_of_site + blame[0], blame[1]
        self._loop.judged("pass", blame)

    @property
    def touched(self) -> bool:
        return self._inside.touched

    @property
    def between_steps(self) -> bool:
        return self._inside.between_steps and super().between_steps

    def use(self) -> None:
        self._inside.use()

    def step_skipped(self) -> None:
        self._inside.step_skipped()
        super().step_skipped()

    def before_step(self, *, closure: bool) -> None:
        self._inside.before_step(closure=closure)
        super().before_step(closure=closure)

    def after_step(self) -> None:
        self._inside.after_step()
        super().after_step()

    def end_epoch(self) -> int:
        """Join the steps of the site until it is out of data, then the rounds among all workers together with it."""
        ended = self.step
        while not self.stopping and self._inside.finish(Presence.OUT_OF_DATA).active:
            self.step += 1
            self._boundary()
            self._local.report()
        self._inside.rest()
        if self.step > max(ended, self._sync_round(self._number - 1).launch):
            self.step -= 1  # this rank lacks steps of its site since the last round: one more round aligns all ranks
        return super().end_epoch()

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        """Meet within the site first, since ranks of it that continue training wait for this rank there."""
        self._inside.meet_to_save(call)
        super().meet_to_save(call)

    def progress(self) -> dict[str, Any]:
        return {**super().progress(), "inside": self._inside.progress()}

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().resume(progress, remembered)
        self._inside.resume(progress["inside"], {})

    def take_over_from(self, before: Synchronizer) -> None:
        super().take_over_from(before)
        assert isinstance(before, HierarchicalLocalSGD)
        self._inside.take_over_from(before._inside)

    def close(self) -> None:
        self._inside.close()
        super().close()
