"""Auto recipe: compares all ranks' measurements every few steps, and switches the recipe by gossamer.train.auto.

A look is a small all-gather between two steps, after a step that every rank has made. The step of the next look is
derived from these measurements, so all ranks look after the same step and make the same decision. If steps suddenly
wait, a rank requests a look in the report at the end of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.recipe import Recipe, period_of
from gossamer.algorithms.strategies import ALIGN, AveragingStage
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.errors import AttachError
from gossamer.train.auto.decision import RungChange, decide
from gossamer.train.auto.ladder import LadderRung, admitted, beginning, is_adaptive
from gossamer.train.auto.measurement import Measurement, asks_for_look, slow_steps
from gossamer.train.auto.rule import Rule, RuleState
from gossamer.train.auto.rung_cost import rung_costs
from gossamer.train.engine.model_buffers import moving_buffers
from gossamer.train.moments.aligned_moment import check_alignable
from gossamer.train.session import lifecycle_events
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.session_status import SessionStatus
from gossamer.train.session.validation import refuse_sparse_gradients, refuse_swapping
from gossamer.train.synchronizers.base import Synchronizer
from gossamer.train.synchronizers.in_flight import norm_of

PART = "recipe_choice"  # its name in a checkpoint


class ChosenSession(Protocol):
    """The part of a session that a choice reads and changes."""

    model: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    status: SessionStatus
    _group: GroupCalls
    _synchronizer: Synchronizer
    _between_steps: list[Callable[[], None]]

    @property
    def should_stop(self) -> bool: ...
    def switch(self, recipe: Recipe, *, reason: str = "") -> None: ...
    def track(self, loader: None = None, /, **part: Any) -> Any: ...


def refuse_fixed_choice(auto: Auto, global_batch: int | None) -> None:
    """Raise AttachError if the recipe could not change."""
    if is_elastic():
        raise AttachError(
            f"an elastic run cannot have the recipe {auto!r}: workers that join later read the recipe from their "
            "script, which does not name the current one. Write a fixed one, such as Int8(); or run a fixed number of "
            "workers: gossamer run --workers 4."
        )
    if global_batch is not None:
        raise AttachError(
            f"{auto!r} uses recipes without a global batch, so a step would not have {global_batch} samples. Write "
            f"EveryStep(global_batch={global_batch}, batch=...) + Int8(), or leave global_batch out."
        )


def first_recipe(auto: Auto, model: nn.Module, optimizer: Optimizer, workers: int) -> Recipe:
    """The initial recipe, among those that support this model."""
    rungs = admitted(auto, adaptive=is_adaptive(optimizer))
    return beginning([rung for rung in rungs if _serves(rung.recipe(workers), model, optimizer)]).recipe(workers)


def choose_while_training(session: ChosenSession, auto: Auto, rule: Rule | None = None) -> None:
    """Let a new session change its recipe from now on. With one worker it does nothing."""
    if not session._group.alone:
        choice = RecipeChoice(session, auto, rule or Rule())
        session.track(**{PART: choice})
        session._between_steps.append(choice.look)


class RecipeChoice:
    """The recipe choice of one session. Its state is in checkpoints, so a resumed run makes the same decisions."""

    def __init__(self, session: ChosenSession, auto: Auto, rule: Rule) -> None:
        transport, adaptive = session._group.transport, is_adaptive(session.optimizer)
        self._session, self._rule = session, rule
        self._state = RuleState(next_look=max(period_of(session.recipe), RuleState.next_look))
        parts = session.model, session.optimizer
        rungs = [each for each in admitted(auto, adaptive=adaptive) if _serves(each.recipe(transport.world), *parts)]
        self._recipes = [rung.recipe(transport.world) for rung in rungs]
        self._costs = _costs(session, rungs, adaptive=adaptive)
        self._look_seconds: float | None = None
        self._exchange_seconds: float | None = None
        self._looked_at = session.status.clock()
        self._left = False  # whether the script has switched to another recipe

    def look(self) -> None:
        """Called after a step. All ranks look after the same step."""
        session, synchronizer = self._session, self._session._synchronizer
        asked, synchronizer.asked_to_look = synchronizer.look_asked, self._asks()
        due = (asked or synchronizer.step >= self._state.next_look) and synchronizer.all_trained
        if session.should_stop or self._left or not due:
            return
        if session.recipe not in self._recipes:
            self._left = True
            return
        begun = session.status.clock()
        if self._exchange_seconds is None:  # the first decision needs the latency, to separate it from the rate
            self._gathered("")
        received = [Measurement.from_text(each) for each in self._gathered(self._measured().to_text())]
        rung = self._recipes.index(session.recipe)
        self._state, change = decide(
            self._rule, self._costs, replace(self._state, rung=rung), received, synchronizer.step
        )
        session.status.recent.clear()
        synchronizer.asked_to_look = False
        self._looked_at = session.status.clock()
        self._look_seconds = self._looked_at - begun
        if change is not None:
            self._switch(change)

    def _gathered(self, text: str) -> list[str]:
        """Texts of all ranks; the duration is that of a round trip."""
        started = self._session.status.clock()
        received = self._session._group.all_gather_text(text)
        self._exchange_seconds = self._session.status.clock() - started
        return received

    def _switch(self, change: RungChange) -> None:
        self._session.switch(self._recipes[change.after], reason=change.reason)

    def _asks(self) -> bool:
        """Whether this rank requests a look. Local steps send no report; their looks are at merges."""
        status, state = self._session.status, self._state
        rested = status.clock() - self._looked_at >= state.rest_seconds
        return rested and asks_for_look([step for step, _ in status.recent], state.usual_step)

    def _measured(self) -> Measurement:
        session = self._session
        recent = [*session.status.recent]
        steps = [step for step, _ in recent]
        slow = slow_steps(steps, self._state.usual_step)
        stage = session.recipe.strategy.steady_stage
        gradients = [] if stage.local_parameters else _gradients(session.optimizer)
        unsent = [tensor for bucket in session._synchronizer.buckets for tensor in bucket.unsent]
        rates = [float(group["lr"]) for group in session.optimizer.param_groups if "lr" in group]
        return Measurement(
            steps=slow or steps,
            covers_steps=len(slow) or session._synchronizer.step - self._state.looked_at,
            bytes_sent=fmean(nbytes for _, nbytes in recent) if recent else 0.0,
            look_seconds=self._look_seconds,
            exchange_seconds=self._exchange_seconds,
            learning_rate=max(rates, default=None),
            gradient_norm=norm_of(gradients) if gradients else None,
            residual_norm=norm_of(unsent) if unsent else None,
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**self._state.to_json(), "rungs": self._names()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = dict(state)
        same_rungs = fields.pop("rungs", None) == self._names()
        self._state = RuleState.from_json(fields)
        if not same_rungs:  # of other options, such as more steps: its places on the ladder are others here
            self._state = replace(self._state, lost=(), closed_from=None, closed_until=0)
        self._session.status.recent.clear()

    def _names(self) -> list[str]:
        return [cost.name for cost in self._costs]


def _costs(session: ChosenSession, rungs: Sequence[LadderRung], *, adaptive: bool) -> Sequence[Any]:
    transport, buckets = session._group.transport, session._synchronizer.buckets
    model = lifecycle_events.begun(session.model, session.optimizer, session.recipe, [buckets], transport)
    return rung_costs(rungs, model, transport.world, adaptive=adaptive, buffers=moving_buffers(session.model))


def _serves(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> bool:
    try:
        refuse_sparse_gradients(model, recipe)
        refuse_swapping(optimizer, recipe)
        stage = recipe.strategy.steady_stage
        if isinstance(stage, AveragingStage) and stage.strategy.on_merge == ALIGN:
            check_alignable(optimizer)
    except AttachError:
        return False
    return True


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """Gradients as used by the optimizer; empty if they were cleared already."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None and not parameter.grad.is_sparse]
