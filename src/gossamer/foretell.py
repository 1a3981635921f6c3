"""How long a step will take on a network: what was measured here, and what its words cost there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Protocol

import torch

from gossamer.forecast import conversation
from gossamer.layout import Layout
from gossamer.network import Network
from gossamer.network.cost import VirtualNetwork
from gossamer.network.tcp import ETHERNET, Tcp
from gossamer.recipe import Recipe
from gossamer.words import Word

STEPS_UNTIL_STEADY = 4


@dataclass(frozen=True, kw_only=True)
class MeasuredBucket:
    """One bucket of gradients: `shapes` by name, and its seconds.

    ready: after the step began its gradients are complete; computing: before the first word, between words, and after
    the last; engine: arithmetic within each word, such as adding up.
    """

    dtype: str
    shapes: Mapping[str, Sequence[int]]
    ready_seconds: float
    computing_seconds: Sequence[float]
    engine_seconds: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a worker does in a step without any network.

    backward: from the end of the last step to the end of the backward pass; rest: from there to the end of the
    optimizer's step; crowded: the workers keep all cores
    busy, so that compressing slows the backward pass; buffer_bytes: of each tensor that travels from one rank each
    step; copies: how many were measured side by side, 0 where the step's length was given.
    """

    recipe: str
    backward_seconds: float
    rest_seconds: float
    buckets: Sequence[MeasuredBucket]
    control_bytes: int = 0
    buffer_bytes: Sequence[int] = ()
    crowded: bool = False
    copies: int = 1

    @property
    def compute_seconds(self) -> float:
        return self.backward_seconds + self.rest_seconds

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Measured:
        return cls(**{**fields, "buckets": [MeasuredBucket(**bucket) for bucket in fields["buckets"]]})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One bucket on the lane. rounds: (seconds of computing before it, the word, seconds of arithmetic within it)."""

    ready_seconds: float
    rounds: Sequence[tuple[float, Word, float]]
    last_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step took: by rank, in seconds. ends: the moments at which it was over."""

    ends: Sequence[float]
    waiting: Sequence[float]
    wire: Sequence[float]
    codec: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """Seconds of one step in the long run, means over workers; `inputs`: the numbers it follows from.

    waiting: the training thread's, for the lane; wire and codec: on the lane, hidden or not.
    """

    step_seconds: float
    waiting_seconds: float
    wire_seconds: float
    codec_seconds: float
    inputs: Mapping[str, Any]

    @property
    def waiting_share(self) -> float:
        return self.waiting_seconds / self.step_seconds


class Lines(Protocol):
    """Says when words have their answers: given everyone's words and the moments at which they say them."""

    def answer(self, words: Sequence[Word], starts: Sequence[float]) -> list[float]: ...
    def broadcast(self, nbytes: int, starts: Sequence[float]) -> list[float]: ...


def foretell(recipe: Recipe, measured: Measured, network: Network, workers: int, tcp: Tcp = ETHERNET) -> Foretold:
    """What a step of `recipe` takes when `workers` that were measured talk over `network`, once it is under way.

    tcp: how packets are cut; by default as on an Ethernet.
    """
    there = Network(hosts=network.hosts[:workers], default=network.default, paths=network.paths, text=network.text)
    lines, jobs = VirtualNetwork(there, tcp), plan(recipe, measured, workers)
    ends: Sequence[float] = [0.0] * workers
    for _ in range(STEPS_UNTIL_STEADY):
        begins = ends
        step = run_step(jobs, measured, lines, begins)
        ends = step.ends
    return Foretold(
        step_seconds=fmean(end - begin for end, begin in zip(step.ends, begins, strict=True)),
        waiting_seconds=fmean(step.waiting),
        wire_seconds=fmean(step.wire),
        codec_seconds=fmean(step.codec),
        inputs={
            "network": network.text,
            "workers": workers,
            "compute_seconds": measured.compute_seconds,
            "codec_seconds": sum(sum(bucket.computing_seconds) for bucket in measured.buckets),
            "engine_seconds": sum(sum(bucket.engine_seconds) for bucket in measured.buckets),
            "buckets": len(measured.buckets),
            "copies_measured_side_by_side": measured.copies,
        },
    )


def plan(recipe: Recipe, measured: Measured, workers: int) -> list[Job]:
    """What the lane does in a step: the last bucket takes the step's control word along. Alone, nothing."""
    return [
        _job(recipe, bucket, workers, measured.control_bytes if bucket is measured.buckets[-1] else 0)
        for bucket in (measured.buckets if workers > 1 else ())
    ]


def _job(recipe: Recipe, bucket: MeasuredBucket, workers: int, control_bytes: int) -> Job:
    layout, dtype = Layout.of(bucket.shapes), getattr(torch, bucket.dtype.removeprefix("torch."))
    words = conversation(recipe, layout, dtype, workers, control_bytes)
    *before, last = bucket.computing_seconds
    return Job(
        ready_seconds=bucket.ready_seconds,
        rounds=list(zip(before, words, bucket.engine_seconds, strict=True)),
        last_seconds=last,
    )


def run_step(jobs: Sequence[Job], measured: Measured, lines: Lines, begins: Sequence[float]) -> Step:
    """One step of every rank: a lane that takes buckets in order, each when it is ready and the lane is free."""
    ranks = [_Rank(begin, begin + measured.backward_seconds, begin, measured.crowded) for begin in begins]
    for job in jobs:
        for rank in ranks:
            rank.wait_for(job.ready_seconds)
        for computing, word, engine in job.rounds:
            for rank in ranks:
                rank.compute(computing)
            _talk(ranks, lines.answer([word] * len(ranks), [rank.lane for rank in ranks]), engine)
        for rank in ranks:
            rank.compute(job.last_seconds)
    for nbytes in measured.buffer_bytes if jobs else ():
        _talk(ranks, lines.broadcast(nbytes, [rank.lane for rank in ranks]))
    resumed = [max(rank.lane, rank.backward) for rank in ranks]
    return Step(
        ends=[moment + measured.rest_seconds for moment in resumed],
        waiting=[moment - rank.backward for moment, rank in zip(resumed, ranks, strict=True)],
        wire=[rank.wire for rank in ranks],
        codec=[rank.codec for rank in ranks],
    )


def _talk(ranks: Sequence[_Rank], answered: Sequence[float], engine: float = 0.0) -> None:
    for rank, moment in zip(ranks, answered, strict=True):
        rank.wire += moment + engine - rank.lane
        rank.lane = moment + engine


@dataclass
class _Rank:
    """begin: of the step; backward: when that pass will be over; lane: when the lane is free; the others so far."""

    begin: float
    backward: float
    lane: float
    crowded: bool
    delay: float = 0.0
    wire: float = 0.0
    codec: float = 0.0

    def wait_for(self, ready_seconds: float) -> None:
        self.lane = max(self.lane, self.begin + ready_seconds + self.delay)

    def compute(self, seconds: float) -> None:
        """Where all cores are busy, the backward pass and this thread take turns while both have something to do."""
        shared = min(seconds, max(0.0, self.backward - self.lane)) if self.crowded else 0.0
        self.delay += shared
        self.backward += shared
        self.lane += seconds + shared
        self.codec += seconds + shared
