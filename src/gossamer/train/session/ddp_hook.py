"""DDP communication hook: compresses the buckets of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gossamer import events
from gossamer.algorithms.compressors import Compressor
from gossamer.base.layout import FlatTensors, Layout
from gossamer.comm.mesh.collective_selector import requested_collective
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.comm.tls_contexts import encrypts
from gossamer.errors import AttachError
from gossamer.train.engine.parameter_views import sparse_names, trainable
from gossamer.train.moments.take_over import ownership
from gossamer.train.session.average import AverageState
from gossamer.train.session.recipe_choice import chosen_recipe, compressor_alone
from gossamer.train.session.transport_setup import group_transport
from gossamer.train.world_state import current


class DdpState:
    """The hook's state: parameter names, the compressor's state and a communication thread.

    DDP's own state_dict has nothing of it. To resume with the residuals, each rank saves its own between two steps, and
    loads it before the first step:

        torch.save(state.state_dict(), f"hook-{rank}.pt")
        state.load_state_dict(torch.load(f"hook-{rank}.pt", weights_only=True))
    """

    def __init__(self, model: nn.Module, compressor: Compressor) -> None:
        model = model.module if isinstance(model, DistributedDataParallel) else model
        parameters = trainable(model)
        if sparse := sorted(sparse_names(model)):
            raise AttachError(
                f"{', '.join(sparse)} has sparse gradients, which DDP passes to hooks as sparse tensors, and a "
                "compressor reads dense ones. Build the module with sparse=False; or leave DDP out and call "
                "gossamer.attach(model, optimizer, ...), which averages sparse gradients, too."
            )
        if ownership(compressor, parameters):
            raise AttachError(
                f"{compressor!r} applies momentum in the optimizer's place, and DDP's hooks know no optimizer. Leave "
                "DDP out and call gossamer.attach(model, optimizer, ...)."
            )
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.memory = AverageState(compressor, group_transport(current(), requested_collective()))
        self.comm_thread = CommThread([parameter.device for parameter in parameters.values()])

    def state_dict(self) -> dict[str, Any]:
        """State of the compressor on this rank, such as residuals, and the step. Call it between two steps."""
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` of the same rank. Raises CheckpointError for another compressor, rank or
        number of workers."""
        self.memory.load_state_dict(state)


def ddp_hook(model: nn.Module, compressor: Compressor | str) -> tuple[DdpState, Any]:
    """Return a state and a communication hook that compress the gradients of DistributedDataParallel.

    State is kept by parameter name, so it survives DDP's regrouping of buckets after the first step. DDP's state_dict
    has no residuals: each rank saves state.state_dict() as well, see DdpState. With a GradScaler residuals would be in
    units of its changing scale: use gossamer.attach(..., scaler=scaler) instead of DDP there.

    Args:
        model: the module that DDP wraps, or the wrapper.
        compressor: a Compressor or its text, without strategy and topology: DDP averages in every step among all
            workers. `gossamer run --recipe` overrides it.

    Raises:
        RecipeError: the text has a strategy or a topology, which would be ignored.
        AttachError: the compressor applies the optimizer's momentum, or gradients are sparse.

    Example:
        ddp.register_comm_hook(*gossamer.ddp_hook(model, "TopK(0.01)"))
    """
    world = current()
    if encrypts() and world.rank == 0:
        events.notice(
            "this run encrypts, and DDP's own traffic is not encrypted: it broadcasts parameters and buffers "
            "by torch's process group; only the gradients that the hook averages are. Write gossamer.attach(model, "
            "optimizer) in DDP's place, or keep to a network that you trust"
        )
    events.emit(events.WithoutSession(trains=True))
    alone = compressor_alone(chosen_recipe(compressor, world), world, "ddp_hook")
    # a lambda, since DDP compares annotations with the classes themselves, not with their names
    return DdpState(model, alone), lambda state, bucket: _ddp_average(state, bucket)


def _ddp_average(state: DdpState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    shapes = {state.names[id(parameter)]: parameter for parameter in bucket.parameters()}
    flat, last = bucket.buffer(), bucket.is_last()
    layout = Layout.of({name: parameter.detach() for name, parameter in shapes.items()})
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)

    def job() -> None:
        state.memory.average_(FlatTensors(flat, layout))
        state.memory.step += last
        future.set_result(flat)

    state.comm_thread.submit(job, on_failure=future.set_exception)  # type: ignore[arg-type]
    return future
