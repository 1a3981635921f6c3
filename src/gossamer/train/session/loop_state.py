"""Loop state: what synchronizers ask one session's training loop, and what they report to it."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from gossamer.base.aggregation import NO_MOMENTS
from gossamer.base.transport import Transport
from gossamer.train.engine.extension import Extensions
from gossamer.train.engine.loop import JudgedAt, LoopState, StepContext
from gossamer.train.engine.model_buffers import ModelBuffers
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.parameter_views import sparse_names
from gossamer.train.engine.report import NonFiniteOrigin
from gossamer.train.engine.tensor_sampler import TensorSampler
from gossamer.train.engine.weight_copies import WeightCopies
from gossamer.train.session.first_batch import FirstBatch
from gossamer.train.session.group_changes import ShardedWorld
from gossamer.train.session.loop_scaler import LoopScaler
from gossamer.train.session.model_parts import ModelParts
from gossamer.train.session.session_status import SessionStatus
from gossamer.train.session.step_hooks import StepHooks


class LoopingSession(Protocol):
    """What a loop's state is made of, of one session."""

    model: nn.Module
    optimizer: Optimizer
    clip_norm: float | None
    status: SessionStatus
    _transport: Transport
    _parts: ModelParts
    _buffers: ModelBuffers
    _first_batch: FirstBatch
    _check: ParameterCheck
    _extensions: Extensions
    _step_hooks: StepHooks
    _loop_scaler: LoopScaler
    _world: ShardedWorld

    @property
    def steps(self) -> int: ...
    def _settings(self, scale: float | None) -> str: ...
    def _judge(self, what: JudgedAt, blame: NonFiniteOrigin | None) -> None: ...


def loop_state(session: LoopingSession) -> LoopState:
    """The loop that `session` was attached to."""
    hooks = session._step_hooks

    def now() -> StepContext:
        scaler, momentum = session._loop_scaler, hooks.momentum
        scale = None if scaler.scaler is None else scaler.scale()
        return StepContext(
            scale=scale,
            settings=session._settings(scale),
            moments=NO_MOMENTS if momentum is None else momentum.now(),
            first_batch=session._first_batch.hash,
            lap=session._world.lap,
        )

    return LoopState(
        begins=session._extensions.begin_pass,
        now=now,
        scale=session._loop_scaler.scale,
        buffers=session._buffers,
        averaged=session._buffers.averaged,
        frozen=session._buffers.frozen,
        copies=WeightCopies(session.optimizer),
        warn=FirstBatch.compare if session._transport.rank == 0 else lambda batches: None,
        ended=session.status.step_ended,
        judged=session._judge,
        check=session._check,
        agree=session._parts.agree,
        agree_in_round=session._parts.agree_in_round,
        sparse=partial(sparse_names, session.model),
        tensors=TensorSampler(lambda: session.steps),
        clips=session.clip_norm is not None,
    )
