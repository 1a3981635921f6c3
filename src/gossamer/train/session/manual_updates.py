"""Manual updates: detects loops that write to parameters by hand instead of by an optimizer's step.

Strategies that act at the optimizer's steps see none in such a loop and would never communicate. Gradients averaged in
backward() work for it, except inside backward(), where a gradient is not averaged yet. A write through `parameter.data`
does not change torch's version counters, so checksums of the parameters are compared around each backward pass. This
ends with the first optimizer step, and after the first passes without a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.errors import LoopError
from gossamer.train.engine.autograd_hooks import BackwardMonitor
from gossamer.train.engine.extension import Extension, Extensions
from gossamer.train.session.foreign_optimizers import acts_around_steps
from gossamer.train.session.startup_checks import tensor_hashes

MOST_PASSES = 16  # without an optimizer step or a change; a loop that updates by hand changes parameters sooner
CHANGES = 2  # between passes, before an error: a single one may be a checkpoint loaded after a first dry pass


class ManualUpdates(Extension):
    """Watches the parameters of one session until an optimizer makes a step.

    recipe: returns the current one. use: called when averaged gradients were used by hand.
    """

    def __init__(
        self, attached: Optimizer, recipe: Callable[[], Recipe], use: Callable[[], None], extensions: Extensions
    ) -> None:
        self._attached, self._recipe, self._use, self._extensions = attached, recipe, use, extensions
        self._parameters: Sequence[Parameter] = ()
        self._monitor: BackwardMonitor | None = None
        self._passes, self._changes = 0, 0
        self._begun: list[str] | None = None  # checksums at the beginning of a backward pass
        self._after: list[str] | None = None  # and at its end

    def install(self, parameters: Mapping[str, Parameter]) -> None:
        """Watch `parameters`. Called before other hooks are installed, so that they see its results."""
        self._parameters = [*parameters.values()]
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
        self._begun = self._after = None

    def settle(self) -> None:
        """Check for updates by hand, before the session writes parameters."""
        self._look()
        self.forget()

    def _pass_began(self) -> None:
        if self._monitor is not None:
            self._begun = self._look()

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

    def _look(self) -> list[str] | None:
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
