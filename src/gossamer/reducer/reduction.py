"""One exchange of all buckets, as the lane sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.compressors import Compressor
from gossamer.compressors.base import aggregate_finite
from gossamer.core.aggregation import AggregationContext, AggregationResult, State
from gossamer.core.coalesce import coalesce
from gossamer.core.layout import FlatTensors, Layout, Slot, first_nonfinite
from gossamer.core.ops import AllGather, AllReduceMean, Script
from gossamer.reducer.optimizer_settings import compare_settings
from gossamer.reducer.step_report import (
    NOBODY,
    Presence,
    StepDecision,
    StepReport,
    exchange_reports,
    gather_first_batches,
    gather_weights,
)
from gossamer.runtime.pipeline import DEPTH, Pipeline
from gossamer.runtime.pipeline_tuner import PipelineTuner
from gossamer.runtime.runner import ScriptCost, ScriptRun, broadcast, run_script
from gossamer.runtime.transport import Transport


class Reducible(Protocol):
    """What leaves together: a bucket, or numbers laid out like one."""

    @property
    def flat(self) -> Tensor: ...
    @property
    def packed(self) -> FlatTensors: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def state(self) -> State: ...
    @property
    def mean_buffer(self) -> Tensor | None:
        """Where the mean may be written; None where the input is needed afterwards."""


@dataclass(frozen=True)
class BucketInput:
    """What is put into a bucket just before it leaves.

    pairs: (place in the bucket, gradient that does not lie there yet); the bucket is then multiplied by `share`, and
    `sums` are added, times `sums_share`.
    """

    pairs: Sequence[tuple[Tensor, Tensor]] = ()
    share: float = 1.0
    sums: Tensor | None = None
    sums_share: float = 1.0

    def put(self, flat: Tensor) -> None:
        if self.pairs:
            views, gradients = zip(*self.pairs, strict=True)
            torch._foreach_copy_(views, gradients)
        if self.sums is not None:
            flat.mul_(self.share).add_(self.sums, alpha=self.sums_share)


NO_INPUT = BucketInput()


def without_own(staged: AggregationResult) -> AggregationResult:
    """Nobody will ask for this worker's own part, as large as the bucket."""
    mean = staged.mean
    return replace(staged, own_contribution=lambda: mean, owes=None)


def with_own(staged: AggregationResult) -> AggregationResult:
    """This worker's own part, computed while it can be."""
    own = staged.own
    return replace(staged, own_contribution=lambda: own, owes=None)


@dataclass(frozen=True, kw_only=True)
class StepTrailer:
    """What the step's last word needs beside the last bucket."""

    report: StepReport
    settings: str
    buffers: Sequence[Sequence[Tensor]]


@dataclass
class StepReduction:
    """Buckets leave one after the other; the last one takes along what every rank must know before it commits.

    What one bucket says second travels beside what later ones say first, in an order that is the same on every rank
    (conveyor). So a bucket's mean is there when the round is closed, and not before.

    reference: the weight that counts as one; agreed upon in the very first round. weight: this worker's. total:
    everyone's, where it had to be known before anything was compressed. keep: what of each answer is kept until the
    round is settled. window: as of the conveyor. trials: what chooses it instead, from what rounds take: of all rounds
    of one exchange, on every rank.
    """

    compressor: Compressor
    transport: Transport
    names: Sequence[str]
    at: AggregationContext
    reference: float | None
    weight: float
    total: float | None = None
    keep: Callable[[AggregationResult], AggregationResult] = without_own
    window: int = DEPTH
    tuner: PipelineTuner | None = None
    spent: list[ScriptCost] = field(default_factory=list)
    first_nonfinite: int = NOBODY
    _staged: dict[int, AggregationResult] = field(init=False, default_factory=dict)  # by the bucket's place
    _left: list[ScriptRun] = field(init=False, default_factory=list)
    _pipeline: Pipeline = field(init=False)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._pipeline = Pipeline(self.window if self.tuner is None else self.tuner.window)
        self._began = time.perf_counter()

    def open(self, batch: int, warn: Callable[[Sequence[tuple[int, float]]], None]) -> None:
        """Before the first bucket ever: compare first batches, and agree on the weight that counts as one.

        Part of the handshake, not of any step's bytes.
        """
        heard = run_script(gather_first_batches(batch, self.weight), self.transport).result
        weights = [theirs for _, theirs in heard if theirs > 0]
        if weights:
            self.reference = sum(weights) / len(weights)
            warn(heard)

    def weigh(self) -> None:
        """Hear everyone's weight. What is remembered has its own weight in it already, and what comes back could not be
        divided by the new total without dividing that, too."""
        performed = run_script(gather_weights(self.weight), self.transport)
        self.spent.append(performed)
        self.total = performed.result

    @property
    def factor(self) -> float:
        """By what this worker's gradients are multiplied before they are averaged."""
        if self.total is None:
            return self.weight / (self.reference or 1.0)
        return self.transport.world * self.weight / self.total if self.total else 0.0

    def correction(self, total: float) -> float:
        """By what averages are multiplied, now that the total weight is known."""
        return 1.0 if self.total is not None else self.transport.world * (self.reference or 1.0) / total

    def exchange(self, bucket: Reducible, fresh: BucketInput, scale: float) -> None:
        """Let one bucket leave, to be averaged in place."""
        self._leave(self._aggregation(bucket, fresh, scale))

    def average(self, flat: Tensor) -> Tensor:
        """Let numbers leave that travel as they are, and of which nothing is remembered; their weighted mean lands in
        them."""
        self._leave(_mean(flat, self.factor))
        return flat

    def close(self, bucket: Reducible, fresh: BucketInput, scale: float, closing: StepTrailer) -> StepDecision:
        """Average the last bucket and all that left before, and hear what happened on the other ranks."""
        last = self._leave(coalesce([self._aggregation(bucket, fresh, scale), self._conclude(closing.report)]))
        self._pipeline.finish()
        self._try(closing.report.presence)
        self.spent += [each.performed for each in self._left]
        _, verdict = last.performed.result
        if not verdict.alike:
            compare_settings(self.transport.all_gather_text(closing.settings))
        moved = [group for group, has_moved in zip(closing.buffers, verdict.moved, strict=True) if has_moved]
        if moved:
            traveling = [buffer for group in moved for buffer in group]
            self.spent.append(broadcast(self.transport, traveling, source=verdict.active[0]))
        return verdict  # type: ignore[no-any-return]

    def _try(self, presence: Presence) -> None:
        """Note what this round took; ranks compare once a trial is over. Like a handshake, no part of any step's bytes.

        A rank that only keeps the others company began to wait when it liked.
        """
        if self.tuner is None:
            return
        self.tuner.ended(time.perf_counter() - self._began if presence == Presence.TRAINING else None)
        if self.tuner.over:
            run_script(self.tuner.compare(), self.transport)

    @property
    def staged(self) -> list[AggregationResult]:
        """What was agreed on, by bucket, once the round is closed."""
        return [self._staged[place] for place in sorted(self._staged)]

    def _leave(self, script: Script) -> ScriptRun:
        self._left.append(ScriptRun(script, self.transport))
        self._pipeline.put(self._left[-1])
        return self._left[-1]

    def _aggregation(self, bucket: Reducible, fresh: BucketInput, scale: float) -> Script:
        """The bucket's script, in units that do not change when the loss scale does. Nothing infinite leaves."""
        place = len(self._left)  # a script begins as soon as it is put in
        fresh.put(bucket.flat)
        factor = self.factor / scale
        if factor != 1.0:
            bucket.flat.mul_(factor)

        def lost() -> None:
            if self.first_nonfinite == NOBODY:
                self.first_nonfinite = self.names.index(nonfinite_tensor(bucket, bucket.flat))

        staged = yield from aggregate_finite(
            self.compressor, bucket.packed, bucket.state, self.at, bucket.mean_buffer, lost
        )
        self._staged[place] = self.keep(staged)

    def _conclude(self, report: StepReport) -> Generator[AllGather, Any, StepDecision]:
        """Begins after the last bucket's encoder, so that the report tells what that one found."""
        return (yield from exchange_reports(replace(report, first_nonfinite=self.first_nonfinite)))

    def blame(self, verdict: StepDecision, cargo: Sequence[Reducible]) -> tuple[int | None, str] | None:
        """(rank, tensor) whose number was not finite; no rank where only the mean was not; None where all were."""
        if verdict.nonfinite:
            rank, place = verdict.nonfinite[0]
            return rank, self.names[place]
        for each, staged in zip(cargo, self.staged, strict=True):
            if not staged.finite:
                return None, nonfinite_tensor(each, staged.mean)
        return None

    def costs(self) -> Mapping[str, float]:
        return sum_costs(self.spent)


def sum_costs(spent: Sequence[ScriptCost]) -> Mapping[str, float]:
    """By the names of events.StepEnded."""
    parts = ("encode_seconds", "wire_seconds", "decode_seconds", "bytes_sent")
    return {part: sum(getattr(each, part) for each in spent) for part in parts}


def _mean(flat: Tensor, factor: float) -> Generator[AllReduceMean, Any, None]:
    yield AllReduceMean(flat.mul_(factor), out=flat)


def nonfinite_tensor(bucket: Reducible, flat: Tensor) -> str:
    """The first tensor that is not finite, or else the one with the largest entry."""

    def largest(slot: Slot) -> float:
        return float(slot.flat_view(flat).abs().amax())

    return (
        first_nonfinite(FlatTensors(flat, bucket.layout))
        or max((slot for slot in bucket.layout if slot.numel), key=largest).name
    )
