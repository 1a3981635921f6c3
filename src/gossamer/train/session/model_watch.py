"""Model watch: finds trainable parameters that a model has gained since attach, without reading the model every step.

torch calls a global hook when a module is given a parameter or a submodule. A watch is marked if the module belongs to
its model; a step then compares one flag, and the model is searched only after a mark. `module._parameters[...] = ...`
and ModuleList.insert do not call that hook. Such parameters are found at the beginning of an epoch, and when an
optimizer trains them.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn import Parameter

from gossamer.base.torch_hooks import MODULE_REGISTRATION, PARAMETER_REGISTRATION
from gossamer.train.engine.parameter_views import trainable


class ModelWatch:
    """Knows the modules, parameters and buffers of `model` at this moment, and finds those that it gains later."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {id(module): weakref.ref(module) for module in model.modules()}
        self._known = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self.changed = False  # whether a module of the model was given a parameter or a submodule
        self._hooks = [each.subscribe(self._registered) for each in (PARAMETER_REGISTRATION, MODULE_REGISTRATION)]

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        """`module` is given a parameter or a submodule."""
        self.changed = self.changed or id(module) in self._modules

    def knows(self, parameter: Parameter) -> bool:
        """Whether the model had this parameter, trainable or frozen."""
        reference = self._known.get(id(parameter))
        return reference is not None and reference() is parameter

    def gained(self) -> list[str]:
        """Names of the model's trainable parameters that it did not have."""
        self.changed = False
        return [name for name, parameter in trainable(self._model).items() if not self.knows(parameter)]

    def gained_modules(self) -> list[nn.Module]:
        """Modules that the model did not have."""
        found = ((module, self._modules.get(id(module))) for module in self._model.modules())
        return [module for module, known in found if known is None or known() is not module]
