"""Foreign optimizers: refuses steps of other optimizers on parameters if gradients would differ between ranks.

Also here: loops that write to parameters by hand, instead of by an optimizer's step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import GradientStage, Stage
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import LoopError
from gossamer.events import notice
from gossamer.train.engine.autograd_hooks import BackwardMonitor
from gossamer.train.engine.extension import Extension, Extensions
from gossamer.train.engine.parameter_check import NAMED, listed
from gossamer.train.moments.take_over import ownership
from gossamer.train.session.model_watch import ModelWatch
from gossamer.train.session.startup_checks import tensor_hashes

ADD = (
    "Call session.add_parameters() on every rank, between two steps, after adding them to the optimizer: "
    'optimizer.add_param_group({"params": new_parameters}).'
)
LOCAL = "the last backward() was within session.no_sync(): each rank would make a step with its own gradients"

_noticed: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers of parameters that belong to no session


class ForeignOptimizerGuard:
    """Guards the parameters of one session against steps of other optimizers.

    Gradients that are averaged in every backward pass may be used by any optimizer. Averaging at steps of the attached
    optimizer does not happen at other optimizers' steps, and momentum in a compressor belongs to the attached one.

    Args:
        watch: the model's parameters at attach.
        before: parameters that were attached earlier, and may have left the model.
        gives_notice: whether this rank prints notices.
    """

    def __init__(
        self,
        model: nn.Module,
        attached: Optimizer,
        recipe: Recipe,
        parameters: Mapping[str, Parameter],
        watch: ModelWatch | None = None,
        before: WeakParameters | None = None,
        *,
        gives_notice: bool = False,
    ) -> None:
        self._model, self._attached, self._gives_notice = model, attached, gives_notice
        self._watch, self._thread = watch or ModelWatch(model), threading.get_ident()
        self._before = before or WeakParameters()
        self._strangers = WeakParameters()  # parameters of other optimizers that are not in this model
        self._averaged = {id(parameter) for parameter in parameters.values()}
        around = any(acts_around_steps(stage) for stage in recipe.strategy.stages)
        reserved = parameters if around else ownership(recipe.compressor, parameters)
        self._reserved = {id(parameters[name]) for name in reserved}
        self._why = (
            f"{recipe} acts at that one's steps: changes by this one would never reach the other workers"
            if around
            else f"{recipe} has added the attached one's momentum to gradients: this one would apply momentum again"
        )

    def refuse_gained(self) -> None:
        """Raise LoopError if the model has gained trainable parameters since attach. Searches the model."""
        if names := self._watch.gained():
            raise LoopError(
                f"the model has trainable parameters that it did not have at attach: {listed(names)}. Their gradients "
                f"are not averaged, so each rank would train its own. {ADD}"
            )

    def refuse_unaveraged(self, attached: Optimizer) -> None:
        """Raise LoopError if the attached optimizer trains a parameter that is not averaged."""
        held = [p for group in attached.param_groups for p in group["params"] if p.requires_grad]
        unknown = [p for p in held if id(p) not in self._averaged and (self._watch.knows(p) or p not in self._before)]
        if not unknown:
            return
        names = _names(self._model, unknown)
        if len(names) < len(unknown):
            raise LoopError(
                f"the optimizer has a parameter of shape {tuple(unknown[0].shape)} that is not in the model, so its "
                "gradient is not averaged. Register it, model.register_parameter(name, parameter), and "
                "call session.add_parameters() on every rank, between two steps."
            )
        raise LoopError(
            f"the optimizer trains parameters that were frozen or missing at attach: {listed(names)}. Their "
            f"gradients are not averaged, so each rank would train its own. {ADD}"
        )

    def check(self, other: Optimizer, *, local: bool) -> None:
        """Raise LoopError before a step of `other` that would not reach the other ranks, or with wrong gradients.

        local: gradients are this rank's own, since nothing was averaged after a backward pass in no_sync().
        """
        if other is self._attached:
            return
        held = [parameter for group in other.param_groups for parameter in group["params"]]
        if any(id(parameter) in self._reserved for parameter in held):
            self._refuse_unless_wrapped(other, self._why)
        elif local and any(id(parameter) in self._averaged for parameter in held):
            self._refuse_unless_wrapped(other, LOCAL)
        elif unknown := [p for p in held if self._is_news(p)]:
            self._refuse_unknown(other, unknown)

    def refuse_inner(self, other: Optimizer) -> None:
        """Raise LoopError if `other` is within the attached optimizer, and makes a step outside of that one's step."""
        if not steps_through(self._attached, other) or not self.shares(other):
            return
        outer, inner = type(self._attached).__name__, type(other).__name__
        name = next((name for name, value in vars(self._attached).items() if value is other), None)
        raise LoopError(
            f"{outer} is attached, but the loop steps the {inner} within it and does not call {outer}.step(). The "
            f"session acts at steps of the attached optimizer, so averaging, checkpoints and stop requests would miss "
            f"the steps and the state of {inner}. Attach the optimizer that makes the steps: gossamer.attach(model, "
            f"{'inner_optimizer' if name is None else f'optimizer.{name}'}, ...)."
        )

    def _is_news(self, parameter: Parameter) -> bool:
        """Whether it is trained, not averaged, and was not examined yet."""
        trained = parameter.requires_grad and parameter.grad is not None and id(parameter) not in self._averaged
        return trained and parameter not in self._strangers

    def shares(self, other: Optimizer) -> bool:
        """Whether `other` changes averaged parameters itself, and not through the attached optimizer."""
        held = (parameter for group in other.param_groups for parameter in group["params"])
        return any(id(parameter) in self._averaged for parameter in held) and not steps_through(other, self._attached)

    def _refuse_unless_wrapped(self, other: Optimizer, why: str) -> None:
        if steps_through(self._attached, other) or steps_through(other, self._attached):
            return
        raise LoopError(
            f"{type(other).__name__} is about to change parameters that are attached with another optimizer, "
            f"{type(self._attached).__name__}, and {why}. "
            "Call session.close() and gossamer.attach(model, new_optimizer, ...) before training continues with a new "
            "one. Two at a time, such as Muon for matrices and AdamW for the rest, can share gradients that are "
            "averaged in backward(), as by EveryStep() + Dense(); otherwise write one class whose step() makes both "
            "steps, and attach it: class Both in examples/muon.py."
        )

    def _refuse_unknown(self, other: Optimizer, unknown: Sequence[Parameter]) -> None:
        if names := _names(self._model, unknown):
            raise LoopError(
                f"{type(other).__name__} trains parameters that were frozen or missing at attach: {listed(names)}. "
                f"Their gradients are not averaged, so each rank would train its own. {ADD}"
            )
        self._strangers.add(*unknown)
        models = [session.model for session in open_sessions() if session.model is not None]
        nowhere = [p for p in unknown if not any(_names(model, [p]) for model in models)]
        here = self._gives_notice and threading.get_ident() == self._thread  # other threads step modules of other ranks
        if nowhere and here and other not in _noticed:
            _noticed.add(other)
            several = len(nowhere) > 1
            shapes = ", ".join(str(tuple(p.shape)) for p in nowhere[:NAMED]) + ", ..." * (len(nowhere) > NAMED)
            notice(
                f"{type(other).__name__} trains {len(nowhere)} parameter{'s' * several} of shape {shapes} that "
                f"belong{'s' * (not several)} to no session: {'their gradients are' if several else 'its gradient is'} "
                "not averaged, and each rank trains its own. To average, make each an nn.Parameter and attach them, "
                f"too: gossamer.attach(nn.ParameterList(parameters), optimizer) with this {type(other).__name__}. "
                "With one optimizer for all: model.register_parameter(name, parameter) before gossamer.attach."
            )


class WeakParameters:
    """A set of parameters by identity, with weak references."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[Parameter]] = {}

    def add(self, *parameters: Parameter) -> None:
        self._held |= {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def __contains__(self, parameter: Parameter) -> bool:
        reference = self._held.get(id(parameter))
        return reference is not None and reference() is parameter


def _names(model: nn.Module, parameters: Sequence[Parameter]) -> list[str]:
    """Names of those `parameters` that are in the model."""
    wanted = {id(parameter) for parameter in parameters}
    return [name.replace("_orig_mod.", "") for name, each in model.named_parameters() if id(each) in wanted]


def acts_around_steps(stage: Stage) -> bool:
    """Whether the stage averages something other than gradients."""
    return not isinstance(stage, GradientStage)


def steps_through(outer: Optimizer, inner: Optimizer, depth: int = 3) -> bool:
    """Whether `outer` wraps `inner`, as SAM or Lookahead do, so that its steps are the inner one's."""
    return any(part is inner or (depth > 0 and steps_through(part, inner, depth - 1)) for part in _parts(outer))


def _parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    for value in [*vars(optimizer).values()]:  # a copy, since another thread may set attributes, as its scheduler does
        several = value if isinstance(value, (list, tuple)) else [value]
        yield from (each for each in several if isinstance(each, Optimizer))


# -- updates by hand ---------------------------------------------------------------------------------------------------

# Strategies that act at the optimizer's steps see none in a loop that writes to parameters itself and would never
# communicate. Gradients averaged in backward() work for it, except inside backward(), where a gradient is not averaged
# yet. A write through `parameter.data` does not change torch's version counters, so checksums of the parameters are
# compared around each backward pass. This ends with the first optimizer step, and after the first passes without a
# change. A loop without backward(), as with torch.func.grad, calls no hook after its first forward pass: the end of an
# epoch or of the session reports it.

MOST_PASSES = 16  # without an optimizer step or a change; a loop that updates by hand changes parameters sooner
CHANGES = 2  # between passes, before an error: a single one may be a checkpoint loaded after a first dry pass


class ManualUpdates(Extension):
    """Watches the parameters of one session until an optimizer makes a step.

    recipe: returns the current one. use: called when averaged gradients were used by hand.
    """

    def __init__(
        self,
        model: nn.Module,
        attached: Optimizer,
        recipe: Callable[[], Recipe],
        use: Callable[[], None],
        extensions: Extensions,
    ) -> None:
        self._model, self._attached = model, attached
        self._recipe, self._use, self._extensions = recipe, use, extensions
        self._parameters: Sequence[Parameter] = ()
        self._monitor: BackwardMonitor | None = None
        self._passes, self._changes = 0, 0
        self._begun: list[str] | None = None  # checksums at the beginning of a backward pass
        self._after: list[str] | None = None  # and at its end
        self._gives_notice = False
        self._first: list[str] | None = None  # checksums at the first forward pass
        self._replaced = False  # whether that pass had other tensors in place of the parameters

    def install(self, parameters: Mapping[str, Parameter], *, gives_notice: bool) -> None:
        """Watch `parameters`. Called before other hooks are installed, so that they see its results.

        gives_notice: whether this rank prints notices.
        """
        self._parameters, self._gives_notice = [*parameters.values()], gives_notice
        self._monitor = BackwardMonitor(parameters, self._pass_over, self._pass_began)
        self._extensions.add(self)

    def before_exchange(self, steps: int) -> None:
        self.remove()

    def remove(self) -> None:
        """Stop watching, after an optimizer step or at the end of the session."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self._extensions.discard(self)
        self.forget()

    def forget(self) -> None:
        """Called before the session writes parameters: this change is not an update by hand."""
        self._begun = self._after = self._first = None

    def settle(self) -> None:
        """Check for updates by hand, before the session writes parameters."""
        self.look()
        self.report_unsent()
        self.forget()

    def training_begins(self) -> None:
        """Called before the first forward pass in training mode."""
        if self._monitor is not None and self._gives_notice:
            self._first = tensor_hashes(self._parameters)
            self._replaced = any(not isinstance(each, Parameter) for each in self._model.parameters())

    def report_unsent(self) -> None:
        """Print a notice if the loop trains without backward passes and optimizer steps, so that nothing is sent."""
        if self._monitor is None or self._first is None or self._passes or not self._communicates:
            return
        if self._replaced or tensor_hashes(self._parameters) != self._first:
            name = type(self._attached).__name__
            notice(
                f"no step was communicated, and each worker trains alone: the loop calls neither backward() nor "
                f"{name}.step(), for example because it uses torch.func.grad or torch.autograd.grad. Give the "
                "gradients to the attached optimizer, which averages them in step(): for parameter, gradient in "
                "zip(model.parameters(), gradients): parameter.grad = gradient; then optimizer.step()"
            )

    @property
    def _communicates(self) -> bool:
        return any(stage.communicates for stage in self._recipe().strategy.stages)

    def _pass_began(self) -> None:
        if self._monitor is not None:
            self._begun = self.look()

    def _pass_over(self) -> None:
        begun, self._begun = self._begun, None
        if self._monitor is None or begun is None:
            return
        self._passes += 1
        self._after = tensor_hashes(self._parameters)
        if self._after != begun:
            raise LoopError(
                "parameters were modified within backward(), by a hook, before gradients were averaged, so the ranks "
                "would diverge. Make the update after loss.backward() has returned, by one optimizer of all "
                "parameters: optimizer.step()."
            )
        if self._passes >= MOST_PASSES and not self._changes:
            self.remove()

    def look(self) -> list[str] | None:
        """Current checksums. Raises LoopError if updates by hand would never reach the other ranks."""
        if self._monitor is None:
            return None
        before, now = self._after, tensor_hashes(self._parameters)
        if before is not None and before != now:
            self._after = now
            self._changes += 1
            self._update_found()
        return now

    def _update_found(self) -> None:
        recipe = self._recipe()
        if not any(acts_around_steps(stage) for stage in recipe.strategy.stages):
            self._use()
        elif self._changes >= CHANGES:
            raise LoopError(
                f"parameters change between backward passes, but {type(self._attached).__name__}, the attached "
                "optimizer, makes no step: the loop updates them by hand, for example by parameter.data.add_(...). "
                f"{recipe} communicates at the attached optimizer's steps, so nothing would ever be sent. Call "
                "optimizer.step(), with optimizer = torch.optim.SGD(model.parameters(), lr=lr) for plain gradient "
                "descent, or with a subclass of torch.optim.Optimizer that makes your update in step(); or write "
                "EveryStep(), which averages gradients in backward()."
            )
