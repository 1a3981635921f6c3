"""Exact mean: the uncompressed mean over all ranks of a model's parameters and other state, as they are now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.base.ops import AllReduceMean, Coalesced, Script
from gossamer.base.runner import ScriptCost, run_script
from gossamer.base.transport import Transport
from gossamer.comm.runtime.comm_streams import use_on_current_stream
from gossamer.train.engine.averaged_state import AveragedState
from gossamer.train.engine.bucket import Bucket


@dataclass(frozen=True)
class ExactMean:
    """Parameters, by bucket, and the state that is averaged along."""

    buckets: Sequence[Bucket]
    averaged_state: AveragedState

    def run(self, transport: Transport) -> ScriptCost:
        """Average them over all ranks. On the communication thread, while the training thread waits."""
        flats = [bucket.gather_parameters(torch.empty_like(bucket.flat)) for bucket in self.buckets]
        numbers = self.averaged_state.numbers()
        return run_script(_means(flats if numbers is None else [*flats, numbers]), transport)

    def by_name(self, means: Sequence[Tensor]) -> dict[str, Tensor]:
        """The result of `run`, by the names of the model's tensors."""
        use_on_current_stream(means)
        found = {
            slot.name: slot.view(mean)
            for bucket, mean in zip(self.buckets, means, strict=False)
            for slot in bucket.layout
        }
        along = means[len(self.buckets) :]
        return found if not along else {**found, **self.averaged_state.named(along[0])}


def _means(flats: Sequence[Tensor]) -> Script:
    return (yield Coalesced(tuple(AllReduceMean(flat, out=flat) for flat in flats)))
