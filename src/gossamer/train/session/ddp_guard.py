"""DDP guard: refuses DistributedDataParallel around parameters that a session averages.

DDP would average every gradient as well, uncompressed, and overwrite the session's averages. One that is created around
an attached model is detected at once; one that existed before, in the first forward pass through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.torch_hooks import MODULE_REGISTRATION, ForwardHook
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import AttachError

KEEP_DDP = (
    "If DDP must stay, for example inside Lightning, Accelerate or a Trainer, leave gossamer.attach out and compress "
    "DDP's gradients: ddp.register_comm_hook(*gossamer.ddp_hook(ddp, 'TopK(0.01)'))."
)


class DdpGuard:
    """Checks DDP when it is created, and the first forward pass of every module of a model that holds parameters,
    except compiled ones."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._hooks = {
            module: module.register_forward_pre_hook(ForwardHook(self._before_forward))
            for module in model.modules()
            if _is_called(module) and (module is model or _holds_parameters(module))
        }
        self._registration = MODULE_REGISTRATION.subscribe(self._registered)

    def _registered(self, holder: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(holder, DistributedDataParallel) and child is not None:
            self.refuse(child, "was made around this attached model")

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is not None and ddp.require_backward_grad_sync:
            self.refuse(ddp.module, "is about to run this attached model")
        elif not torch.compiler.is_compiling() and (hook := self._hooks.pop(module, None)) is not None:
            hook.remove()

    def refuse(self, wrapped: nn.Module, what: str) -> None:
        """Raise AttachError if DDP wraps parameters of the model while it is attached, and not only a copy."""
        attached = any(session.model is self._model for session in open_sessions())
        own = {id(parameter) for parameter in self._model.parameters()}
        if attached and any(id(parameter) in own for parameter in wrapped.parameters()):
            raise AttachError(
                f"DistributedDataParallel {what}. It would average every gradient itself, uncompressed, and overwrite "
                f"the averages of {self._recipe}, so both would be sent. Leave DDP out and call the attached model, "
                f"which is ddp.module if it was wrapped before: loss = model(x). {KEEP_DDP}"
            )

    def remove(self) -> None:
        self._registration.remove()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def _holds_parameters(module: nn.Module) -> bool:
    """Whether parameters are registered in the module itself. Scripts override parameters() with other arguments."""
    return any(each is not None for each in module._parameters.values())


def _is_called(module: nn.Module) -> bool:
    """Whether its forward pass runs in Python."""
    return not isinstance(module, torch.jit.ScriptModule)
