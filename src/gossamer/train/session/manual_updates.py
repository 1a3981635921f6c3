"""Manual updates: finds loops that write to parameters by hand instead of by an optimizer's step.

Strategies that act around the optimizer's steps see none in such a loop and would never communicate. Gradients that are
averaged in backward() serve it, except inside backward(), where a gradient is still this rank's own. A write through
`parameter.data` leaves no trace in torch's counters, so checksums of the parameters are compared around each backward
pass; this ends with the first step of an optimizer, and with the first passes that change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.errors import LoopError
from gossamer.train.engine.extension import Extension, Extensions
from gossamer.train.engine.torch_hooks import BackwardMonitor
from gossamer.train.session.foreign_optimizers import acts_around_steps
from gossamer.train.session.startup_checks import tensor_hashes

MOST_PASSES = 16  # without an optimizer's step or a change; a loop that updates by hand changes something sooner
CHANGES = 2  # between passes, before they are told: one may be a checkpoint that is loaded after a first dry pass


class ManualUpdates(Extension):
    """Watches the parameters of one session until an optimizer makes a step.

    recipe: the one in force. use: called where gradients that were averaged have been used by hand.
    """

    def __init__(
        self, attached: Optimizer, recipe: Callable[[], Recipe], use: Callable[[], None], extensions: Extensions
    ) -> None:
        self._attached, self._recipe, self._use, self._extensions = attached, recipe, use, extensions
        self._parameters: Sequence[Parameter] = ()
        self._monitor: BackwardMonitor | None = None
        self._passes, self._changes = 0, 0
        self._begun: list[str] | None = None  # checksums as a backward pass began
        self._after: list[str] | None = None  # and as one was over

    def install(self, parameters: Mapping[str, Parameter]) -> None:
        """Watch `parameters`; before others hook them, so that what is found is known to them."""
        self._parameters = [*parameters.values()]
        self._monitor = BackwardMonitor(parameters, self._pass_over, self._pass_began)
        self._extensions.add(self)

    def before_exchange(self, steps: int) -> None:
        self.remove()

    def remove(self) -> None:
        """An optimizer has made a step, or the session ends: look at nothing any more."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self._extensions.discard(self)
        self.forget()

    def forget(self) -> None:
        """The parameters are about to be written by the session: what follows is no update by hand."""
        self._begun = self._after = None

    def settle(self) -> None:
        """Look at what the loop has written so far, before the session writes parameters."""
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
                "parameters were written within backward(), by a hook, where gradients are those of this rank alone: "
                "the ranks would part. Make the update after loss.backward() has returned, by one optimizer of all "
                "parameters: optimizer.step()."
            )
        if self._passes >= MOST_PASSES and not self._changes:
            self.remove()

    def _look(self) -> list[str] | None:
        """Checksums as they are now. Raises LoopError where updates by hand never reach the other ranks."""
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
                f"parameters change between backward passes and {type(self._attached).__name__}, the attached "
                "optimizer, makes no step: the loop updates them by hand, as by parameter.data.add_(...). "
                f"{recipe} acts around the attached optimizer's steps, so nothing would ever be sent. Call "
                "optimizer.step(), with optimizer = torch.optim.SGD(model.parameters(), lr=lr) for plain gradient "
                "descent, or with a subclass of torch.optim.Optimizer whose step() makes your update; or write "
                "EveryStep(), which averages gradients in backward()."
            )
