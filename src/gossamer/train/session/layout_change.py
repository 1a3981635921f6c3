"""Layout change: makes a synchronizer again for other parameters, which remembers what it can.

LayoutChanges has the calls of a session that lead here: `reset_compressor_state` after parameters were resized, and
`add_parameters` for new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.compressors.sharded import settle
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import GossipStage, GradientStage
from gossamer.base.aggregation import AggregationContext
from gossamer.train.engine.model_buffers import ModelBuffers
from gossamer.train.engine.parameter_views import copy_parameters, trainable
from gossamer.train.session.added_parameters import agreed_on_all_ranks
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.model_parts import ModelParts
from gossamer.train.session.owed_gradients import add_owed, on_their_way
from gossamer.train.session.parameter_form import ParameterForm
from gossamer.train.session.session_checkpoint import copy_kept
from gossamer.train.session.step_hooks import StepHooks
from gossamer.train.sharding.local_shards import WholeParameters
from gossamer.train.synchronizers.base import Synchronizer
from gossamer.train.synchronizers.stages import StageSequence


class LayoutChanges:
    """A session's calls that change which parameters it averages, or in what shapes."""

    model: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    _parameters: dict[str, Parameter]
    _parts: ModelParts
    _form: ParameterForm
    _group: GroupCalls
    _stages: StageSequence
    _synchronizer: Synchronizer
    _step_hooks: StepHooks
    _buffers: ModelBuffers
    _layout: str

    def _at(self) -> AggregationContext:
        raise NotImplementedError

    def _adopt(self, views: WholeParameters) -> None:
        raise NotImplementedError

    @torch.inference_mode(False)  # what is made here is trained with
    def reset_compressor_state(self, *names: str) -> None:
        """Clear the compressor state (residuals, momentum) of the named parameters.

        Call it after resizing parameters, with all of them at once, on every rank.
        """
        self._parts.refuse("session.reset_compressor_state()")
        self._form.refuse_unnamed(names, now := trainable(self.model))
        self._lay_out(names, now)

    @torch.inference_mode(False)
    def add_parameters(self) -> tuple[str, ...]:
        """Average the trainable parameters that the model has gained since attach, too: a new head, an adapter, layers
        that were frozen, parameters that were replaced.

        Call it on every rank after the same step, right after optimizer.step(), once the model is the same everywhere.
        Each new parameter and the buffers of each new module get rank 0's values. What the recipe remembers of the
        other parameters stays; parameters that are frozen now, or not in the model, are left out from now on. With
        Gossip all workers continue from the mean of their parameters. Give new parameters to the attached optimizer,
        or, under recipes that average gradients in every backward pass, to another one:

            model.head = nn.Linear(16, 4)
            optimizer.add_param_group({"params": model.head.parameters()})
            session.add_parameters()

        A checkpoint that is saved later can be loaded by a session that was attached to a model with these parameters.

        Returns:
            The names of the parameters that are averaged from now on and were not before.

        Raises:
            LoopError: with servers, `Gossip('pairwise')` and elastic runs; within a step; and where other ranks train
                on or make another call.
            AttachError: for a session with `mesh=`, and for parameters that attach would refuse.
            MismatchError: where the ranks' models have gained different parameters. Nothing was changed then.
        """
        self._parts.refuse("session.add_parameters()")
        added = agreed_on_all_ranks(self)
        if not (added.names or added.gone):
            return ()
        gossip = isinstance(self._stages.now, GossipStage) and not self._group.alone
        if gossip:
            means = self._synchronizer.merge() or {}
            copy_parameters(means, {name: each.detach() for name, each in self._parameters.items() if name in means})
        self._buffers.see_model()
        self._lay_out(added.names, added.now)
        if gossip:
            self._synchronizer.restart()
        return added.names

    def _lay_out(self, names: Collection[str], now: Mapping[str, Parameter]) -> None:
        owed = self._step_hooks.owed.take()
        if isinstance(self._stages.now, GradientStage):
            self._synchronizer.flush()
            add_owed(owed, on_their_way(self._synchronizer))
        self._synchronizer, self._layout = laid_out_anew(
            self._synchronizer,
            names,
            now,
            self._stages,
            self._group,
            self._at(),
            lambda: self._adopt(WholeParameters(now)),
        )
        kept = self._parameters.keys() - {*names}
        self._step_hooks.owed.put({name: tensor for name, tensor in owed.items() if name in kept})


def laid_out_anew(
    before: Synchronizer,
    names: Collection[str],
    now: Mapping[str, Parameter],
    stages: StageSequence,
    group: GroupCalls,
    at: AggregationContext,
    adopt: Callable[[], None],
) -> tuple[Synchronizer, str]:
    """The synchronizer that goes on where `before` ends, and its layout's fingerprint. All ranks call it.

    names: parameters about which nothing is remembered any more; now: all of them, as they are; adopt: called once what
    `before` remembers is safe.
    """
    if group.alone and not before.buckets:
        adopt()
        return before, stages.layout_text(now, stages.fragments(now))
    before.flush()
    if names and not group.alone:
        group.broadcast_([now[name].detach() for name in names], 0)  # where they were trained apart, or made anew
    for bucket in before.buckets:
        settle(bucket.state, at)  # parts will lie elsewhere
    old = before.remembered()
    adopt()
    before.close()
    following = stages.begin(now, fragments := stages.fragments(now))
    copy_kept(old, following.remembered(), without=names)
    following.take_over_from(before)
    return following, stages.layout_text(now, fragments)
