"""Validation: refuses models and optimizers that attach cannot serve, with the line to write instead."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gossamer.errors import AttachError
from gossamer.reducer.parameter_views import trainable
from gossamer.runtime.open_sessions import open_sessions
from gossamer.session.ddp_guard import KEEP_DDP


def refuse(model: nn.Module) -> None:
    """Raise AttachError for models that cannot be served, with the line to write instead."""
    for check in MODEL_CHECKS:
        check(model)
    for name, parameter in trainable(model).items():
        for check_parameter in PARAMETER_CHECKS:
            check_parameter(name, parameter)


def refuse_unmade(model: nn.Module) -> None:
    """Raise AttachError for parameters and buffers that hold no numbers yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise AttachError(
                f'"{name}" has no shape before the first batch, so there is nothing to lay out or to compare. Run one '
                "batch through the model, build the optimizer, and then attach."
            )
        if tensor.is_meta:
            raise AttachError(
                f'"{name}" is on the meta device and holds no numbers, so there is nothing to train. Call '
                "model.to_empty(device=world.device) and initialise or load the model first."
            )


def _refuse_ddp(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            what = f'"{name}"' if name else "this model"
            raise AttachError(
                f"{what} is wrapped in DistributedDataParallel, which averages gradients itself. Attach the module "
                f"inside it, and call that one in the loop: model = ddp.module. {KEEP_DDP}"
            )


def _refuse_sparse_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if getattr(module, "sparse", False) is True:
            raise AttachError(
                f"{type(module).__name__} was built with sparse=True, and sparse gradients have no place in a bucket. "
                "Build it with sparse=False; TopK() sends few entries anyway."
            )


def _refuse_untrainable(model: nn.Module) -> None:
    if not trainable(model):
        raise AttachError(
            "the model has no trainable parameter, so there is nothing to average. Call model.requires_grad_(True), or "
            "thaw the part that you train, before attach."
        )


def _refuse_odd_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided or buffer.is_quantized:
            raise AttachError(
                f'"{name}" is a sparse or quantised buffer, whose numbers cannot be compared and handed out as they '
                "lie in memory. Hold its parts as buffers (indices and values, or integers and scale), or the whole "
                "as a plain attribute that every rank makes alike."
            )


def _refuse_attached(model: nn.Module) -> None:
    held = {id(parameter) for session in open_sessions() for parameter in session.model.parameters()}
    if any(id(parameter) in held for parameter in trainable(model).values()):
        raise AttachError(
            "this model is attached already, and two sessions would average each gradient twice. Call session.close() "
            "on the first, or go on with it."
        )


def _refuse_sharded(name: str, parameter: nn.Parameter) -> None:
    module = sys.modules.get(
        "torch.distributed.tensor"
    )  # takes half a second to import; without it there is no DTensor
    if module is not None and isinstance(parameter, module.DTensor):
        raise AttachError(
            f'"{name}" is a DTensor: it is sharded already, by FSDP or tensor parallelism. Attach a model whose '
            "parameters are whole on every worker."
        )


def _refuse_complex(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_complex():
        raise AttachError(
            f'"{name}" is complex, and compressors know real numbers only. Hold torch.view_as_real(...) as the '
            "parameter and torch.view_as_complex it in forward."
        )


def _refuse_narrow(name: str, parameter: nn.Parameter) -> None:
    if torch.finfo(parameter.dtype).bits < 16:
        raise AttachError(
            f'"{name}" is {parameter.dtype}, a format to store and multiply numbers in: nothing can be added up in it, '
            "gradients and steps of an optimizer included. Hold the parameter in float32 or bfloat16, and cast to "
            "float8 in forward."
        )


def _refuse_hooked(name: str, parameter: nn.Parameter) -> None:
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise AttachError(
            f'"{name}" has a post-accumulate-gradient hook, so something acts on its gradient before it is '
            "averaged: an optimizer that steps inside backward, perhaps. Remove the hook and call optimizer.step() "
            "after backward()."
        )


MODEL_CHECKS = (
    _refuse_ddp,
    refuse_unmade,
    _refuse_sparse_gradients,
    _refuse_untrainable,
    _refuse_odd_buffers,
    _refuse_attached,
)
PARAMETER_CHECKS = (_refuse_sharded, _refuse_complex, _refuse_narrow, _refuse_hooked)


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer whose step() changes parameters, out of wrappers that make no step of their own, such as
    AcceleratedOptimizer. Raises AttachError for what has no step hooks.

    A wrapper that was built as a torch.optim.Optimizer, as SAM or Lookahead are, has hooks itself and stays.
    """
    if isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer):
        return optimizer
    within = getattr(optimizer, "optimizer", None)
    if within is not None and within is not optimizer:
        return innermost(within)
    raise AttachError(
        f"{type(optimizer).__name__} is no torch.optim.Optimizer, whose hooks say when a step is made. Subclass "
        "torch.optim.Optimizer and call super().__init__(), or attach the one within it, whose step() it calls."
    )


def refuse_foreign_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise AttachError for an optimizer that holds parameters which are not the model's."""
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise AttachError(
            f"the optimizer holds {strangers} parameters that are not the model's, and nobody would average their "
            "gradients. Attach a model that contains them all, such as nn.ModuleList([model, loss])."
        )
