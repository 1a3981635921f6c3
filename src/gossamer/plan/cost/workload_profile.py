"""Workload profile: what a worker does in a step without any network, as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from gossamer.base.layout import Layout
from gossamer.events import Attached

ENOUGH_STEPS = 6  # timed in each copy, if its script makes as many
NORMAL = 1.4826  # standard deviations of a normal distribution to its median deviation
MUCH_LOAD = 0.1  # of all cores, kept busy by others, is worth a word


@dataclass(frozen=True, kw_only=True)
class OtherLoad:
    """Who had this machine's cores in a while, in cores on average. All 0 where the kernel does not tell."""

    cores: float = 0.0  # of the machine
    own: float = 0.0  # that the profiled copies kept busy, their children included
    other: float = 0.0  # that anything else did
    stolen: float = 0.0  # that a hypervisor gave to other machines
    running: float = 0.0  # share of the time in which the training thread ran
    ready: float = 0.0  # in which it could have, and waited for a core

    @property
    def slowdown(self) -> float:
        """How many times as long it took as it would have without others.

        Cores are shared fairly, so what others used, the copies would have used in the same proportions, up to a whole
        core for each thread. What the thread slept, it sleeps without others too. With f the share of its active time
        in which it ran, and f' that without others:

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
    ready_seconds: float  # after the step began, its gradients are complete
    computing_seconds: Sequence[float]  # before the first operation, between operations, after the last
    engine_seconds: Sequence[float]  # arithmetic within each operation, such as adding up
    fragment: int = 0  # with which it is averaged
    offering_seconds: float = 0.0  # of the training thread, before a sync round
    landing_seconds: float = 0.0  # of the training thread, after it
    spread_seconds: float = 0.0  # standard deviation of all its computing, over the exchanges that were timed


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
    other_load: OtherLoad = field(default_factory=OtherLoad)  # while steps were timed

    @property
    def model(self) -> Attached:
        """The model, as a session that is attached with this recipe tells of it."""
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
        """The standard deviation of a timed step over its median, by the median deviation, which one slow step does not
        move; 0 where fewer than two were timed."""
        if len(self.timed_steps) < 2:
            return 0.0
        middle = median(self.timed_steps)
        return NORMAL * median(abs(each - middle) for each in self.timed_steps) / middle

    @property
    def codec_spread_seconds(self) -> float:
        """Of all buckets of a step. What is wrong with one timing is wrong with the next, so they add up."""
        return sum(bucket.spread_seconds for bucket in self.buckets)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WorkloadProfile:
        buckets = {key: [BucketProfile(**each) for each in fields[key]] for key in ("buckets", "site_buckets")}
        return cls(**{**fields, **buckets, "other_load": OtherLoad(**fields.get("other_load", {}))})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
