"""Gradients leave as soon as they are there, and are averaged when backward returns.

A step is a transaction. Hooks hand full buckets to the lane while backward goes on; compressors stage what they would
remember; the step's last word tells every rank what happened on the others; then all of them commit, or none.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from gossamer import seeds
from gossamer.buckets import Bucket
from gossamer.compressors import Compressor
from gossamer.control import NOBODY, Presence, Report, Verdict
from gossamer.errors import LayoutError, LoopError
from gossamer.lane import Lane, Ticket
from gossamer.rounds import Closing, Fresh, Round, worst
from gossamer.transports.base import Transport
from gossamer.words import At


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one exchange ended, and what it took on this worker.

    blame: whose gradient was not finite and in which tensor; no rank where the agreed mean left a format's range.
    """

    verdict: Verdict
    committed: bool
    blame: tuple[int | None, str] | None
    costs: Mapping[str, float]  # by the names of events.StepEnded


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What the exchange must know of the training loop at the moment it is asked, and whom it tells.

    scale: the factor in the gradients that a GradScaler put there, None without one; settings: the optimizer's
    hyperparameters as text; momentum: its momentum and whether that is Nesterov's, where the compressor applies it;
    buffers: the model's, by module; batch: a hash of this rank's first batch; warn: hears everyone's (hash, weight);
    done: hears how each exchange ended.
    """

    scale: Callable[[], float | None]
    settings: Callable[[], str]
    momentum: Callable[[], tuple[float, bool]]
    buffers: Callable[[], Sequence[Sequence[Tensor]]]
    batch: Callable[[], int]
    warn: Callable[[Sequence[tuple[int, float]]], None]
    done: Callable[[Outcome], None]


class GradientExchange:
    """Averages the gradients in `buckets` over a transport's group.

    muted: backward passes add up and send nothing; averaged: the gradients are, and no optimizer step has used them;
    finished: an exchange took place since the last optimizer step; in_optimizer: such a step is going on;
    asked_to_stop: this rank wants the run to end; stopping: all of them know that it ends.
    """

    def __init__(
        self, buckets: Sequence[Bucket], compressor: Compressor, transport: Transport, lane: Lane, loop: Loop, seed: int
    ) -> None:
        self.buckets, self.step, self.weight = buckets, 0, 1.0
        self.reference: float | None = None
        self.muted = self.in_optimizer = self.averaged = self.finished = False
        self.asked_to_stop = self.stopping = False
        self.names = [name for bucket in buckets for name in bucket.parameters]
        self._compressor, self._transport, self._lane, self._loop = compressor, transport, lane, loop
        self._seed, self._pid = seed, os.getpid()
        self._task: int | None = None
        self._round: Round | None = None
        self._tickets: list[Ticket[Any]] = []
        self._versions = self._buffer_versions()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket, name))
            for bucket in buckets
            for name, parameter in bucket.parameters.items()
        ]

    # -- within backward -----------------------------------------------------------------------------------------------

    def _ready(self, bucket: Bucket, name: str, parameter: Tensor) -> None:
        """A gradient is complete. Runs once per parameter, so it does as little as it can."""
        if self.muted or (torch._C._current_graph_task_id() != self._task and not self._arm()):
            return
        bucket.missing.discard(name)
        if not bucket.missing:
            while (sent := len(self._tickets)) < len(self.buckets) and not self.buckets[sent].missing:
                self._launch(self.buckets[sent], Presence.TRAINING)

    def _arm(self) -> bool:
        """At the first gradient of a backward pass, ask to be called when it is over. False in a forked child."""
        if os.getpid() != self._pid:
            return False
        _refuse_reentrant()
        if self._tickets:
            raise LoopError(
                "the backward pass before this one did not finish, and part of its gradients is on its way already, so "
                "the ranks are out of step. End the run and go on from the last checkpoint, as gossamer run "
                "--max-restarts 1 does by itself."
            )
        self._task = torch._C._current_graph_task_id()
        for bucket in self.buckets:
            bucket.missing = set(bucket.layout.names)
        if self._round is None:
            self._begin(self.weight)  # what must be known before the first bucket travels during backward
        torch.autograd.Variable._execution_engine.queue_callback(self._over)
        return True

    def _launch(self, bucket: Bucket, presence: Presence) -> None:
        """Hand a bucket to the lane; the last one takes this rank's report along."""
        training = presence == Presence.TRAINING
        round_ = self._round or self._begin(self.weight if training else 0.0)
        scale = self._scale_of(bucket)
        fresh = self._fresh(bucket) if training else []
        if bucket is self.buckets[-1]:
            self._submit(partial(round_.close, bucket, fresh, scale, self._closing(presence, round_.weight)))
        else:
            self._submit(partial(round_.exchange, bucket, fresh, scale))

    def _begin(self, weight: float) -> Round:
        momentum, nesterov = self._loop.momentum()
        at = At(
            step=self.step,
            seed=self._seed,
            rank=self._transport.rank,
            world=self._transport.world,
            momentum=momentum,
            nesterov=nesterov,
        )
        self._round = Round(self._compressor, self._transport, self.names, at, self.reference, weight)
        if self.reference is None:
            self._lane.submit(partial(self._round.open, self._loop.batch(), self._loop.warn))
        if any(bucket.state for bucket in self.buckets):
            self._lane.submit(self._round.weigh)
        return self._round

    def _submit(self, job: Callable[[], Any]) -> None:
        self._tickets.append(self._lane.submit(job))

    def _fresh(self, bucket: Bucket) -> Fresh:
        """The gradients that do not lie in the bucket yet: zero_grad() took them out, as it does by default."""
        fresh: list[tuple[Tensor, Tensor]] = []
        held = False
        for name, parameter in bucket.parameters.items():
            gradient, view = parameter.grad, bucket.views[name]
            if gradient is view:
                held = True
            elif gradient is None:
                view.zero_()
            elif gradient.shape != view.shape or gradient.is_sparse:
                raise _unfit(name, view, gradient)
            else:
                fresh.append((view, gradient))
        if bucket.state and self.averaged and (self.in_optimizer or held):
            raise LoopError(
                "a second backward() before optimizer.step() would send what was averaged already once more, and "
                f"{self._compressor!r} would remember it wrongly. Accumulate with `with session.no_sync():` around "
                "all but the last backward(), or use Dense(). An optimizer that calls backward() within its step, "
                "such as LBFGS, needs Dense()."
            )
        return fresh

    def _scale_of(self, bucket: Bucket) -> float:
        """The factor to take out of a bucket before it is compressed: what is remembered has no loss scale in it."""
        return (self._loop.scale() or 1.0) if bucket.state else 1.0

    def _closing(self, presence: Presence, weight: float) -> Closing:
        training = presence == Presence.TRAINING
        now, settings = self._buffer_versions(), self._loop.settings()
        report = Report(
            weight=weight,
            presence=presence,
            settings=seeds.address(settings),
            culprit=NOBODY,
            stop=self.asked_to_stop,
            used=np.array([p.grad is not None for bucket in self.buckets for p in bucket.parameters.values()])
            & training,
            moved=np.array([new != old for new, old in zip(now, self._versions, strict=True)], dtype=bool) & training,
        )
        return Closing(report=report, settings=settings, buffers=self._loop.buffers())

    def _buffer_versions(self) -> list[tuple[tuple[int, int], ...]]:
        """By module: some of BatchNorm's buffers change without their version counters telling, others do tell."""
        return [tuple((id(buffer), buffer._version) for buffer in group) for group in self._loop.buffers()]

    # -- when backward is over -----------------------------------------------------------------------------------------

    def _over(self) -> None:
        self.finish()

    def finish(self, presence: Presence = Presence.TRAINING) -> Outcome:
        """Send what has not left, wait for everything, and commit or skip the step as all ranks together decide.

        A rank that is not training has no data and only keeps the others company.
        """
        for bucket in self.buckets[len(self._tickets) :]:
            if presence != Presence.TRAINING:
                bucket.flat.zero_()
            self._launch(bucket, presence)
        asked = time.perf_counter()
        *_, verdict = [ticket.wait() for ticket in self._tickets]
        waited = time.perf_counter() - asked
        outcome = self._settle(verdict, waited)
        self._loop.done(outcome)
        return outcome

    def _settle(self, verdict: Verdict, waited: float) -> Outcome:
        assert self._round is not None
        done, self._round, self._task, self._tickets = self._round, None, None, []
        self.stopping = verdict.stop
        _refuse_to_save_apart(verdict)
        blame = self._blame(verdict, done)
        committed = bool(verdict.active) and verdict.weight > 0 and blame is None
        scale = self._loop.scale()
        used = {name for name, someone in zip(self.names, verdict.used, strict=True) if someone}
        for bucket, staged in zip(self.buckets, done.staged, strict=True):
            if committed:
                correction = done.correction(verdict.weight) * self._scale_of(bucket)
                bucket.commit(staged.next_state, used, correction)
            elif blame and scale is not None:
                bucket.flat.fill_(inf)  # a GradScaler learns from it that the step was skipped
                bucket.point(used)
            else:
                bucket.point(set())  # optimizers do nothing without gradients, unlike with zeros
        self.reference = done.reference
        if verdict.active:
            self.averaged, self.finished = committed, True
        self.step += committed
        self._versions = self._buffer_versions()
        for bucket in self.buckets:
            bucket.missing = set(bucket.layout.names)
        return Outcome(
            verdict=verdict, committed=committed, blame=blame, costs={"waiting_seconds": waited, **done.costs()}
        )

    def _blame(self, verdict: Verdict, done: Round) -> tuple[int | None, str] | None:
        if verdict.culprits:
            rank, place = verdict.culprits[0]
            return rank, self.names[place]
        for bucket, staged in zip(self.buckets, done.staged, strict=True):
            if not staged.finite:
                return None, worst(bucket, staged.mean)
        return None

    @property
    def touched(self) -> bool:
        """Whether anybody wrote to the averaged gradients."""
        return any(bucket.touched for bucket in self.buckets)

    def rest(self) -> None:
        """The optimizer has made its step, or never will: what comes next is a new one."""
        self.averaged = self.finished = self.in_optimizer = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _unfit(name: str, view: Tensor, gradient: Tensor) -> Exception:
    if gradient.layout != torch.strided:
        return LoopError(f'"{name}" has a sparse gradient, which buckets cannot hold: build it with sparse=False.')
    return LayoutError(
        f'"{name}" was {tuple(view.shape)} at attach and is {tuple(gradient.shape)} now, so what is remembered '
        f'about it no longer means anything. Call session.reset("{name}") after resizing.'
    )


def _refuse_to_save_apart(verdict: Verdict) -> None:
    saving = verdict.present(Presence.SAVING)
    if saving and len(saving) < len(verdict.reports):
        raise LoopError(
            f"ranks {', '.join(map(str, saving))} called session.save() while others went on training or had run out "
            "of data, and a checkpoint needs all of them at the same step. Where ranks have different numbers of "
            "batches, write `with session.epoch():` around the loop over batches and save after it, or let all draw "
            "equally many: DataLoader(..., drop_last=True)."
        )


def _refuse_reentrant() -> None:
    """Reentrant checkpointing runs whole backward passes inside one: hooks fire twice and passes end in the middle."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            raise LoopError(
                "reentrant activation checkpointing runs backward passes inside the backward pass, so nobody can tell "
                "when a gradient is complete. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        frame = frame.f_back
