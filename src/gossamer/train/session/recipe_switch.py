"""Recipe switch: changes the recipe of a session between two steps, without losing unsent gradients.

law:  `sum of sent + mean residual + owed = sum of given`, also across the switch

Unsent gradients of the old recipe move to the residuals of the new one, by parameter name and bit for bit, including
undelivered values of shards and means in flight. If the new recipe has no residual for a tensor, they are added to its
next gradient: in lock step the mean over the ranks, sent once and uncompressed; with local training each rank's own
values. If workers have trained separately, residuals are differences of parameters, not gradients; they are then added
to a dense mean of the parameters, from which all ranks continue.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer import events
from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.hierarchical import Hierarchical
from gossamer.algorithms.recipes.recipe import Recipe, period_of, resolve
from gossamer.algorithms.strategies import AveragingStage, GossipStage, GradientStage
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import accumulation_dtype
from gossamer.base.runner import ScriptCost, run_script
from gossamer.base.transport import Transport
from gossamer.comm.mesh.collective_selector import prefer_collective, requested_collective
from gossamer.comm.runtime.comm_streams import use_on_current_stream
from gossamer.errors import CheckpointError, GossamerError, LoopError, MismatchError, RecipeError
from gossamer.train.checkpoint import reshard
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.engine.averaged_state import AveragedState, averaged_keys
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.model_buffers import ModelBuffers
from gossamer.train.engine.parameter_views import copy_parameters
from gossamer.train.engine.step_decision import Presence, by_value
from gossamer.train.engine.unsent_gradients import Unsent, forget_residuals, take_up, unsent, unsent_gradients
from gossamer.train.moments.shared_variance import forget_shared_variance
from gossamer.train.moments.take_over import ownership, share_second_moment
from gossamer.train.session import session_checkpoint, uneven_inputs
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.group_changes import ShardedWorld
from gossamer.train.session.loop_scaler import LoopScaler
from gossamer.train.session.pending_gradients import add_pending, on_their_way
from gossamer.train.session.recipe_choice import Written, placed, refuse_small_batch
from gossamer.train.session.session_status import SessionStatus
from gossamer.train.session.startup_checks import optimizer_digest
from gossamer.train.session.step_hooks import StepHooks
from gossamer.train.session.validation import refuse_sparse_gradients, refuse_swapping
from gossamer.train.synchronizers.base import Synchronizer
from gossamer.train.synchronizers.scheduled import exact_means
from gossamer.train.synchronizers.stages import StageSequence


class SwitchingSession(Protocol):
    """The part of a session that a switch reads and replaces."""

    model: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    status: SessionStatus
    _transport: Transport
    _buffers: ModelBuffers
    _step_hooks: StepHooks
    _loop_scaler: LoopScaler
    _attached: Recipe  # the initial recipe
    _world: ShardedWorld
    _parameters: dict[str, Parameter]
    _group: GroupCalls
    _seed: int
    _stages: StageSequence
    _synchronizer: Synchronizer
    _layout: str
    _passes_before: int
    _muted_at: int

    def _at(self) -> AggregationContext: ...
    def _loop_state(self) -> LoopState: ...


@dataclass(frozen=True)
class Following:
    """A recipe that was checked and laid out, but is not in use yet."""

    stages: StageSequence
    fragments: Sequence[Sequence[Bucket]]

    @property
    def recipe(self) -> Recipe:
        return self.stages.recipe


def switch(session: SwitchingSession, wanted: Written, reason: str) -> None:
    """Continue with the recipe `wanted`; see Session.switch."""
    refuse_within_step(session)
    if session._synchronizer.stopping:
        return
    following, refusal = _try(lambda: _prepared(session, wanted))
    held, hosts = _agreed(session, following, refusal)
    assert following is not None
    following = _placed(session, following, hosts)
    if following.recipe != session.recipe:
        before = session.recipe
        _report_switch(session, before, reason, _change(session, following, held))


def refuse_within_step(session: SwitchingSession) -> None:
    """Raise LoopError if there are gradients that no optimizer has used yet."""
    synchronizer = session._synchronizer
    if synchronizer.controls.muted or session._muted_at == synchronizer.passes:
        raise LoopError(
            "session.switch() within or after session.no_sync(): gradients accumulated on this rank would belong to "
            "neither recipe. Call it after the optimizer.step() that uses them."
        )
    if not synchronizer.between_steps:
        raise LoopError(
            "session.switch() between backward() and optimizer.step(), or while the passes of a step accumulate: "
            "gradients averaged by one recipe would be used under another. Call it right after optimizer.step(), where "
            "session.accumulating is False."
        )


def _try(prepare: Callable[[], Following]) -> tuple[Following | None, GossamerError | None]:
    """Catch a refusal, since every rank must join the exchange that follows."""
    try:
        return prepare(), None
    except GossamerError as refusal:
        return None, refusal


# -- checks of the new recipe ------------------------------------------------------------------------------------------


def _prepared(session: SwitchingSession, wanted: Written) -> Following:
    """Check the new recipe and assign its buckets. Raises RecipeError or AttachError; nothing has changed then."""
    recipe = resolve(wanted, session._transport.world)
    if recipe == session.recipe:
        return Following(session._stages, ())
    if not session._group.comm_thread.is_fixed:
        raise RecipeError(
            "the recipe of an elastic run cannot change, since workers that join later read it from their script. Pass "
            "it at attach, or run a fixed number of workers: gossamer run --workers 4."
        )
    for each in (session.recipe, recipe):
        _refuse_unswitchable(session, each)
    return laid_out(session, recipe, session._synchronizer.step)


def laid_out(session: SwitchingSession, recipe: Recipe, since: int) -> Following:
    """The stages and buckets of a recipe that starts at step `since`. Raises if it cannot be attached."""
    refuse_sparse_gradients(session.model, recipe)
    refuse_swapping(session.optimizer, recipe)
    refuse_small_batch(recipe, session._transport.world)
    group, transport = session._group, session._transport
    share_second_moment(session.optimizer, recipe.strategy, session._parameters, transport)  # refuses some optimizers
    if not group.alone:
        for stage in recipe.strategy.stages:
            match stage:
                case AveragingStage(strategy=strategy):
                    averaged_keys(session.optimizer, strategy.moments)
                    if stage.per_site is not None:
                        stage.site_size(transport.world)
                case GossipStage(strategy=strategy):
                    strategy.rule(recipe.compressor).check(recipe.topology, transport.world, session._seed)
    stages = StageSequence(
        recipe, session.optimizer, transport, group.comm_thread, session._loop_state(), session._seed, since
    )
    return Following(stages, stages.fragments(session._parameters))


def _refuse_unswitchable(session: SwitchingSession, recipe: Recipe) -> None:
    if not recipe.strategy.steady_stage.communicates:
        raise RecipeError(
            f"with {recipe.strategy!r} workers do not communicate, so a session can neither change to it nor leave it. "
            f"Train with it from the beginning: gossamer.attach(model, optimizer, {str(recipe)!r})."
        )
    if not all(stage.in_lock_step for stage in recipe.strategy.stages):
        raise RecipeError(
            f"with {recipe.strategy!r} workers are not in lock step, so there is no common step at which all of them "
            "could change their recipe. Train with it from the beginning: gossamer.attach(model, optimizer, "
            f"{str(recipe)!r})."
        )
    if ownership(recipe.compressor, session._parameters) and not session._group.alone:
        raise RecipeError(
            f"{recipe.compressor!r} keeps a part of the optimizer's state, which cannot be moved from or to the "
            "optimizer during a run. Switch between recipes without momentum, such as TopK(density=0.01) or Int8(), or "
            f"train with it from the beginning: gossamer.attach(model, optimizer, {str(recipe)!r})."
        )
    if sum(isinstance(term, Hierarchical) for term in recipe.compressor.held()) > 1:
        raise RecipeError(
            f"{recipe.compressor!r} has nodes within nodes, and their residuals cannot be separated. Write one "
            "Hierarchy(per_node=...)."
        )


def _placed(session: SwitchingSession, following: Following, hosts: Sequence[str]) -> Following:
    """The same with the codec of each worker, by the ranks' host names and measured bandwidths."""
    recipe = placed(following.recipe, session._transport.links, lambda: hosts)
    if recipe == following.recipe:
        return following
    if recipe == session.recipe:
        return Following(session._stages, ())
    return laid_out(session, recipe, session._synchronizer.step)


# -- all ranks together ------------------------------------------------------------------------------------------------


def _agreed(
    session: SwitchingSession, following: Following | None, refusal: GossamerError | None
) -> tuple[list[str], list[str]]:
    """Compare the requested recipes of all ranks. Returns the names of gradients that some ranks still hold from an
    earlier switch, and the host names by rank. Raises on all ranks if they differ, or if the recipe is refused."""
    group, synchronizer = session._group, session._synchronizer
    if not group.alone:
        synchronizer.meet_to_save(Presence.SWITCHING)  # LoopError on all ranks if some continue training
    asked = "" if following is None else repr(following.recipe)
    local = {
        "asked": asked,
        "step": synchronizer.step,
        "held": sorted(session._step_hooks.pending_gradients.state()),
        "host": socket.gethostname(),
    }
    sent = [json.loads(text) for text in group.all_gather_text(json.dumps(local))]
    if refusal is not None:
        raise refusal
    if len({each["asked"] for each in sent}) > 1:
        raise MismatchError(
            "the ranks request different recipes: "
            + by_value([each["asked"] or "one that it refuses" for each in sent])
            + ". Nothing was changed. Call session.switch with the same recipe on every rank: decide on one rank, or "
            "by numbers that all ranks have."
        )
    if len({each["step"] for each in sent}) > 1:
        raise LoopError(
            f"the ranks call session.switch() after different steps: {by_value([str(each['step']) for each in sent])}. "
            "Nothing was changed. Call it on every rank after the same step."
        )
    return sorted({name for each in sent for name in each["held"]}), [each["host"] for each in sent]


@torch.no_grad()
def _change(session: SwitchingSession, following: Following, held: Sequence[str]) -> float:
    """Switch the recipe, on every rank after the same step. Returns the bytes that this rank has sent for it."""
    before, stage, nbytes, pending = session._synchronizer, session._stages.now, 0.0, dict[str, Tensor]()
    if not session._group.alone:
        before.flush()
        forget_shared_variance(session.optimizer)
        compressor, at = session.recipe.compressor, session._at()
        following_copies = session._stages.loop.copies.following
        match stage:
            case GradientStage():
                pending = unsent_gradients(before.buckets, compressor, at)
                add_pending(pending, on_their_way(before))
            case AveragingStage():
                with following_copies(session._parameters.values()):
                    nbytes += merge_parameters(stage, before.buckets, compressor, at, session._group)
            case GossipStage():
                with following_copies(session._parameters.values()):
                    copy_parameters(before.merge() or {}, {name: p.detach() for name, p in session._parameters.items()})
        if stage.local_parameters:
            averaged = list(session._buffers.averaged().values())
            nbytes += merge_state(
                session.model, session.optimizer, session._parameters, averaged, session._loop_scaler, session._group
            )
    add_pending(pending, session._step_hooks.pending_gradients.take())
    enter(session, following)
    following_stage = following.stages.now
    if isinstance(following_stage, GradientStage):
        pending = take_up(pending, session._synchronizer.buckets)
    if not following_stage.local_parameters:
        pending, spent = _mean(session, pending, held)
        nbytes += spent
    session._step_hooks.pending_gradients.put(pending)
    if stage.follows_speed and not session._group.alone:
        uneven_inputs.divide_data(session._world, session._group, [1] * session._transport.world)
    return nbytes


def enter(session: SwitchingSession, following: Following) -> None:
    """Replace the old synchronizer, which has no unsent values any more."""
    before, since = session._synchronizer, following.stages.since
    passes = before.passes
    before.close()
    prefer_collective(session._transport, requested_collective(following.recipe.topology.collective))
    for parameter in session._parameters.values():
        parameter.grad = None  # a view of a bucket that is dropped
    now = following.stages.begin(session._parameters, following.fragments)
    now.continue_from(before)
    now.begin_at(since)
    now.reference = None  # weights have another unit: of a batch, or of all batches since the last round
    session._layout = following.stages.layout_text(session._parameters)
    session._stages, session._synchronizer = following.stages, now
    session.recipe = session.status.recipe = following.recipe
    session._step_hooks.switch(following.recipe, session._transport)
    session._passes_before += now.passes - passes
    session._muted_at = -1


def _mean(session: SwitchingSession, pending: Unsent, held: Sequence[str]) -> tuple[Unsent, float]:
    """The mean over all ranks of values without a residual; a rank may lack some names of `held`."""
    names = sorted({*pending, *held})
    if session._group.alone or not names:
        return pending, 0.0
    whole = [pending.get(name, _nothing(session._parameters[name])).contiguous() for name in names]
    means, nbytes = all_means([each.view(-1) for each in whole], session._group)
    return {name: mean.view(each.shape) for name, mean, each in zip(names, means, whole, strict=True)}, nbytes


def _nothing(parameter: Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype))


def _report_switch(session: SwitchingSession, before: Recipe, reason: str, nbytes: float) -> None:
    step, after = session._synchronizer.step, session.recipe
    events.emit(
        events.RecipeSwitched(
            step=step,
            before=repr(before),
            after=repr(after),
            reason=reason,
            bytes_sent=nbytes,
            period=period_of(after),
        )
    )
    if session._transport.rank == 0 and not session._group.alone:
        because = f": {reason}" if reason else ""
        events.notice(f"after step {step} the recipe {before} was switched to {after}{because}")
        if caution := after.strategy.caution(after.compressor):
            events.notice(caution)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def follow(session: SwitchingSession, states: Sequence[Mapping[str, Any]]) -> None:
    """Before a checkpoint is restored: switch to the recipe with which it was written, if its run started with this
    session's recipe, and take over its pending gradients."""
    transport = session._transport
    saved = session_checkpoint.own_state(states, transport)
    attached, since = saved.get("attached", saved["recipe"]), saved.get("since", 0)
    in_force = saved["recipe"], since
    switched = in_force != (attached, 0) or session._stages.since
    began_alike = reshard.alike(attached, repr(session._attached)) or saved["recipe"] == repr(session._attached)
    if switched and began_alike and in_force != (repr(session.recipe), session._stages.since):
        if not session._group.comm_thread.is_fixed:
            raise CheckpointError(
                f"this checkpoint was written under {saved['recipe']!r}, after session.switch(), but workers of an "
                "elastic run read their recipe from the script. Continue with a fixed number of workers: "
                "gossamer run --workers 4."
            )
        before = session.recipe
        enter(session, laid_out(session, resolve(saved["recipe"], transport.world), since))
        if session.recipe != before:
            _report_switch(session, before, "the checkpoint was written under it", 0.0)
    writers = [saved] if saved["world"] == transport.world else states
    session._step_hooks.pending_gradients.resume([each["state"] for each in writers])


# -- one model and optimizer state for ranks that trained separately ---------------------------------------------------


@torch.no_grad()
def merge_parameters(
    stage: AveragingStage, buckets: Sequence[Bucket], compressor: Compressor, at: AggregationContext, group: GroupCalls
) -> float:
    """Overwrite the parameters of all ranks by x = mean over ranks of (x_i - r_i). Returns the bytes sent for it.

    r_i is the part of this worker's steps that no round has sent: a residual of pseudo-gradients, in the parameters'
    unit, and 0 if it stayed in x_i (DelayedAveraging). With LocalSGD, x is the result of its rounds without
    compression. Rounds in flight have landed.
    """
    dtypes = [accumulation_dtype(bucket.flat.dtype) for bucket in buckets]
    flats = [bucket.gather_parameters().to(dtype, copy=True) for bucket, dtype in zip(buckets, dtypes, strict=True)]
    for bucket, flat in zip(buckets, flats, strict=True):
        if stage.strategy.merges_own(compressor):
            forget_residuals(bucket)  # but keep undelivered values of shards, which are in no rank's parameters
        flat.sub_(unsent(bucket, compressor, at))
    means, nbytes = all_means(flats, group)
    for bucket, mean in zip(buckets, means, strict=True):
        bucket.scatter_parameters(mean)
    return nbytes


@torch.no_grad()
def merge_state(
    model: nn.Module,
    optimizer: Optimizer,
    parameters: Mapping[str, Parameter],
    averaged: Sequence[Tensor],
    scaler: Stateful,
    group: GroupCalls,
) -> float:
    """Overwrite `averaged` (the model's statistics) and the optimizer's moments by their means over the ranks, and all
    other state that differs by rank 0's. Returns the bytes sent for the means.

    Moments that only some ranks have are copied from rank 0 as well.
    """
    moments = _moments(optimizer, parameters)
    gathered = [json.loads(text) for text in group.all_gather_text(json.dumps(sorted(moments)))]
    alike = all(names == gathered[0] for names in gathered)
    state = AveragedState([*averaged, *(moments[name] for name in sorted(moments) if alike)])
    numbers, nbytes = state.numbers(), 0.0
    if numbers is not None:
        (mean,), nbytes = all_means([numbers], group)
        state.replace(mean, 0.0)
    parts = [optimizer, scaler]
    held = f"{optimizer_digest(optimizer)} {scaler.state_dict()}"
    if len(set(group.all_gather_text(held))) > 1:
        tensors = [*model.parameters(), *model.buffers()]
        group.together(lambda: uneven_inputs.take_over(tensors, parts, 0, group))
    return nbytes


def _moments(optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """State of the optimizer for every entry of a parameter, by name."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
    }


def all_means(flats: Sequence[Tensor], group: GroupCalls) -> tuple[Sequence[Tensor], float]:
    """The means over all ranks, written in place, and the bytes that this rank has sent for them."""
    if not flats:
        return (), 0.0
    performed: ScriptCost = group.together(lambda: run_script(exact_means(flats), group.transport))
    use_on_current_stream(performed.result)
    return performed.result, performed.bytes_sent
