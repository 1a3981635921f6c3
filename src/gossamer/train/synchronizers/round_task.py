"""Round task: what a scheduled synchronizer sends of a bucket, and what it does with the mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from gossamer.train.engine.averaged_state import AveragedState
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.report import NO_FLAGS, Flags, Presence
from gossamer.train.synchronizers.base import NamedState
from gossamer.train.synchronizers.in_flight import InFlightRound, RoundResult


class RoundTask(ABC):
    """Is asked by a ScheduledSynchronizer, in the training thread: `offer` when a round leaves, `apply` or `revert`
    when it lands."""

    in_backward = False  # rounds leave and land when a backward pass is over, not after the optimizer's step
    keeps_alike = False  # parameters are alike on all ranks at every step
    merges_own = False  # what is merged is the mean of the workers' own parameters, and not `agreed`
    keeps_offers = False  # what was sent is needed again when the mean is there
    guards_gradients = False  # gradients that are not finite are taken away before the optimizer uses them
    agreed_state: Mapping[str, Tensor] = MappingProxyType({})  # the model's other state by name, as agreed on last

    def check_pass(self, *, counted: bool) -> None:  # noqa: B027 - most can use any number of them
        """A backward pass is over; counted: another was, since the last step. Raises LoopError where that is one too
        many."""

    def check_step(self, *, closure: bool) -> None:  # noqa: B027 - most work with any optimizer
        """The optimizer is about to make its step. Raises LoopError where it must not have a closure."""

    @abstractmethod
    def offer(self, bucket: Bucket, presence: Presence) -> Tensor:
        """What leaves of a bucket: (n,)."""

    @abstractmethod
    def averaged_state(self, number: int, landed: InFlightRound | None = None) -> AveragedState:
        """What is averaged along in the `number`-th round, uncompressed; or was, in one that has left."""

    def used(self, buckets: Sequence[Bucket], presence: Presence) -> Flags:
        """Which parameters of a fragment have a gradient on this rank, where the others must know."""
        return NO_FLAGS

    @abstractmethod
    def apply(self, landed: InFlightRound, result: RoundResult) -> None:
        """Use what was agreed upon."""

    @abstractmethod
    def revert(self, landed: InFlightRound) -> None:
        """A rank's numbers were not finite, so nothing was agreed upon and nothing was remembered."""

    def nothing_landed(self) -> None:  # noqa: B027 - most have nothing to show
        """No round was due to land at this boundary."""

    @property
    def agreed(self) -> Mapping[str, Tensor] | None:
        """Parameters and other state by name as all workers agree on them; None where that is the model as it is."""
        return None

    @property
    def state(self) -> NamedState:
        """What it remembers: {parameter name: {key in checkpoints: tensor}}, as views."""
        return {}

    def adopt_memory(self) -> None:  # noqa: B027 - most remember nothing
        """What is remembered is another worker's: go on with parameters that fit it."""

    def restart(self) -> None:  # noqa: B027 - most remember nothing
        """The parameters were overwritten by what all workers agree on."""

    def end_epoch(self, missed: int) -> int:
        """How many of the `missed` steps of others this rank has to catch up with."""
        return 0


def taken_along(averaged: Mapping[str, Tensor], landed: InFlightRound | None) -> Mapping[str, Tensor]:
    """Those of the model's averaged tensors that a round took along; without counters, where an earlier version saved
    it."""
    if landed is None:
        return averaged
    names = landed.along
    if names is None:
        names = [name for name, tensor in averaged.items() if tensor.is_floating_point()]
    return {name: averaged[name] for name in names}
