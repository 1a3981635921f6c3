"""The doors: attach a recipe to a training loop, give DistributedDataParallel a hook, average tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gossamer import events
from gossamer.buckets import trainable
from gossamer.compressors import Compressor
from gossamer.compressors.base import aggregate_finite
from gossamer.compressors.sharded import is_owed, settle
from gossamer.core.aggregation import At, Staged, State
from gossamer.core.layout import Layout, Packed
from gossamer.core.ops import Gather, Word
from gossamer.core.term import Term, Terms
from gossamer.environment import choose_interface, here, interfaces
from gossamer.environment.run_settings import dedicated_servers, own_address, returns
from gossamer.errors import AttachError, ConnectError, LayoutError
from gossamer.guards import Scaler
from gossamer.momentum import ownership
from gossamer.network import read_network
from gossamer.recipes.recipe import Recipe, resolve
from gossamer.runtime.comm_thread import Lane
from gossamer.runtime.runner import perform
from gossamer.runtime.transport import Transport
from gossamer.session import Session, open_sessions
from gossamer.strategies import Stage
from gossamer.transports.detached import ReturnedTransport
from gossamer.transports.mesh.collective_selector import ENGINE, asked_for
from gossamer.transports.mesh.transport import meshed
from gossamer.transports.process_group import ProcessGroupTransport
from gossamer.transports.simulated import SimulatedGroup
from gossamer.transports.throttled import PacedTransport
from gossamer.world import World, current


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    recipe: Recipe | Terms | Term | str | None = None,
    scaler: Scaler | None = None,
    clip_norm: float | None = None,
) -> Session:
    """Train `model` together with the other workers of this job, talking as `recipe` says; None means Dense().

    Works in place: the model's class, its state_dict and the loop stay as they are. When loss.backward() returns,
    gradients are averaged. scaler: the loop's GradScaler, so that all ranks skip the same steps; clip_norm: the largest
    norm of all averaged gradients together, applied before each optimizer step (compressors that own momentum have an
    argument of their own for it, DGC(clip=1.0), since what they average has momentum in it).

    Raises AttachError for what cannot be served, RecipeError, and MismatchError where ranks are not alike.
    """
    refuse(model)
    refuse_other_kinds(optimizer)
    refuse_strangers(optimizer, model)
    world = current()
    resolved = resolve(_chosen(recipe, world), world.size)
    transport = _transport(world, resolved)
    session = Session(model, optimizer, resolved, transport, world=world, scaler=scaler, clip_norm=clip_norm)
    return session


def _chosen(recipe: Recipe | Terms | Term | str | None, world: World) -> Recipe | Terms | Term | str | None:
    """The command line's recipe where there is one: it beats the script's."""
    override = os.environ.get("GOSSAMER_RECIPE")
    if override is None:
        return recipe
    replaces = recipe is not None and resolve(recipe, world.size) != resolve(override, world.size)
    if replaces and world.is_first:  # once a job, whoever launched it
        events.notice(f"the command line's recipe, {override}, replaces the script's, {recipe}")
    return override


def _transport(world: World, recipe: Recipe) -> Transport:
    if world.size == 1:
        return SimulatedGroup(1).transports[0]
    if returns():
        if not all(_takes_back(stage) for stage in recipe.strategy.stages):
            raise AttachError(
                f"rank {world.rank} was lost and came back alone, and with {recipe} all workers move in step: there is "
                "no place between two steps where one could come in. Leave out --max-restarts, or let the parameters "
                "live on servers: gossamer run --servers 1 --recipe 'ParameterServer()'; or with single neighbours: "
                "gossamer run --recipe \"Gossip('pairwise')\"."
            )
        return ReturnedTransport(world.rank, world.size)
    paced = os.environ.get("GOSSAMER_PACED")  # where no real emulation is possible, gossamer run asks for this one
    wish = asked_for(recipe.topology.collective)
    transport = _group(world, wish)
    return PacedTransport(transport, read_network(paced, world.size), wish) if paced else transport


def _takes_back(stage: Stage) -> bool:
    """Whether somebody who is here has what a worker needs to go on, and nobody waits for it at a step."""
    if stage.serving is not None:
        return bool(dedicated_servers())
    return stage.mixing is not None and not stage.mixing.in_lock_step


def _group(world: World, wish: str) -> Transport:
    """The process group, with a mesh of its own where everyone's tensors live on processors."""
    return meshed(ProcessGroupTransport(), _listening_address(), ENGINE if world.device.type == "cuda" else wish)


def _listening_address() -> str:
    """Of the interface that was chosen, or that leads to rank 0 where the script made the process group itself."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return own_address()
    try:
        towards = choose_interface(here())
    except ConnectError:  # it cannot be told; nobody reaches loopback from elsewhere, and the engine serves
        towards = None
    return interfaces().get(towards or "", own_address())


def refuse(model: nn.Module) -> None:
    """Raise AttachError for models that cannot be served, with the line to write instead."""
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "this model is wrapped in DistributedDataParallel, which averages gradients itself. Attach the module "
            "inside it (model.module), or keep DDP: ddp.register_comm_hook(*gossamer.ddp_hook(ddp, compressor))."
        )
    refuse_unmade(model)
    for module in model.modules():
        if getattr(module, "sparse", False) is True:
            raise AttachError(
                f"{type(module).__name__} was built with sparse=True, and sparse gradients have no place in a bucket. "
                "Build it with sparse=False; TopK() sends few entries anyway."
            )
    parameters = trainable(model)
    if not parameters:
        raise AttachError(
            "the model has no trainable parameter, so there is nothing to average. Call model.requires_grad_(True), or "
            "thaw the part that you train, before attach."
        )
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided or buffer.is_quantized:
            raise AttachError(
                f'"{name}" is a sparse or quantised buffer, whose numbers cannot be compared and handed out as they '
                "lie in memory. Hold its parts as buffers (indices and values, or integers and scale), or the whole "
                "as a plain attribute that every rank makes alike."
            )
    held = {id(parameter) for session in open_sessions() for parameter in session.model.parameters()}
    if any(id(parameter) in held for parameter in parameters.values()):
        raise AttachError(
            "this model is attached already, and two sessions would average each gradient twice. Call session.close() "
            "on the first, or go on with it."
        )
    for name, parameter in parameters.items():
        if _is_sharded(parameter):
            raise AttachError(
                f'"{name}" is a DTensor: it is sharded already, by FSDP or tensor parallelism. Attach a model whose '
                "parameters are whole on every worker."
            )
        if parameter.is_complex():
            raise AttachError(
                f'"{name}" is complex, and compressors know real numbers only. Hold torch.view_as_real(...) as the '
                "parameter and torch.view_as_complex it in forward."
            )
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise AttachError(
                f'"{name}" has a post-accumulate-gradient hook, so something acts on its gradient before it is '
                "averaged: an optimizer that steps inside backward, perhaps. Remove the hook and call optimizer.step() "
                "after backward()."
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


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Whether this is a DTensor; their module takes half a second to import, and without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def refuse_other_kinds(optimizer: Optimizer) -> None:
    """Raise AttachError for an optimizer whose steps cannot be heard of."""
    if not isinstance(optimizer, Optimizer):
        raise AttachError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer, whose hooks say when a step is made. Subclass "
            "torch.optim.Optimizer, or attach the one within it, whose step() it calls."
        )


def refuse_strangers(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise AttachError for an optimizer that holds parameters which are not the model's."""
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise AttachError(
            f"the optimizer holds {strangers} parameters that are not the model's, and nobody would average their "
            "gradients. Attach a model that contains them all, such as nn.ModuleList([model, loss])."
        )


class Memory:
    """What a compressor remembers about many tensors, by name, however they are put together from call to call."""

    def __init__(self, compressor: Compressor, transport: Transport) -> None:
        self.compressor, self.transport, self.step = compressor, transport, 0
        self._states: dict[str, State] = {}  # by the fingerprint of what lies side by side

    def average_(self, x: Packed) -> None:
        """Overwrite x with the mean over the group, or with NaN on every rank where one of them is not finite."""
        at = At(step=self.step, rank=self.transport.rank, world=self.transport.world)
        state = self._state(x, at)
        staged, agreed = perform(_voted(self.compressor, x, state, at), self.transport).result
        if not agreed:
            x.flat.fill_(torch.nan)
        elif state:
            self._states[x.layout.fingerprint()] = staged.next_state.after(state)

    def _state(self, x: Packed, at: At) -> State:
        """The state for this layout; tensors that lay elsewhere before bring theirs along."""
        key = x.layout.fingerprint()
        if key not in self._states:
            state = self.compressor.init(x, at)
            names = set(x.layout.names)
            for other in [k for k, old in self._states.items() if names & _names(old)]:
                settle(self._states[other], at)
                _move(self._states[other], state)
                old = self._states.pop(other)
                if _names(old) - names:
                    self._states[f"{other} without {key}"] = _without(names, old)
            self._states[key] = state
        return self._states[key]


def _names(state: State) -> set[str]:
    return {name for packed in state.values() for name in packed.layout.names}


def _without(names: set[str], state: State) -> State:
    """What a settled state remembers about other tensors: about each, there is one memory only."""
    others = _names(state) - names
    return State({key: packed.restrict(others) for key, packed in state.items() if not is_owed(key)})


def _move(old: State, new: State) -> None:
    for key, packed in new.items():
        for name, view in packed.items() if not is_owed(key) else ():
            if key in old and name in old[key].layout.by_name:
                if old[key][name].shape != view.shape:
                    raise LayoutError(
                        f'"{name}" was {tuple(old[key][name].shape)} and is {tuple(view.shape)} now, so what is '
                        "remembered about it no longer means anything. Begin with an empty state."
                    )
                view.copy_(old[key][name])


def _voted(compressor: Compressor, x: Packed, state: State, at: At) -> Generator[Word, Any, tuple[Staged, bool]]:
    """Aggregate, then ask whether every rank's numbers were finite."""
    lost: list[bool] = []
    staged: Staged = yield from aggregate_finite(compressor, x, state, at, x.flat, lambda: lost.append(True))
    flag = torch.tensor([not lost and staged.finite], dtype=torch.uint8, device="cpu")
    heard = yield Gather((flag,))
    return staged, all(bool(theirs.item()) for (theirs,) in heard)


@cache
def _shared_transport() -> Transport:
    """One group for all calls of average_ in this process."""
    return _group(current(), asked_for())


def average_(
    tensors: Iterable[Tensor] | Mapping[str, Tensor],
    compressor: Compressor | str,
    state: dict[str, Memory] | None = None,
) -> None:
    """Overwrite `tensors` with their means over all workers; every rank must call it with the same shapes.

    compressor: one, as it is, or a recipe's text. state: an empty dict at first, and the same one at every later call,
    for compressors that remember (Feedback, PowerSGD). A number that is not finite on one rank makes the tensors of its
    dtype NaN on all of them and leaves the state as it was. Raises ValueError where a state is needed and missing.
    """
    named = dict(tensors) if isinstance(tensors, Mapping) else {str(i): tensor for i, tensor in enumerate(tensors)}
    world = current()
    chosen = resolve(compressor, world.size).compressor if isinstance(compressor, str) else compressor
    if world.size == 1 or not named:
        return
    if strange := {str(tensor.dtype) for tensor in named.values() if not tensor.is_floating_point()}:
        raise TypeError(f"average_ averages real numbers, not {', '.join(strange)}: pass tensor.float() instead")
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named.items():
        kinds.setdefault(f"{tensor.device} {tensor.dtype}", {})[name] = tensor.detach()
    for kind, group in kinds.items():
        packed = Packed.pack(group)
        if state is None and chosen.init(packed, At(world=world.size)):
            raise ValueError(
                f"{chosen!r} remembers something between calls and has nowhere to keep it. Write `state = {{}}` once, "
                "and gossamer.average_(tensors, compressor, state=state) each time."
            )
        memory = (state if state is not None else {}).setdefault(kind, Memory(chosen, _shared_transport()))
        if memory.compressor != chosen:
            raise ValueError(f"this state belongs to {memory.compressor!r}: begin with an empty one for {chosen!r}")
        memory.average_(packed)
        memory.step += 1
        for name, view in packed.items():
            group[name].copy_(view)


class DdpState:
    """What ddp_hook's hook needs: names, memory and a lane."""

    def __init__(self, model: nn.Module, compressor: Compressor) -> None:
        parameters = trainable(model)
        if ownership(compressor, parameters):
            raise AttachError(
                f"{compressor!r} applies momentum in the optimizer's place, and DDP's hooks know no optimizer. Leave "
                "DDP out and call gossamer.attach(model, optimizer, ...)."
            )
        self.names = {id(parameter): name.removeprefix("module.") for name, parameter in parameters.items()}
        self.memory = Memory(compressor, _group(current(), asked_for()))
        self.lane = Lane(next(iter(parameters.values())).device)


def ddp_hook(model: nn.Module, compressor: Compressor | str) -> tuple[DdpState, Any]:
    """What DistributedDataParallel needs to compress: ddp.register_comm_hook(*gossamer.ddp_hook(model, compressor)).

    State is kept by parameter name, so it survives DDP's regrouping of buckets after the first step. With a GradScaler
    residuals would be in units of its changing scale: use gossamer.attach(..., scaler=scaler) instead of DDP there.
    """
    world = current()
    # a lambda, since DDP compares annotations with the classes themselves, not with their names
    return DdpState(model, resolve(compressor, world.size).compressor), lambda state, bucket: _ddp_average(
        state, bucket
    )


def _ddp_average(state: DdpState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    shapes = {state.names[id(parameter)]: parameter for parameter in bucket.parameters()}
    flat, last = bucket.buffer(), bucket.is_last()
    layout = Layout.of({name: parameter.detach() for name, parameter in shapes.items()})
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)

    def job() -> None:
        state.memory.average_(Packed(flat, layout))
        state.memory.step += last
        future.set_result(flat)

    state.lane.submit(job, on_failure=future.set_exception)  # type: ignore[arg-type]
    return future
