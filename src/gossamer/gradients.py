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

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from gossamer import seeds
from gossamer.buckets import Bucket
from gossamer.control import NOBODY, Presence, Report, Verdict, conclude, first_batches
from gossamer.drive import Performed, broadcast, perform
from gossamer.errors import LayoutError, LoopError
from gossamer.handshake import compare_settings
from gossamer.kernels import all_finite
from gossamer.lane import Lane, Ticket
from gossamer.layout import Packed, Slot
from gossamer.transports.base import Transport
from gossamer.words import At, Staged, State


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one exchange ended, and what it took on this worker."""

    verdict: Verdict
    committed: bool
    costs: Mapping[str, float]  # by the names of events.StepEnded


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What the exchange must know of the training loop at the moment it is asked.

    scale: the factor in the gradients that a GradScaler put there, 1.0 without one; settings: the optimizer's
    hyperparameters as text; buffers: the model's, by module; batch: a hash of this rank's first batch.
    """

    scale: Callable[[], float]
    settings: Callable[[], str]
    buffers: Callable[[], Sequence[Sequence[Tensor]]]
    batch: Callable[[], int]


class GradientExchange:
    """Averages the gradients of `parameters` over a transport's group, bucket by bucket."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        compressor: Any,
        transport: Transport,
        lane: Lane,
        loop: Loop,
        seed: int,
    ) -> None:
        self.buckets, self.step, self.weight = buckets, 0, 1.0
        self.reference: float | None = None  # the weight that counts as one: the mean of the first batches'
        self.muted = self.in_optimizer = self.averaged = self.finished = False
        self.warn: Callable[[Sequence[tuple[int, float]]], None] = lambda batches: None
        self.done: Callable[[Outcome], None] = lambda outcome: None
        self._compressor, self._transport, self._lane, self._loop, self._seed = (
            compressor,
            transport,
            lane,
            loop,
            seed,
        )
        self.names = [name for bucket in buckets for name in bucket.parameters]
        self._pid, self._next = os.getpid(), 0
        self._task: int | None = None
        self._tickets: list[Ticket[Any]] = []
        self._staged: dict[int, Staged] = {}
        self._spent: list[Performed] = []
        self._culprit = NOBODY
        self._versions = self._buffer_versions()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket, name))
            for bucket in buckets
            for name, parameter in bucket.parameters.items()
        ]

    # -- the training thread, within backward ----------------------------------------------------------------------

    def _ready(self, bucket: Bucket, name: str, parameter: Tensor) -> None:
        """A gradient is complete. Runs within backward, once per parameter."""
        if self.muted or os.getpid() != self._pid:
            return
        self._arm()
        self._check(bucket, name)
        bucket.adopt(name)
        bucket.missing.discard(name)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch(self.buckets[self._next])

    def _arm(self) -> None:
        """At the first gradient of a backward pass, ask to be called when it is over."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        _refuse_reentrant()
        if self._task is not None and self._next:
            raise LoopError(
                "the backward pass before this one did not finish, and part of its gradients is on its way already. "
                "Catch errors around the whole step on every rank, or load the last checkpoint."
            )
        self._task = task
        for bucket in self.buckets:
            bucket.missing = set(bucket.layout.names)
        torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def _check(self, bucket: Bucket, name: str) -> None:
        grad = bucket.parameters[name].grad
        assert grad is not None
        if grad.shape != bucket.views[name].shape:
            raise LayoutError(
                f'"{name}" was {tuple(bucket.views[name].shape)} at attach and is {tuple(grad.shape)} now, so what is '
                f'remembered about it no longer means anything. Call session.reset("{name}") after resizing.'
            )
        if grad.layout != torch.strided:
            raise LoopError(f'"{name}" has a sparse gradient, which buckets cannot hold: build it with sparse=False.')
        if bucket.state and self.averaged and (self.in_optimizer or bucket.holds(name)):
            raise LoopError(
                "a second backward() before optimizer.step() would send what was averaged already once more, and "
                f"{self._compressor!r} would remember it wrongly. Accumulate with `with session.no_sync():` around "
                "all but the last backward(), or use Dense(). An optimizer that calls backward() within its step, such "
                "as LBFGS, needs Dense()."
            )

    def _launch(self, bucket: Bucket, weight: float | None = None) -> None:
        if self.reference is None and not self._next:
            self._lane_do(partial(self._open, self._loop.batch(), self.weight if weight is None else weight))
        scale = self._loop.scale() if bucket.state else 1.0
        self._lane_do(partial(self._exchange, bucket, self.weight if weight is None else weight, scale))
        self._next += 1

    def _lane_do(self, job: Callable[[], Any]) -> None:
        self._tickets.append(self._lane.submit(job))

    # -- the training thread, when backward is over ----------------------------------------------------------------

    def _over(self) -> None:
        self.finish()

    def finish(self, presence: Presence = Presence.TRAINING) -> Outcome:
        """Send what has not left, wait for everything, and commit or skip the step as all ranks together decide.

        A rank that is not training has no data and only keeps the others company.
        """
        active = presence == Presence.TRAINING
        weight = self.weight if active else 0.0
        for bucket in self.buckets[self._next :]:
            for name in bucket.layout.names if not active else bucket.missing:
                self._fill(bucket, name, active)
            self._launch(bucket, weight)
        used = [
            active and bucket.parameters[name].grad is not None for bucket in self.buckets for name in bucket.parameters
        ]
        buffers = self._loop.buffers()
        moved = [active and now != before for now, before in zip(self._buffer_versions(), self._versions, strict=True)]
        settings = self._loop.settings()
        scale = self._loop.scale()
        closing = self._lane.submit(partial(self._close, weight, presence, settings, used, moved, buffers))
        asked = time.perf_counter()
        verdict = closing.wait()
        for ticket in self._tickets:
            ticket.wait()
        waited = time.perf_counter() - asked
        outcome = self._settle(verdict, scale, waited)
        self.done(outcome)
        return outcome

    def _fill(self, bucket: Bucket, name: str, active: bool) -> None:
        """The bucket's part for a parameter whose hook did not fire: what it accumulated before, or zeros."""
        if active and bucket.parameters[name].grad is not None:
            self._check(bucket, name)
            bucket.adopt(name)
        else:
            bucket.views[name].zero_()

    def _settle(self, verdict: Verdict, scale: float, waited: float) -> Outcome:
        _refuse_saving_without(verdict)
        committed = bool(verdict.active) and not verdict.culprits and verdict.weight > 0
        used = dict(zip(self.names, verdict.used, strict=True))
        for place, bucket in enumerate(self.buckets):
            if committed:
                self._commit(bucket, self._staged[place].next_state, verdict, used, scale)
            else:
                _discard(bucket, used, infinite=self._skips_to_infinity and bool(verdict.culprits))
        spent = self._spent
        self.averaged, self.finished = committed, True
        self.step += committed
        self._task, self._next, self._tickets, self._staged, self._spent = None, 0, [], {}, []
        self._versions = self._buffer_versions()
        for bucket in self.buckets:
            bucket.missing = set(bucket.layout.names)
        parts = ("encode_seconds", "wire_seconds", "decode_seconds", "bytes_sent")
        costs = {part: sum(getattr(each, part) for each in spent) for part in parts}
        return Outcome(verdict=verdict, committed=committed, costs={"waiting_seconds": waited, **costs})

    _skips_to_infinity = False

    def skip_to_infinity(self) -> None:
        """Let skipped steps leave infinite gradients, which is how a GradScaler learns of them."""
        self._skips_to_infinity = True

    def _commit(
        self, bucket: Bucket, following: State, verdict: Verdict, used: Mapping[str, bool], scale: float
    ) -> None:
        assert self.reference is not None
        bucket.restore([name for name in bucket.parameters if not used[name]], following)
        bucket.state = following
        correction = self._transport.world * self.reference / verdict.weight * (scale if bucket.state else 1.0)
        if correction != 1.0:
            bucket.flat.mul_(correction)
        for name, parameter in bucket.parameters.items():
            parameter.grad = bucket.views[name] if used[name] else None

    def _buffer_versions(self) -> list[tuple[tuple[int, int], ...]]:
        """By module: some of BatchNorm's buffers change without their version counters telling, others do tell."""
        return [tuple((id(buffer), buffer._version) for buffer in group) for group in self._loop.buffers()]

    # -- the lane --------------------------------------------------------------------------------------------------

    def _open(self, batch: int, weight: float) -> None:
        """Before the first bucket ever: compare first batches, and agree on the weight that counts as one.

        Part of the handshake, not of any step's bytes.
        """
        performed = perform(first_batches(batch, weight), self._transport)
        weights = [theirs for _, theirs in performed.result if theirs > 0]
        if weights:
            self.reference = sum(weights) / len(weights)
            self.warn(performed.result)

    def _exchange(self, bucket: Bucket, weight: float, scale: float) -> None:
        """Average one bucket in place, in units that do not change when the loss scale does."""
        flat = bucket.flat
        factor = weight / (self.reference or 1.0) / scale
        if factor != 1.0:
            flat.mul_(factor)
        if not all_finite(flat):
            self._blame(bucket, flat)
            flat.zero_()
        at = At(step=self.step, seed=self._seed, rank=self._transport.rank, world=self._transport.world)
        script = self._compressor.aggregate(Packed(flat, bucket.layout), bucket.state, at, flat)
        performed = perform(script, self._transport)
        self._spent.append(performed)
        self._staged[len(self._staged)] = performed.result
        if not performed.result.finite:
            self._blame(bucket, performed.result.own)

    def _blame(self, bucket: Bucket, flat: Tensor) -> None:
        """Note the first tensor that is not finite, or else the one with the largest entry, too large to send."""

        def size(slot: Slot) -> float:
            return inf if not all_finite(slot.span(flat)) else float(slot.span(flat).abs().amax())

        if self._culprit == NOBODY:
            worst = max((slot for slot in bucket.layout if slot.numel), key=size)
            self._culprit = self.names.index(worst.name)

    def _close(
        self,
        weight: float,
        presence: Presence,
        settings: str,
        used: Sequence[bool],
        moved: Sequence[bool],
        buffers: Sequence[Sequence[Tensor]],
    ) -> Verdict:
        report = Report(
            weight=weight,
            presence=presence,
            settings=seeds.address(settings),
            culprit=self._culprit,
            used=tuple(used),
            moved=tuple(moved),
        )
        self._culprit = NOBODY
        performed = perform(conclude(report), self._transport)
        self._spent.append(performed)
        verdict: Verdict = performed.result
        if not verdict.alike:
            compare_settings(self._transport.gather_text(settings))
        travelling = [buffer for group, moved in zip(buffers, verdict.moved, strict=True) if moved for buffer in group]
        if travelling:
            self._spent.append(broadcast(self._transport, travelling, source=verdict.active[0]))
        return verdict

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _discard(bucket: Bucket, used: Mapping[str, bool], infinite: bool) -> None:
    """Leave gradients with which optimizers do nothing: none at all, or infinite ones for a GradScaler to find."""
    if infinite:
        bucket.flat.fill_(inf)
    for name, parameter in bucket.parameters.items():
        parameter.grad = bucket.views[name] if infinite and used[name] else None


def _refuse_saving_without(verdict: Verdict) -> None:
    saving, others = verdict.present(Presence.SAVING), len(verdict.present(Presence.SAVING)) < len(verdict.reports)
    if saving and others:
        raise LoopError(
            f"ranks {', '.join(map(str, saving))} called session.save() within session.epoch() while others had run "
            "out of data or went on training, and a checkpoint needs all of them at the same step. Save after the "
            "block, or let every rank draw equally many batches: DataLoader(..., drop_last=True)."
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
