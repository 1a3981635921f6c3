"""Parameters that are averaged from time to time, while every worker trains its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.checkpoint.state import MERGING_PREFIX
from gossamer.core.layout import FlatTensors
from gossamer.reducer.averaged_state import AveragedState, optimizer_state_keys, optimizer_state_tensors
from gossamer.reducer.backward_hooks import drop_nonfinite_gradients
from gossamer.reducer.bucket import Bucket
from gossamer.reducer.step_report import Presence
from gossamer.strategies import AGREED, AVERAGE, RESET, AveragingStrategy, Memory
from gossamer.synchronizers.base import NamedState, SyncContext
from gossamer.synchronizers.in_flight import InFlightRound, RoundResult
from gossamer.synchronizers.scheduled import ScheduledSynchronizer


class ParameterAveraging(ScheduledSynchronizer):
    """Offers how far this worker's parameters went, and moves them to where the strategy says at the landing.

    guards: whether a gradient that is not finite is taken away here, before it spoils this worker's parameters.
    """

    def __init__(
        self,
        strategy: AveragingStrategy,
        fragments: Sequence[Sequence[Bucket]],
        optimizer: Optimizer,
        context: SyncContext,
        start: int = 0,
        *,
        guards: bool = True,
    ) -> None:
        super().__init__(strategy.schedule, fragments, context, start)
        self._strategy, self._optimizer, self._guards = strategy, optimizer, guards
        self.keeps_offers = strategy.needs_own
        self._kinds = optimizer_state_keys(optimizer) if strategy.on_merge == AVERAGE else []
        self._memory: dict[Bucket, Memory] = {
            bucket: self._strategy.begin(bucket.gather_parameters()) for bucket in self.buckets
        }

    @property
    def agreed(self) -> Mapping[str, Tensor]:
        return {slot.name: slot.view(self._memory[bucket][AGREED]) for bucket in self.buckets for slot in bucket.layout}

    # -- local steps ---------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        super()._count()
        if self._guards and self._loop.scale() is None:
            spoilt = drop_nonfinite_gradients(self.buckets)
            self._skipped = self._skipped or spoilt is not None
            self._loop.guarded(None if spoilt is None else (self._transport.rank, spoilt))

    # -- turns ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _offer(self, bucket: Bucket, presence: Presence) -> Tensor:
        flat = bucket.gather_parameters(None if self.keeps_offers else bucket.flat)
        self._strategy.offer(flat, self._memory[bucket])
        return flat

    def _land(self, flight: InFlightRound, arrival: RoundResult) -> None:
        for parcel, mean, own in zip(flight.parcels, arrival.means, arrival.owns, strict=True):
            bucket = parcel.bucket
            flat = bucket.gather_parameters()
            self._strategy.land(flat, self._memory[bucket], mean, own)
            bucket.scatter_parameters(flat)
        if arrival.averaged_state is not None:
            self._averaged_state(flight.turn.fragment).replace(arrival.averaged_state, self._strategy.kept_share)
        if self._strategy.on_merge == RESET:
            for parcel in flight.parcels:
                for parameter in parcel.bucket.parameters.values():
                    self._optimizer.state.pop(parameter, None)

    def _lost(self, flight: InFlightRound) -> None:
        for parcel in flight.parcels:
            self._strategy.undo(self._memory[parcel.bucket], parcel.flat)

    def _averaged_state(self, fragment: int) -> AveragedState:
        """BatchNorm's statistics travel with the first fragment; an optimizer's momenta with their parameters."""
        buffers = self._loop.averaged() if fragment == 0 else []
        parameters = [p for bucket in self._fragments[fragment].buckets for p in bucket.parameters.values()]
        return AveragedState([*buffers, *optimizer_state_tensors(self._optimizer, parameters, self._kinds)])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        self._land_until(sys.maxsize)

    def remembered(self) -> NamedState:
        found = super().remembered()
        for bucket, memory in self._memory.items():
            for key, flat in memory.items():
                for name, view in FlatTensors(flat, bucket.layout).items():
                    found.setdefault(name, {})[MERGING_PREFIX + key] = view
        return found

    @torch.no_grad()
    def restart(self) -> None:
        for bucket, memory in self._memory.items():
            self._strategy.restart(bucket.gather_parameters(), memory)

    def end_epoch(self) -> int:
        """Nobody missed anything: what this rank did not do it takes over with the next merge."""
        super().end_epoch()
        return 0
