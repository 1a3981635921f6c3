"""Workload profile: what a worker does in a step without any network, as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

STEADY = 2**40  # a step after any warm-up: what a training pays for most of its time


@dataclass(frozen=True, kw_only=True)
class BucketProfile:
    """What leaves together: `shapes` by name, and its seconds.

    ready: after the step began its gradients are complete; computing: before the first word, between words, and after
    the last; engine: arithmetic within each word, such as adding up; fragment: whose turn it takes; offering, landing:
    on the training thread, where parameters are averaged.
    """

    dtype: str
    shapes: Mapping[str, Sequence[int]]
    ready_seconds: float
    computing_seconds: Sequence[float]
    engine_seconds: Sequence[float]
    fragment: int = 0
    offering_seconds: float = 0.0
    landing_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WorkloadProfile:
    """What a worker does in a step without any network.

    backward: from the end of the last step to the end of the backward pass; rest: from there to the end of the
    optimizer's step; crowded: the workers keep all cores
    busy, so that compressing slows the backward pass; buffer_bytes: of each tensor that travels from one rank each
    step; rider_bytes: by fragment, of what is averaged along; site: what travels within sites in each step; copies: how
    many were measured side by side, 0 where the step's length was given.
    """

    recipe: str
    backward_seconds: float
    rest_seconds: float
    buckets: Sequence[BucketProfile]
    control_bytes: int = 0
    buffer_bytes: Sequence[int] = ()
    rider_bytes: Sequence[int] = ()
    site_buckets: Sequence[BucketProfile] = field(default_factory=list)
    site_control_bytes: int = 0
    crowded: bool = False
    copies: int = 1

    @property
    def compute_seconds(self) -> float:
        return self.backward_seconds + self.rest_seconds

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WorkloadProfile:
        buckets = {key: [BucketProfile(**each) for each in fields[key]] for key in ("buckets", "site_buckets")}
        return cls(**{**fields, **buckets})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
