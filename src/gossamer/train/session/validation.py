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
    """Raise AttachError for what is no model, no optimizer that was built, or no GradScaler."""
    refuse_no_module(model)
    if optimizer is None or isinstance(optimizer, (type, nn.Module)):
        given = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"this {type(optimizer).__name__}"
        raise AttachError(
            f"{given} is no optimizer whose steps could be followed. Write optimizer = "
            "torch.optim.AdamW(model.parameters()), and then gossamer.attach(model, optimizer)."
        )
    methods = (getattr(scaler, name, None) for name in SCALER_METHODS)
    if scaler is not None and (isinstance(scaler, type) or not all(map(callable, methods))):
        raise AttachError(
            f"scaler={scaler!r} is no GradScaler, which is asked for its scale in every step. Write scaler = "
            "torch.amp.GradScaler(), and gossamer.attach(..., scaler=scaler) with the one that scales the loss."
        )


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
        if tensor.is_inference():
            raise AttachError(
                f'"{name}" was made within torch.inference_mode(), and such a tensor cannot be trained or averaged. '
                "Build or load the model outside of that block; torch.no_grad() does no harm."
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
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes a while to import; without it there is none
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
                f"{what} is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters hide where each "
                "tensor lies. Shard it by FSDP2 instead: torch.distributed.fsdp.fully_shard(model, "
                'mesh=mesh["shard"]), and gossamer.attach(..., mesh=mesh["replicate"]).'
            )


def _refuse_untrainable(model: nn.Module) -> None:
    if not any(parameter.numel() for parameter in trainable(model).values()):
        raise AttachError(
            "the model has no trainable parameter, or only empty ones, so there is nothing to average. Call "
            "model.requires_grad_(True), or thaw the part that you train, before attach."
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
    if sessions_of(model):
        raise AttachError(
            "this model is attached already, and two sessions would average each gradient twice. Call session.close() "
            "on the first, or go on with it; where a cell of a notebook runs again, write gossamer.attach(..., "
            "replace=True)."
        )


def sessions_of(model: nn.Module) -> list[OpenSession]:
    """Open sessions that train some of the model's parameters."""
    mine = {id(parameter) for parameter in trainable(model).values()}
    found = [(session, session.model) for session in open_sessions() if session.model is not None]
    return [session for session, other in found if any(id(each) in mine for each in other.parameters())]


def _refuse_sharded(name: str, parameter: nn.Parameter) -> None:
    if is_sharded(parameter):
        raise AttachError(
            f'"{name}" is a DTensor: it is sharded, by FSDP2 or tensor parallelism, and without mesh= the recipe would '
            "run between ranks that hold different shards. Say between which ranks replicas lie: mesh = "
            'init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), fully_shard(model, '
            'mesh=mesh["shard"]), and gossamer.attach(..., mesh=mesh["replicate"]).'
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
    _refuse_wrappers,
    refuse_unmade,
    _refuse_untrainable,
    _refuse_odd_buffers,
    _refuse_attached,
)
PARAMETER_CHECKS = (_refuse_complex, _refuse_narrow, _refuse_hooked)


def refuse_sparse_gradients(model: nn.Module, recipe: Recipe) -> None:
    """Raise AttachError where the recipe needs gradients laid out in buckets, and some modules' are sparse."""
    parameters = {name: parameter for name, parameter in trainable(model).items() if name in sparse_names(model)}
    why = next(filter(None, map(_needs_dense, recipe.strategy.stages)), None)
    if parameters and why is not None:
        raise AttachError(f'"{next(iter(parameters))}" has sparse gradients (sparse=True), and {why}')
    for name in ownership(recipe.compressor, parameters):
        raise AttachError(
            f'"{name}" has sparse gradients (sparse=True), which no compressor sees, and {recipe.compressor!r} applies '
            "the optimizer's momentum in its place. Build the module with sparse=False, or use a compressor that "
            "leaves momentum alone, such as TopK(density=0.01)."
        )


def _needs_dense(stage: Stage) -> str | None:
    """Why a stage cannot let gradients travel as rows, and what to write."""
    match stage:
        case GradientStage(delay=delay) if delay:
            return (
                "those of an earlier step are added to a buffer as large as the table. Write EveryStep(), or build the "
                "module with sparse=False."
            )
        case GradientStage(accumulate=accumulate) if accumulate > 1:
            return (
                f"EveryStep(accumulate={accumulate}) adds gradients up in a buffer as large as the table. Write "
                f"EveryStep() and `with session.no_sync():` around all but the last of {accumulate} backward() calls, "
                f"of loss / {accumulate}; or build the module with sparse=False."
            )
        case GradientStage(accumulates=True):
            return (
                "the passes of a global batch add up in a buffer as large as the table. Leave out global_batch, or "
                "build the module with sparse=False."
            )
        case ServerStage():
            return (
                "servers hold what is pushed to them in buffers as large as the table. Write EveryStep(), or build the "
                "module with sparse=False."
            )
        case _:
            return None


def refuse_swapping(optimizer: Optimizer, recipe: Recipe) -> None:
    """Raise AttachError where workers train apart with an optimizer whose eval() puts other numbers into parameters.

    Schedule-free optimizers keep the iterates z and x in their state, and lend x in eval(). A mean over workers is of
    the parameters as they are in train(), so x would stay each worker's own.
    """
    swaps = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    stages = [stage for stage in recipe.strategy.stages if not isinstance(stage, GradientStage)]
    if swaps and stages:
        kind = type(optimizer).__name__
        raise AttachError(
            f"{kind} has train() and eval(), which exchange the parameters for an average that it keeps in its own "
            f"state. {recipe.strategy!r} makes parameters the same on all workers, and not that average, so each "
            "worker would evaluate another model. Write EveryStep() with any compressor, which averages gradients: "
            f'gossamer.attach(model, optimizer, "{EveryStep() + recipe.compressor!r}"); or train with '
            "torch.optim.AdamW and a learning-rate schedule."
        )


def refuse_sharding(optimizer: Optimizer) -> None:
    """Raise AttachError for ZeRO's optimizer, whose steps send parameters themselves."""
    module = sys.modules.get("torch.distributed.optim")  # takes a while to import; without it there is none
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        raise AttachError(
            "ZeroRedundancyOptimizer keeps a part of the optimizer's state on each rank, and broadcasts all parameters "
            "after every step, uncompressed: more than the gradients that a recipe saves. Attach the optimizer that it "
            f"was built with: optimizer = torch.optim.{type(optimizer.optim).__name__}(model.parameters(), ...)."
        )


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


# -- devices -----------------------------------------------------------------------------------------------------------


def check_devices(model: nn.Module, own: torch.device, workers: int) -> None:
    """Say what is slower than it could be. own: the worker's device. workers: of the job.

    Layers of one model may lie on several devices. Raises AttachError for a model on another worker's GPU.
    """
    devices = {parameter.device for parameter in trainable(model).values()}
    _refuse_anothers(devices, own, workers)
    if own.type != "cpu" and {device.type for device in devices} == {"cpu"}:
        notice(
            f"the model is in the host's memory and this worker has {own}, which stays idle. Write "
            "model.to(world.device) before the optimizer and gossamer.attach; or CUDA_VISIBLE_DEVICES= before the "
            "command, to train on processors with connections that are made for them."
        )


def _refuse_anothers(devices: Collection[torch.device], own: torch.device, workers: int) -> None:
    there = {device for device in devices if device.type == own.type}
    if workers > 1 and own.index is not None and there and own not in there:
        where = ", ".join(sorted(map(str, there)))
        raise AttachError(
            f"the model is on {where} and this worker's own device is {own}: workers of one machine would share one "
            "GPU, on which NCCL serves a single rank, and leave the others idle. Write model.to(world.device) before "
            "the optimizer and gossamer.attach, or torch.cuda.set_device(world.device) before model.cuda()."
        )
