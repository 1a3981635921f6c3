"""Workload profile: measured work of a worker in a step without a network, and the speeds of all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from gossamer.base.layout import Layout
from gossamer.events import Attached

ENOUGH_STEPS = 6  # to time in each copy, if its script makes as many
NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
MUCH_LOAD = 0.1  # of all cores busy with other work is worth a warning


@dataclass(frozen=True, kw_only=True)
class OtherLoad:
    """Use of this machine's cores, in cores on average. All 0 if the kernel does not report it."""

    cores: float = 0.0  # of the machine
    own: float = 0.0  # busy with the profiled copies and their children
    other: float = 0.0  # busy with anything else
    stolen: float = 0.0  # stolen by the hypervisor
    running: float = 0.0  # share of time that the training thread ran
    ready: float = 0.0  # share of time that it waited for a core

    @property
    def slowdown(self) -> float:
        """Factor by which other work made it longer.

        Cores are shared fairly, so the copies would have used the others' cores in the same proportions, up to a whole
        core per thread. Time in which the thread sleeps does not change. With f the share of its active time in which
        it ran, and f' that without other work:

            f' = min(1, f (own + other + stolen) / own),   slowdown = 1 / (1 - (running + ready) (1 - f / f'))
        """
        active = self.running + self.ready
        if not self.own or not self.running:
            return 1.0
        ran = self.running / active * (1 - self.stolen / self.cores)
        alone = min(1.0, ran * (self.own + self.other + self.stolen) / self.own)
        return 1 / (1 - min(1.0, active) * (1 - ran / alone))

    @property
    def is_much(self) -> bool:
        return self.other + self.stolen > MUCH_LOAD * self.cores


@dataclass(frozen=True, kw_only=True)
class BucketProfile:
    """One bucket and its seconds in a step."""

    dtype: str
    shapes: Mapping[str, Sequence[int]]  # by tensor name
    ready_seconds: float  # from the begin of the step until its gradients are complete
    computing_seconds: Sequence[float]  # before the first operation, between operations, after the last
    engine_seconds: Sequence[float]  # arithmetic within each operation, such as summing
    fragment: int = 0  # of the schedule
    offering_seconds: float = 0.0  # of the training thread, before a sync round
    landing_seconds: float = 0.0  # of the training thread, after it
    spread_seconds: float = 0.0  # standard deviation of its compute time over the timed exchanges


@dataclass(frozen=True, kw_only=True)
class WorkloadProfile:
    """One worker's step without a network."""

    recipe: str
    backward_seconds: float  # from the end of the last step to the end of the backward pass
    rest_seconds: float  # from there to the end of the optimizer's step
    buckets: Sequence[BucketProfile]
    control_bytes: int = 0  # of a step's report
    buffer_bytes: Sequence[int] = ()  # of each tensor broadcast by one rank in every step
    rider_bytes: Sequence[float] = ()  # of the averaged state, by fragment, averaged over rounds
    site_buckets: Sequence[BucketProfile] = field(default_factory=list)  # averaged within sites in every step
    site_control_bytes: int = 0
    crowded: bool = False  # whether workers keep all cores busy, so that compression slows the backward pass
    copies: int = 1  # profiled at the same time; 0 for a given step time
    timed_steps: Sequence[float] = ()  # seconds of each timed step, of all copies
    other_load: OtherLoad = field(default_factory=OtherLoad)  # during the timed steps
    speeds: Sequence[float] = ()  # of each worker, of the profiled one is 1; empty: all are as fast as it

    @property
    def unequal(self) -> bool:
        """Whether the workers' speeds differ."""
        return len(set(self.speeds)) > 1

    def slowdowns(self, workers: int) -> list[float]:
        """Compute time of each worker, relative to the profiled one."""
        return [1 / speed for speed in self.speeds[:workers]] or [1.0] * workers

    @property
    def model(self) -> Attached:
        """The Attached event of a session with this recipe."""
        layouts = tuple((bucket.dtype, Layout.of(bucket.shapes)) for bucket in self.buckets)
        return Attached(
            recipe=self.recipe,
            layouts=layouts,
            fragments=tuple(bucket.fragment for bucket in self.buckets),
            parameters=sum(layout.numel for _, layout in layouts),
            buffer_bytes=sum(self.buffer_bytes),
            buffers=tuple(self.buffer_bytes),
            control_bytes=self.control_bytes,
            rider_bytes=tuple(self.rider_bytes),
            site_control_bytes=self.site_control_bytes,
            rank=0,
            world=1,
        )

    @property
    def compute_seconds(self) -> float:
        return self.backward_seconds + self.rest_seconds

    @property
    def step_spread(self) -> float:
        """Relative standard deviation of a timed step, from the median absolute deviation, which ignores outliers; 0
        with fewer than two steps."""
        if len(self.timed_steps) < 2:
            return 0.0
        middle = median(self.timed_steps)
        return NORMAL * median(abs(each - middle) for each in self.timed_steps) / middle

    @property
    def codec_spread_seconds(self) -> float:
        """Of all buckets of a step. Errors of codec timings are correlated, so they are summed."""
        return sum(bucket.spread_seconds for bucket in self.buckets)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WorkloadProfile:
        buckets = {key: [BucketProfile(**each) for each in fields[key]] for key in ("buckets", "site_buckets")}
        return cls(**{**fields, **buckets, "other_load": OtherLoad(**fields.get("other_load", {}))})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
