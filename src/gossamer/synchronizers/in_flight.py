"""What travels while training goes on: fragments, what is offered of them, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gossamer.core.aggregation import State
from gossamer.core.layout import FlatTensors, Layout
from gossamer.reducer.bucket import Bucket
from gossamer.runtime.comm_thread import Work
from gossamer.strategies import SyncRound
from gossamer.synchronizers.base import NonFiniteOrigin, StepCosts


@dataclass
class Fragment:
    """Parameters that take their turn together. weight: of all samples since its last turn."""

    buckets: Sequence[Bucket]
    weight: float = 0.0

    @property
    def names(self) -> list[str]:
        return [name for bucket in self.buckets for name in bucket.layout.names]


@dataclass(frozen=True)
class OutgoingBucket:
    """Numbers that travel in a bucket's layout and state; `keeps`: they are needed again when the mean has landed."""

    bucket: Bucket
    flat: Tensor
    keeps: bool

    @property
    def packed(self) -> FlatTensors:
        return FlatTensors(self.flat, self.bucket.layout)

    @property
    def layout(self) -> Layout:
        return self.bucket.layout

    @property
    def state(self) -> State:
        return self.bucket.state

    @property
    def mean_buffer(self) -> Tensor | None:
        return None if self.keeps else self.flat


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What a flight brought. means, owns: by parcel, as they were offered; none where it was not committed."""

    committed: bool = False
    means: Sequence[Tensor] = ()
    owns: Sequence[Tensor | None] = ()
    averaged_state: Tensor | None = None
    used: Sequence[bool] = ()
    blame: NonFiniteOrigin | None = None
    active: bool = True
    stop: bool = False
    costs: StepCosts = field(default_factory=dict)


@dataclass(frozen=True)
class InFlightRound:
    """One turn under way."""

    number: int
    turn: SyncRound
    parcels: Sequence[OutgoingBucket]
    ticket: Work[RoundResult]

    def written(self) -> dict[str, Any]:
        """What must be known to land it later, once it has arrived."""
        arrival = self.ticket.wait()
        return {
            "number": self.number,
            "committed": arrival.committed,
            "stop": arrival.stop,
            "riders": arrival.averaged_state,
            "used": list(arrival.used),
            "means": list(arrival.means),
            "owns": [own for own in arrival.owns if own is not None],
            "offers": [parcel.flat for parcel in self.parcels if parcel.keeps],
        }


def read_result(written: Mapping[str, Any]) -> RoundResult:
    """What `written` says has come back."""
    means = [mean.clone() for mean in written["means"]]
    owns = [own.clone() for own in written["owns"]] or [None] * len(means)
    about = {key: written[key] for key in ("committed", "stop", "used")}
    return RoundResult(means=means, owns=owns, averaged_state=written["riders"], **about)
