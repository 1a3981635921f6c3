"""Added parameters: lets a session average parameters that its model has gained since attach: heads, adapters, copies.

All ranks compare what they are about to add before anything changes, so that a refusal leaves every rank as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.errors import AttachError, GossamerError, LoopError, MismatchError
from gossamer.train.engine.model_buffers import ModelBuffers
from gossamer.train.engine.parameter_views import trainable
from gossamer.train.engine.report import Presence, by_value
from gossamer.train.moments.frozen_variance import FrozenVariance
from gossamer.train.moments.take_over import ownership
from gossamer.train.session.foreign_optimizers import listed
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.startup_checks import hand_out
from gossamer.train.session.step_hooks import StepHooks
from gossamer.train.session.validation import refuse_added, refuse_sparse_gradients
from gossamer.train.synchronizers.base import Synchronizer
from gossamer.train.synchronizers.stages import StageSequence

CALL = "session.add_parameters()"


class AddingSession(Protocol):
    """What is read of one session."""

    model: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    _parameters: dict[str, Parameter]
    _group: GroupCalls
    _stages: StageSequence
    _synchronizer: Synchronizer
    _step_hooks: StepHooks
    _buffers: ModelBuffers


@dataclass(frozen=True)
class AddedParameters:
    """What a session is to average from now on: all of it by name, and the names that it did not."""

    now: Mapping[str, Parameter]
    names: tuple[str, ...]
    gone: tuple[str, ...]  # names of parameters that are frozen now, or not in the model

    def text(self) -> str:
        shapes = {name: f"{tuple(self.now[name].shape)} {self.now[name].dtype}" for name in self.names}
        return json.dumps({"added": shapes, "gone": sorted(self.gone)})


def agreed_on_all_ranks(session: AddingSession) -> AddedParameters:
    """What the model has gained, the same on every rank, with rank 0's values of it and of its modules' buffers.

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
    if not session._group.alone and (found.names or found.gone):
        gained = session._step_hooks.watch.gained_modules()
        buffers = [buffer for module in gained for buffer in module.buffers(recurse=False)]
        frozen = [each for each in session.model.parameters() if not session._step_hooks.watch.knows(each)]
        hand_out([*frozen, *buffers], session._group.all_gather_text, session._group.broadcast_)
    return found


def _added(model: nn.Module, attached: Mapping[str, Parameter]) -> AddedParameters:
    now = trainable(model)
    names = tuple(name for name, parameter in now.items() if attached.get(name) is not parameter)
    return AddedParameters(now, names, tuple(name for name in attached if name not in now))


# -- what is refused ---------------------------------------------------------------------------------------------------


def _refuse_unable(session: AddingSession) -> None:
    """Raise LoopError for sessions whose parameters stay what they are, the same on every rank."""
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


def _refuse_unserved(session: AddingSession, found: AddedParameters) -> None:
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
            "gossamer.attach(...) again, which begins another warm-up, or use CompressedAdam(), whose variance moves."
        )


def _compare(session: AddingSession, found: AddedParameters, refusal: GossamerError | None) -> None:
    """Raise MismatchError on every rank where not all add the same parameters after the same step."""
    mine: dict[str, Any] = {
        "what": f"no parameter, {refusal}" if refusal is not None else found.text(),
        "step": session._synchronizer.step,
    }
    heard = [json.loads(text) for text in session._group.all_gather_text(json.dumps(mine))]
    if refusal is None and len({each["what"] for each in heard}) > 1:
        raise MismatchError(
            f"the ranks add different parameters: {by_value([each['what'] for each in heard])}. Nothing was changed. "
            f"Build the same model on every rank before {CALL}."
        )
    if refusal is None and len({each["step"] for each in heard}) > 1:
        steps = by_value([str(each["step"]) for each in heard])
        raise LoopError(
            f"the ranks call {CALL} after different steps: {steps}. Nothing was changed. Call it on every rank after "
            "the same step."
        )
