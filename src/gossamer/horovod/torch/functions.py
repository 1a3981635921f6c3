"""Functions on models and optimizers: broadcast of parameters and of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gossamer.horovod.basics import ProcessSet, context, global_process_set
from gossamer.horovod.exchange import restart_holders
from gossamer.horovod.objects import broadcast_object
from gossamer.horovod.torch.ops import broadcast_call, synchronize
from gossamer.train.checkpoint.state import load_optimizer


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with those of rank `root_rank`, on every rank of the set.

    A DistributedOptimizer that has trained some of them begins its recipe again: residuals and averages are about the
    parameters before.

    Args:
        params: model.state_dict(), model.named_parameters() or model.parameters(), in the same order on every rank.
        root_rank: rank in the job whose values are used.
        process_set: the ranks of the call; all by default.
    """
    if isinstance(params, Mapping):
        values = [value for _, value in sorted(params.items())]
    elif isinstance(params, Iterable) and not isinstance(params, (str, Tensor)):
        values = [each[1] if isinstance(each, tuple) else each for each in params]
    else:
        raise ValueError(
            f"invalid params of type {type(params)}. Write hvd.broadcast_parameters(model.state_dict(), 0)"
        )
    tensors = [each.detach() for each in values if isinstance(each, Tensor)]
    if not tensors:
        return
    here = context()
    restart_holders({tensor.data_ptr() for tensor in tensors})

    def overwrite(found: list[Tensor]) -> None:
        for tensor, new in zip(tensors, found, strict=True):
            if tensor.data_ptr() != new.data_ptr():
                tensor.copy_(new)

    synchronize(here.submit(broadcast_call(tensors, root_rank, process_set, overwrite), None, process_set))


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: Any = None) -> None:
    """Load the state of rank `root_rank`'s optimizer, with its options, on every rank.

    As in Horovod, parameters without a gradient have a gradient of zeros afterwards. model is not needed.

    Args:
        optimizer: of the same class and parameter groups on every rank.
        root_rank: rank in the job whose value is used.
        model: accepted for Horovod's signature.

    Raises:
        ValueError: for LBFGS. Its state depends on the number of loss evaluations.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state. Use SGD, or Adam.")
    here = context().rank == root_rank
    state = broadcast_object(optimizer.state_dict() if here else None, root_rank)
    if not here:
        load_optimizer(optimizer, state)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
