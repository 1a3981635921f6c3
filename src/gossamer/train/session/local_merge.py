"""Local merge: gives all ranks one model, and one optimizer state, after each has trained its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies import AveragingStage
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import accumulation_dtype
from gossamer.base.ops import AllReduceMean, Coalesced, Script
from gossamer.base.runner import ScriptCost, run_script
from gossamer.comm.runtime.comm_streams import use_on_current_stream
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.engine.averaged_state import AveragedState
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.unsent_gradients import forget_residuals, unsent
from gossamer.train.session import uneven_inputs
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.startup_checks import optimizer_digest


@torch.no_grad()
def merge_parameters(
    stage: AveragingStage, buckets: Sequence[Bucket], compressor: Compressor, at: AggregationContext, group: GroupCalls
) -> float:
    """Overwrite the parameters of all ranks by x = mean over ranks of (x_i - r_i); returns the bytes sent for it.

    r_i is what of this worker's steps no round has told the others: of pseudo-gradients, so in the parameters' unit,
    and 0 where it stayed in x_i (DelayedAveraging). With LocalSGD that is where its rounds would have come to if
    nothing had been left out. Rounds in flight have landed.
    """
    dtypes = [accumulation_dtype(bucket.flat.dtype) for bucket in buckets]
    flats = [bucket.gather_parameters().to(dtype, copy=True) for bucket, dtype in zip(buckets, dtypes, strict=True)]
    for bucket, flat in zip(buckets, flats, strict=True):
        if stage.strategy.merges_own(compressor):
            forget_residuals(bucket)  # and not what the group owes itself, which is in nobody's parameters
        flat.sub_(unsent(bucket, compressor, at))
    means, nbytes = all_means(flats, group)
    for bucket, mean in zip(buckets, means, strict=True):
        bucket.scatter_parameters(mean)
    return nbytes


@torch.no_grad()
def merge_state(
    model: nn.Module,
    optimizer: Optimizer,
    parameters: Mapping[str, Parameter],
    averaged: Sequence[Tensor],
    scalers: Sequence[Stateful],
    group: GroupCalls,
) -> float:
    """Overwrite `averaged` (the model's statistics) and the optimizer's moments by their means over the ranks, and what
    else differs between them by rank 0's; returns the bytes sent for the means.

    Moments that some ranks have and others have not are rank 0's, too.
    """
    moments = _moments(optimizer, parameters)
    told = [json.loads(text) for text in group.all_gather_text(json.dumps(sorted(moments)))]
    alike = all(names == told[0] for names in told)
    state = AveragedState([*averaged, *(moments[name] for name in sorted(moments) if alike)])
    numbers, nbytes = state.numbers(), 0.0
    if numbers is not None:
        (mean,), nbytes = all_means([numbers], group)
        state.replace(mean, 0.0)
    parts = [optimizer, *scalers]
    held = f"{optimizer_digest(optimizer)} {[scaler.state_dict() for scaler in scalers]}"
    if len(set(group.all_gather_text(held))) > 1:
        tensors = [*model.parameters(), *model.buffers()]
        group.together(lambda: uneven_inputs.take_over(tensors, parts, 0, group))
    return nbytes


def _moments(optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """What the optimizer keeps about every entry of a parameter, by name."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
    }


def all_means(flats: Sequence[Tensor], group: GroupCalls) -> tuple[Sequence[Tensor], float]:
    """The means over all ranks, written in place, and the bytes that this rank has sent for them."""
    if not flats:
        return (), 0.0
    performed: ScriptCost = group.together(lambda: run_script(_means(flats), group.transport))
    use_on_current_stream(performed.result)
    return performed.result, performed.bytes_sent


def _means(flats: Sequence[Tensor]) -> Script:
    return (yield Coalesced(tuple(AllReduceMean(flat, out=flat) for flat in flats)))
