"""Workload profile: what a worker does in a step without any network, as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

STEADY = 2**40  # a step after any warm-up, as most of a training's are
ENOUGH_STEPS = 6  # timed in each copy, if its script makes as many


@dataclass(frozen=True, kw_only=True)
class BucketProfile:
    """One bucket and its seconds in a step."""

    dtype: str
    shapes: Mapping[str, Sequence[int]]  # by tensor name
    ready_seconds: float  # after the step began, its gradients are complete
    computing_seconds: Sequence[float]  # before the first operation, between operations, after the last
    engine_seconds: Sequence[float]  # arithmetic within each operation, such as adding up
    fragment: int = 0  # with which it is averaged
    offering_seconds: float = 0.0  # of the training thread, before a sync round
    landing_seconds: float = 0.0  # of the training thread, after it


@dataclass(frozen=True, kw_only=True)
class WorkloadProfile:
    """One worker's step without a network."""

    recipe: str
    backward_seconds: float  # from the end of the last step to the end of the backward pass
    rest_seconds: float  # from there to the end of the optimizer's step
    buckets: Sequence[BucketProfile]
    control_bytes: int = 0  # of a step's report
    buffer_bytes: Sequence[int] = ()  # of each tensor that one rank broadcasts in every step
    rider_bytes: Sequence[float] = ()  # of the averaged state, by fragment, on average over rounds
    site_buckets: Sequence[BucketProfile] = field(default_factory=list)  # averaged within sites in every step
    site_control_bytes: int = 0
    crowded: bool = False  # the workers keep all cores busy, so that compressing slows the backward pass
    copies: int = 1  # profiled side by side; 0 where the step's length was given
    timed_steps: Sequence[float] = ()  # seconds of each step that was timed, of all copies

    @property
    def compute_seconds(self) -> float:
        return self.backward_seconds + self.rest_seconds

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WorkloadProfile:
        buckets = {key: [BucketProfile(**each) for each in fields[key]] for key in ("buckets", "site_buckets")}
        return cls(**{**fields, **buckets})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
