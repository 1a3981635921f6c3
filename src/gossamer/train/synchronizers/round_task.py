"""Round task: defines which values of a bucket a scheduled synchronizer sends, and how the mean is applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from gossamer.train.engine.averaged_state import AveragedState
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.step_decision import NO_FLAGS, Flags, Presence
from gossamer.train.synchronizers.base import NamedState
from gossamer.train.synchronizers.in_flight import InFlightRound, RoundResult


class RoundTask(ABC):
    """Called by a ScheduledSynchronizer on the training thread: `offer` when a round is sent, `apply` or `revert` when
    it lands."""

    in_backward = False  # rounds are sent and land at the end of a backward pass, not after the optimizer step
    keeps_alike = False  # parameters are equal on all ranks at every step
    merges_own = False  # the merged parameters are the mean of the workers' own, not `agreed`
    keeps_offers = False  # the offer is needed when the mean arrives
    guards_gradients = False  # drop non-finite gradients before the optimizer uses them
    agreed_state: Mapping[str, Tensor] = MappingProxyType({})  # the model's other state by name, as last averaged

    def check_pass(self, *, counted: bool) -> None:  # noqa: B027 - most can use any number of them
        """Called after a backward pass. counted: whether this is not the first one since the last step. Raises
        LoopError if only one is allowed."""

    def check_step(self, *, closure: bool) -> None:  # noqa: B027 - most work with any optimizer
        """Called before the optimizer step. Raises LoopError if a closure is not allowed."""

    @abstractmethod
    def offer(self, bucket: Bucket, presence: Presence) -> Tensor:
        """Values of a bucket to send: (n,)."""

    @abstractmethod
    def averaged_state(self, number: int, landed: InFlightRound | None = None) -> AveragedState:
        """State that round `number` averages uncompressed; of a round that was sent, the state that it averages."""

    def used(self, buckets: Sequence[Bucket], presence: Presence) -> Flags:
        """Whether each parameter of a fragment has a gradient on this rank, if the other ranks need it."""
        return NO_FLAGS

    @abstractmethod
    def apply(self, landed: InFlightRound, result: RoundResult) -> None:
        """Apply the committed result of a round."""

    @abstractmethod
    def revert(self, landed: InFlightRound) -> None:
        """Undo the offer: values of a rank were not finite, so the round was not committed."""

    def nothing_landed(self) -> None:  # noqa: B027 - most have nothing to show
        """Called if no round was due to land at this boundary."""

    @property
    def agreed(self) -> Mapping[str, Tensor] | None:
        """Parameters and other state by name that all workers agree on; None if these are the model's own."""
        return None

    @property
    def state(self) -> NamedState:
        """State for checkpoints: {parameter name: {key: tensor}}, as views."""
        return {}

    def adopt_memory(self) -> None:  # noqa: B027 - most remember nothing
        """Set the parameters to values that fit the state, after it was received from another worker."""

    def restart(self) -> None:  # noqa: B027 - most remember nothing
        """Called after the parameters were overwritten with values that all workers agree on."""

    def end_epoch(self, missed: int) -> int:
        """Return how many of the `missed` steps this rank has to catch up with."""
        return 0


def taken_along(averaged: Mapping[str, Tensor], landed: InFlightRound | None) -> Mapping[str, Tensor]:
    """Averaged tensors of the model that a round includes. Rounds saved by an earlier version have no counters."""
    if landed is None:
        return averaged
    names = landed.along
    if names is None:
        names = [name for name, tensor in averaged.items() if tensor.is_floating_point()]
    return {name: averaged[name] for name in names}
