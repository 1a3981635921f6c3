"""Validation: refuses models and optimizers that attach cannot serve, with the line to write instead."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import EveryStep, GradientStage, ServerStage, Stage
from gossamer.base.units import counted
from gossamer.comm.runtime.open_sessions import OpenSession, open_sessions
from gossamer.errors import AttachError
from gossamer.events import notice
from gossamer.train.engine.parameter_views import refuse_no_module, sparse_names, trainable
from gossamer.train.moments.take_over import ownership
from gossamer.train.session.ddp_guard import KEEP_DDP
from gossamer.train.sharding.local_shards import is_sharded

SCALER_METHODS = ("step", "get_scale", "is_enabled", "state_dict", "load_state_dict")


def refuse(model: nn.Module, *, sharded: bool = False) -> None:
    """Raise AttachError for models that cannot be served, with the line to write instead. sharded: whether parameters
    may be DTensors."""
    for check in MODEL_CHECKS:
        check(model)
    for name, parameter in trainable(model).items():
        for check_parameter in PARAMETER_CHECKS if sharded else (_refuse_sharded, *PARAMETER_CHECKS):
            check_parameter(name, parameter)


def refuse_added(model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
    """Raise AttachError for parameters that `model` has gained and that attach would have refused."""
    for check in MODEL_CHECKS:
        if check is not _refuse_attached:
            check(model)
    others = {
        id(each)
        for session in open_sessions()
        if session.model is not None and session.model is not model
        for each in session.model.parameters()
    }
    for name, parameter in added.items():
        if id(parameter) in others:
            raise AttachError(
                f'"{name}" belongs to another open session, and two sessions would average each gradient twice. Call '
                "session.close() on the other session first."
            )
        for check_parameter in (_refuse_sharded, *PARAMETER_CHECKS):
            check_parameter(name, parameter)


def refuse_other_kinds(model: object, optimizer: object, scaler: object) -> None:
    """Raise AttachError unless these are a model, an optimizer instance and a GradScaler."""
    refuse_no_module(model)
    if optimizer is None or isinstance(optimizer, (type, nn.Module)):
        given = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"this {type(optimizer).__name__}"
        raise AttachError(
            f"{given} is not an optimizer instance. Write optimizer = "
            "torch.optim.AdamW(model.parameters()), and then gossamer.attach(model, optimizer)."
        )
    methods = (getattr(scaler, name, None) for name in SCALER_METHODS)
    if scaler is not None and (isinstance(scaler, type) or not all(map(callable, methods))):
        raise AttachError(
            f"scaler={scaler!r} is not a GradScaler. Write scaler = torch.amp.GradScaler(), and "
            "gossamer.attach(..., scaler=scaler) with the one that scales the loss."
        )


def refuse_unmade(model: nn.Module) -> None:
    """Raise AttachError for parameters and buffers without values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise AttachError(
                f'"{name}" has no shape before the first batch. Run one batch through the model, build the optimizer, '
                "and then attach."
            )
        if tensor.is_meta:
            raise AttachError(
                f'"{name}" is on the meta device and has no values, so it cannot be trained. Call '
                "model.to_empty(device=world.device) and initialize or load the model first."
            )
        if tensor.is_inference():
            raise AttachError(
                f'"{name}" was created within torch.inference_mode(), so it can be neither trained nor averaged. '
                "Build or load the model outside of that block; torch.no_grad() is allowed."
            )


def _refuse_ddp(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            what = f'"{name}"' if name else "this model"
            raise AttachError(
                f"{what} is wrapped in DistributedDataParallel, which averages gradients itself. Attach the module "
                f"inside it, and call that one in the loop: model = ddp.module. {KEEP_DDP}"
            )


def _refuse_wrappers(model: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it is slow; not imported, no such module exists
    for name, module in model.named_modules():
        what = f'"{name}"' if name else "this model"
        if isinstance(module, nn.DataParallel):
            raise AttachError(
                f"{what} is wrapped in torch.nn.DataParallel, which copies the model to several devices in every pass "
                "from one process. Attach the module inside it, model.module, and start a worker for each device: "
                "gossamer run --workers 4 train.py."
            )
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise AttachError(
                f"{what} is wrapped in FullyShardedDataParallel (FSDP1), which hides tensors in flat parameters. "
                "Shard it by FSDP2 instead: torch.distributed.fsdp.fully_shard(model, "
                'mesh=mesh["shard"]), and gossamer.attach(..., mesh=mesh["replicate"]).'
            )


def _refuse_untrainable(model: nn.Module) -> None:
    if not any(parameter.numel() for parameter in trainable(model).values()):
        raise AttachError(
            "the model has no trainable parameters, or only empty ones. Call model.requires_grad_(True), or unfreeze "
            "the part to train, before attach."
        )


def _refuse_odd_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided or buffer.is_quantized:
            raise AttachError(
                f'"{name}" is a sparse or quantized buffer, which cannot be compared and broadcast as plain memory. '
                "Register its parts as buffers (indices and values, or integers and scale), or keep it as a plain "
                "attribute that every rank creates equally."
            )


def _refuse_attached(model: nn.Module) -> None:
    if sessions_of(model):
        raise AttachError(
            "this model is attached already, and two sessions would average each gradient twice. Call session.close() "
            "on the first one, or continue with it; if a notebook cell runs again, write gossamer.attach(..., "
            "replace=True)."
        )


def sessions_of(model: nn.Module) -> list[OpenSession]:
    """Open sessions that train some of the model's parameters."""
    local = {id(parameter) for parameter in trainable(model).values()}
    found = [(session, session.model) for session in open_sessions() if session.model is not None]
    return [session for session, other in found if any(id(each) in local for each in other.parameters())]


def _refuse_sharded(name: str, parameter: nn.Parameter) -> None:
    if is_sharded(parameter):
        raise AttachError(
            f'"{name}" is a DTensor, sharded by FSDP2 or tensor parallelism, and without mesh= the recipe would '
            "run between ranks that hold different shards. Specify the replicas: mesh = "
            'init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), fully_shard(model, '
            'mesh=mesh["shard"]), and gossamer.attach(..., mesh=mesh["replicate"]).'
        )


def _refuse_complex(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_complex():
        raise AttachError(
            f'"{name}" is complex, but compressors support real numbers only. Use torch.view_as_real(...) as the '
            "parameter and torch.view_as_complex in forward."
        )


def _refuse_narrow(name: str, parameter: nn.Parameter) -> None:
    if torch.finfo(parameter.dtype).bits < 16:
        raise AttachError(
            f'"{name}" is {parameter.dtype}, a format without addition, which gradients and optimizer steps need. Keep '
            "the parameter in float32 or bfloat16, and cast to float8 in forward."
        )


def _refuse_hooked(name: str, parameter: nn.Parameter) -> None:
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise AttachError(
            f'"{name}" has a post-accumulate-gradient hook, which would use its gradient before it is averaged, for '
            "example an optimizer that steps inside backward. Remove the hook and call optimizer.step() after "
            "backward()."
        )


MODEL_CHECKS = (
    _refuse_ddp,
    _refuse_wrappers,
    refuse_unmade,
    _refuse_untrainable,
    _refuse_odd_buffers,
    _refuse_attached,
)
PARAMETER_CHECKS = (_refuse_complex, _refuse_narrow, _refuse_hooked)


def refuse_sparse_gradients(model: nn.Module, recipe: Recipe) -> None:
    """Raise AttachError if the recipe needs dense gradients, but some modules have sparse ones."""
    parameters = {name: parameter for name, parameter in trainable(model).items() if name in sparse_names(model)}
    why = next(filter(None, map(_needs_dense, recipe.strategy.stages)), None)
    if parameters and why is not None:
        raise AttachError(f'"{next(iter(parameters))}" has sparse gradients (sparse=True), and {why}')
    for name in ownership(recipe.compressor, parameters):
        raise AttachError(
            f'"{name}" has sparse gradients (sparse=True), which are not compressed, but {recipe.compressor!r} applies '
            "the optimizer's momentum. Build the module with sparse=False, or use a compressor without momentum, such "
            "as TopK(density=0.01)."
        )


def _needs_dense(stage: Stage) -> str | None:
    """Why a stage does not support sparse gradients, and the line to write; None if it does."""
    match stage:
        case GradientStage(delay=delay) if delay:
            return (
                "those of an earlier step are added to a buffer as large as the table. Write EveryStep(), or build the "
                "module with sparse=False."
            )
        case GradientStage(accumulate=accumulate) if accumulate > 1:
            return (
                f"EveryStep(accumulate={accumulate}) accumulates gradients in a buffer as large as the table. Write "
                f"EveryStep() and `with session.no_sync():` around all but the last of {accumulate} backward() calls, "
                f"of loss / {accumulate}; or build the module with sparse=False."
            )
        case GradientStage(accumulates=True):
            return (
                "the passes of a global batch accumulate in a buffer as large as the table. Leave out global_batch, or "
                "build the module with sparse=False."
            )
        case ServerStage():
            return (
                "servers store pushed gradients in buffers as large as the table. Write EveryStep(), or build the "
                "module with sparse=False."
            )
        case _:
            return None


def refuse_swapping(optimizer: Optimizer, recipe: Recipe) -> None:
    """Raise AttachError for local training with an optimizer that swaps the parameters in eval().

    Schedule-free optimizers keep the iterates z and x in their state, and write x into the parameters in eval(). The
    mean over workers is of the parameters in train(), so x would remain local to each worker.
    """
    swaps = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    stages = [stage for stage in recipe.strategy.stages if not isinstance(stage, GradientStage)]
    if swaps and stages:
        kind = type(optimizer).__name__
        raise AttachError(
            f"{kind} has train() and eval(), which swap the parameters with an average in its state. "
            f"{recipe.strategy!r} averages the parameters, but not that state, so each worker would evaluate another "
            "model. Write EveryStep() with any compressor, which averages gradients: "
            f'gossamer.attach(model, optimizer, "{EveryStep() + recipe.compressor!r}"); or train with '
            "torch.optim.AdamW and a learning-rate schedule."
        )


def refuse_sharding(optimizer: Optimizer) -> None:
    """Raise AttachError for ZeRO's optimizer, which broadcasts parameters in each step."""
    module = sys.modules.get("torch.distributed.optim")  # importing it is slow; not imported, no instance exists
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        raise AttachError(
            "ZeroRedundancyOptimizer shards the optimizer's state over the ranks, and broadcasts all parameters after "
            "every step, uncompressed: more bytes than a recipe saves. Attach the optimizer that it was built with: "
            f"optimizer = torch.optim.{type(optimizer.optim).__name__}(model.parameters(), ...)."
        )


def innermost(optimizer: Any) -> Optimizer:
    """Unwrap an optimizer from wrappers that make no step of their own, such as AcceleratedOptimizer.

    A wrapper that is a torch.optim.Optimizer, such as SAM or Lookahead, has step hooks and is not unwrapped. Raises
    AttachError for objects without step hooks.
    """
    if isinstance(optimizer, Optimizer) and _calls_hooks(optimizer):
        return optimizer
    within = getattr(optimizer, "optimizer", None)
    if within is not None and within is not optimizer:
        return innermost(within)
    kind = type(optimizer).__name__
    if isinstance(optimizer, Optimizer):
        inner = next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)
        line = "" if inner is None else f": gossamer.attach(model, optimizer.{inner}, ...)"
        raise AttachError(
            f"{kind} does not call torch.optim.Optimizer.__init__, so it has no step hooks. Call super().__init__() in "
            f"its constructor, or attach the optimizer within it, which makes the steps{line}."
        )
    raise AttachError(
        f"{kind} is not a torch.optim.Optimizer, so it has no step hooks. Subclass "
        "torch.optim.Optimizer and call super().__init__(), or attach the optimizer within it, which makes the steps."
    )


def _calls_hooks(optimizer: Optimizer) -> bool:
    """Whether the constructor of torch.optim.Optimizer was called, which makes `step` call hooks."""
    made = {"_optimizer_step_pre_hooks", "_optimizer_state_dict_pre_hooks"} <= vars(optimizer).keys()
    return made and getattr(type(optimizer).step, "hooked", False)


def refuse_foreign_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise AttachError for an optimizer with parameters of another model."""
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise AttachError(
            f"the optimizer holds {counted(strangers, 'parameter')} outside of the model, so their gradients would not "
            "be averaged. Attach a model that contains them all, such as nn.ModuleList([model, loss]); a parameter of "
            'no module by model.register_parameter("temperature", parameter) before attach.'
        )


# -- devices -----------------------------------------------------------------------------------------------------------


def check_devices(model: nn.Module, own: torch.device, workers: int) -> None:
    """Print a notice if the model does not use this worker's accelerator. Layers may be on several devices.

    Args:
        own: the worker's device.
        workers: number of workers of the job.

    Raises:
        AttachError: the model is on another worker's GPU.
    """
    devices = {parameter.device for parameter in trainable(model).values()}
    _refuse_anothers(devices, own, workers)
    if own.type != "cpu" and {device.type for device in devices} == {"cpu"}:
        notice(
            f"the model is in host memory, but this worker has {own}, which stays idle. Write "
            "model.to(world.device) before the optimizer and gossamer.attach; or CUDA_VISIBLE_DEVICES= before the "
            "command, to train on CPUs with CPU transports."
        )


def _refuse_anothers(devices: Collection[torch.device], own: torch.device, workers: int) -> None:
    there = {device for device in devices if device.type == own.type}
    if workers > 1 and own.index is not None and there and own not in there:
        where = ", ".join(sorted(map(str, there)))
        raise AttachError(
            f"the model is on {where}, but this worker's device is {own}: workers of one machine would share one GPU, "
            "on which NCCL supports a single rank, and leave the others idle. Write model.to(world.device) before "
            "the optimizer and gossamer.attach, or torch.cuda.set_device(world.device) before model.cuda()."
        )
