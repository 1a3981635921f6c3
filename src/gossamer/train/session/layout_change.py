"""Layout change: rebuilds the synchronizer for other parameters and keeps the compressor state that still applies.

LayoutChanges implements `reset_compressor_state` (after parameters were resized) and `add_parameters` of a session.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.compressors.sharded import settle
from gossamer.algorithms.strategies import GossipStage, GradientStage
from gossamer.base.aggregation import AggregationContext
from gossamer.errors import AttachError, GossamerError, LoopError, MismatchError
from gossamer.train.engine.model_buffers import ModelBuffers
from gossamer.train.engine.parameter_check import ParameterForm, listed
from gossamer.train.engine.parameter_views import copy_parameters, trainable
from gossamer.train.engine.step_decision import Presence, by_value
from gossamer.train.moments.frozen_variance import FrozenVariance
from gossamer.train.moments.take_over import ownership
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.model_parts import ModelParts
from gossamer.train.session.pending_gradients import add_pending, on_their_way
from gossamer.train.session.session_base import SessionBase
from gossamer.train.session.session_checkpoint import copy_kept
from gossamer.train.session.startup_checks import hand_out
from gossamer.train.session.step_hooks import StepHooks
from gossamer.train.session.validation import refuse_added, refuse_sparse_gradients
from gossamer.train.sharding.local_shards import WholeParameters
from gossamer.train.synchronizers.base import Synchronizer
from gossamer.train.synchronizers.stages import StageSequence


class LayoutChanges(SessionBase):
    """Session methods that change which parameters are averaged, or their shapes."""

    model: nn.Module
    optimizer: Optimizer
    _parameters: dict[str, Parameter]
    _parts: ModelParts
    _form: ParameterForm
    _step_hooks: StepHooks
    _buffers: ModelBuffers

    def _at(self) -> AggregationContext:
        raise NotImplementedError

    def _adopt(self, views: WholeParameters) -> None:
        raise NotImplementedError

    @torch.inference_mode(False)  # the new buffers are trained with
    def reset_compressor_state(self, *names: str) -> None:
        """Clear the compressor state (residuals, momentum) of the named parameters.

        Call it after resizing parameters, with all of them at once, on every rank.

        Args:
            names: parameter names, as in model.named_parameters().

        Example:
            >>> session.reset_compressor_state("weight")
        """
        self._parts.refuse("session.reset_compressor_state()")
        self._form.refuse_unnamed(names, now := trainable(self.model))
        self._rebuild_layout(names, now, {})

    @torch.inference_mode(False)  # the new buffers are trained with
    def add_parameters(self) -> tuple[str, ...]:
        """Average the trainable parameters that the model has gained since attach, too: a new head, an adapter, layers
        that were frozen, parameters that were replaced.

        Call it on every rank after the same step, right after optimizer.step(), once the model is the same everywhere.
        Each new parameter and the buffers of each new module get rank 0's values. The compressor state of the other
        parameters stays, also of those with another name, as after torch.nn.utils.prune; parameters that are frozen
        now, or not in the model, are left out from now on. With Gossip all workers continue from the mean of their
        parameters. Give new parameters to the attached optimizer, or, under
        recipes that average gradients in every backward pass, to another one. A checkpoint that is saved later can be
        loaded by a session that was attached to a model with these parameters.

        Returns:
            The names of the parameters that are averaged from now on and were not before.

        Raises:
            LoopError: for parameter servers, `Gossip('pairwise')` and elastic runs; within a step; and if other ranks
                continue training or make another call.
            AttachError: for a session with `mesh=`, and for parameters that attach would refuse.
            MismatchError: models of the ranks gained different parameters. Nothing was changed then.

        Example:
            >>> model.head = torch.nn.Linear(1, 4)
            >>> optimizer.add_param_group({"params": model.head.parameters()})
            >>> session.add_parameters()
            ('head.weight', 'head.bias')
        """
        self._parts.refuse("session.add_parameters()")
        added = agreed_on_all_ranks(self)
        if not added:
            return ()
        gossip = isinstance(self._stages.now, GossipStage) and not self._group.alone
        if gossip:
            means = self._synchronizer.merge() or {}
            copy_parameters(means, {name: each.detach() for name, each in self._parameters.items() if name in means})
        self._buffers.see_model()
        self._rebuild_layout(added.names, added.now, added.renamed)
        if gossip:
            self._synchronizer.restart()
        return added.names

    def _rebuild_layout(self, names: Collection[str], now: Mapping[str, Parameter], renamed: Mapping[str, str]) -> None:
        pending = self._step_hooks.pending_gradients.take()
        if isinstance(self._stages.now, GradientStage):
            self._synchronizer.flush()
            add_pending(pending, on_their_way(self._synchronizer))
        self._synchronizer, self._layout = rebuilt_layout(
            self._synchronizer,
            names,
            now,
            renamed,
            self._stages,
            self._group,
            self._at(),
            lambda: self._adopt(WholeParameters(now)),
        )
        kept = self._parameters.keys() - {*names}
        pending = by_new_name(pending, renamed)
        self._step_hooks.pending_gradients.put({name: tensor for name, tensor in pending.items() if name in kept})


def rebuilt_layout(
    before: Synchronizer,
    names: Collection[str],
    now: Mapping[str, Parameter],
    renamed: Mapping[str, str],
    stages: StageSequence,
    group: GroupCalls,
    at: AggregationContext,
    adopt: Callable[[], None],
) -> tuple[Synchronizer, str]:
    """Build the synchronizer that replaces `before`, for another layout. All ranks call it.

    Args:
        names: parameters with compressor state to discard.
        now: all current parameters.
        renamed: old names -> current names of parameters that the model holds under another name.
        adopt: called once the state of `before` is copied.

    Returns:
        The new synchronizer and the fingerprint of its layout.
    """
    if group.alone and not before.buckets:
        adopt()
        return before, stages.layout_text(now)
    before.flush()
    if names and not group.alone:
        group.broadcast_([now[name].detach() for name in names], 0)  # locally trained or newly created ones may differ
    for bucket in before.buckets:
        settle(bucket.state, at)  # shards move to other ranks
    old = by_new_name(before.remembered(), renamed)
    adopt()
    before.close()
    following = stages.begin(now, stages.fragments(now))
    copy_kept(old, following.remembered(), without=names)
    following.take_over_from(before)
    return following, stages.layout_text(now)


def renamed_in(model: nn.Module, attached: Mapping[str, Parameter]) -> dict[str, str]:
    """Names at attach -> names now of attached parameters that the model holds under another name, as after
    torch.nn.utils.prune."""
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    found = {name: names.get(id(parameter), name) for name, parameter in attached.items()}
    return {name: new for name, new in found.items() if new != name}


def by_new_name(named: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """`named` with the current names as keys. renamed: old names -> current names."""
    return {renamed.get(name, name): value for name, value in named.items()}


# -- parameters that the model has gained ------------------------------------------------------------------------------

# All ranks compare their additions before anything changes, so that a refusal leaves every rank as it was.

CALL = "session.add_parameters()"


@dataclass(frozen=True)
class AddedParameters:
    """All parameters to average by name, and how they differ from those averaged so far."""

    now: Mapping[str, Parameter]
    names: tuple[str, ...]
    gone: tuple[str, ...]  # names of parameters that are frozen now, or not in the model
    renamed: Mapping[str, str]  # names at attach -> names now, as after torch.nn.utils.prune

    def __bool__(self) -> bool:
        return bool(self.names or self.gone or self.renamed)

    def text(self) -> str:
        shapes = {name: f"{tuple(self.now[name].shape)} {self.now[name].dtype}" for name in self.names}
        return json.dumps({"added": shapes, "gone": sorted(self.gone), "renamed": sorted(self.renamed.items())})


def agreed_on_all_ranks(session: LayoutChanges) -> AddedParameters:
    """Parameters that the model has gained or lost, equal on every rank; new ones get rank 0's values and buffers.

    Raises LoopError, AttachError, RecipeError or MismatchError; nothing has changed then.
    """
    _refuse_unable(session)
    found, refusal = _added(session.model, session._parameters), None
    try:
        _refuse_unserved(session, found)
    except GossamerError as error:
        refusal = error
    if not session._group.alone:
        session._synchronizer.meet_to_save(Presence.ADDING)
        _compare(session, found, refusal)
    if refusal is not None:
        raise refusal
    if not session._group.alone and found:
        gained = session._step_hooks.watch.gained_modules()
        buffers = [each for module in gained for each in module._buffers.values() if each is not None]
        frozen = [each for each in session.model.parameters() if not session._step_hooks.watch.knows(each)]
        hand_out([*frozen, *buffers], session._group.all_gather_text, session._group.broadcast_)
    return found


def _added(model: nn.Module, attached: Mapping[str, Parameter]) -> AddedParameters:
    now, renamed = trainable(model), renamed_in(model, attached)
    known = {id(parameter) for parameter in attached.values()}
    names = tuple(name for name, parameter in now.items() if id(parameter) not in known)
    gone = tuple(name for name in attached if name not in now and name not in renamed)
    return AddedParameters(now, names, gone, renamed)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refuse_unable(session: LayoutChanges) -> None:
    """Raise LoopError for sessions that cannot change their parameters."""
    again = "Call session.close() on every rank and gossamer.attach(model, optimizer, recipe) again"
    if not session._group.comm_thread.is_fixed:
        raise LoopError(
            f"{CALL} does not work in an elastic run: a worker that joins later builds the model that its script "
            "builds before gossamer.attach, without these parameters. Build them before attach and freeze them until "
            "they are needed, or run a fixed number of workers: gossamer run --workers 4."
        )
    if not session._group.alone and not all(stage.in_lock_step for stage in session.recipe.strategy.stages):
        raise LoopError(
            f"{CALL} does not work with {session.recipe.strategy!r}: the other side holds the parameters in the "
            f"layout that they had at attach. {again}, with the new parameters in the model."
        )
    if session._synchronizer.controls.muted or not session._synchronizer.between_steps:
        raise LoopError(
            f"{CALL} between backward() and optimizer.step(), or within session.no_sync(): these gradients would be "
            "lost. Call it right after optimizer.step(), where session.accumulating is False."
        )


def _refuse_unserved(session: LayoutChanges, found: AddedParameters) -> None:
    """Raise AttachError for parameters that attach would refuse, or that the recipe cannot take in at this step."""
    added = {name: found.now[name] for name in found.names}
    refuse_added(session.model, added)
    refuse_sparse_gradients(session.model, session.recipe)
    if session._group.alone:
        return
    held = {id(parameter) for group in session.optimizer.param_groups for parameter in group["params"]}
    owned = ownership(session.recipe.compressor, added)
    if outside := [name for name in owned if id(added[name]) not in held]:
        raise AttachError(
            f"{session.recipe.compressor!r} applies the attached optimizer's momentum, and that optimizer does not "
            f'hold {listed(outside)}. Call optimizer.add_param_group({{"params": new_parameters}}) first.'
        )
    momentum = session._step_hooks.momentum
    if owned and isinstance(momentum, FrozenVariance) and session._synchronizer.step >= momentum.owner.start:
        raise AttachError(
            f"{session.recipe.compressor!r} has frozen Adam's variance after its warm-up of {momentum.owner.start} "
            f"steps, and {listed(list(owned))} would have none and never move. Call session.close() and "
            "gossamer.attach(...) again, which begins another warm-up, or CompressedAdam(), which keeps updating it."
        )


def _compare(session: LayoutChanges, found: AddedParameters, refusal: GossamerError | None) -> None:
    """Raise MismatchError on every rank unless all ranks add the same parameters after the same step."""
    own: dict[str, Any] = {
        "what": f"no parameter, {refusal}" if refusal is not None else found.text(),
        "step": session._synchronizer.step,
    }
    received = [json.loads(text) for text in session._group.all_gather_text(json.dumps(own))]
    if refusal is None and len({each["what"] for each in received}) > 1:
        raise MismatchError(
            f"the ranks add different parameters: {by_value([each['what'] for each in received])}. Nothing was "
            f"changed. Build the same model on every rank before {CALL}."
        )
    if refusal is None and len({each["step"] for each in received}) > 1:
        steps = by_value([str(each["step"]) for each in received])
        raise LoopError(
            f"the ranks call {CALL} after different steps: {steps}. Nothing was changed. Call it on every rank after "
            "the same step."
        )
