"""Loaded weights: reports parameters that the script loads after attach, where the recipe would not keep them.

Strategies that average parameters send differences to a common state, which is that of attach. A load_state_dict()
afterwards is a difference like those of training: it is compressed, scaled by an outer optimizer, or overwritten by
parameter servers, so the ranks train other parameters than the loaded ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import AveragingStage, GradientStage, LocalSGD, Stage
from gossamer.base.torch_hooks import ForwardHook
from gossamer.events import notice
from gossamer.train.engine.extension import Extension
from gossamer.train.session.session_base import SessionBase
from gossamer.train.session.startup_checks import tensor_hashes


class LoadedWeights(Extension):
    """Compares parameters before the first load_state_dict() of `model` with those at the next optimizer step.

    session: referenced weakly, since the model has this object's hook, and must not keep a session alive.
    """

    def __init__(self, model: nn.Module, session: SessionBase) -> None:
        self._session = weakref.ref(session)
        self._parameters: Sequence[Parameter] = ()
        self._before: list[str] | None = None  # checksums before the first load since the last step
        self._hook = model.register_load_state_dict_pre_hook(ForwardHook(self._loading))

    def _loading(self, model: nn.Module, *_: Any) -> None:
        session = self._session()
        if session is None or self._before is not None or session._group.alone:
            return
        if not _keeps_loaded(session.recipe, session._stages.now):
            self._parameters = [*model.parameters()]
            self._before = tensor_hashes(self._parameters)
            session._extensions.add(self)

    def before_exchange(self, steps: int) -> None:
        before, parameters, session = self._before, self._parameters, self._session()
        self.forget()
        if before is None or session is None or tensor_hashes(parameters) == before:
            return
        if session._transport.rank == 0:
            notice(
                f"load_state_dict() has changed the parameters after gossamer.attach, and {session.recipe} treats this "
                "change as one of training: it is compressed or scaled, so the ranks train other parameters than the "
                "loaded ones. Load before gossamer.attach; resume by session.load(), which restores all ranks exactly; "
                "or call session.close() before loading, and attach again."
            )
        self.remove()

    def forget(self) -> None:
        """Called after the session itself has loaded a state."""
        self._before, self._parameters = None, ()
        if (session := self._session()) is not None:
            session._extensions.discard(self)

    def remove(self) -> None:
        """Stop watching."""
        self.forget()
        self._hook.remove()


def _keeps_loaded(recipe: Recipe, stage: Stage) -> bool:
    """Whether training continues from loaded parameters if all ranks load them."""
    if isinstance(stage, GradientStage):
        return True
    exact = recipe.compressor == Dense()
    return exact and isinstance(stage, AveragingStage) and isinstance(stage.strategy, LocalSGD)
