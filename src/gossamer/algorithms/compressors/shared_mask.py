"""Shared mask: entries at indices that all ranks selected together in the previous step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.mask_parts import MaskParts
from gossamer.algorithms.compressors.shared_places import mean_at, refuse_large, refuse_nonsense
from gossamer.algorithms.compressors.topk import TopK, require_density, require_places
from gossamer.algorithms.compressors.wrapper import beside
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.coalesce import coalesce
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.base.ops import AllGather, Payload, Script

MASK = "mask"


@dataclass(frozen=True, repr=False)
class SharedMask(Compressor):
    """Send the entries of a mask selected in the previous step, and select the mask of the next step with them.

    C(x)_j = x_j if j is in the mask, else 0;  next mask = union over the ranks i of the k/n largest entries of rank i's
    residual in the i-th of n equal parts of the buffer, k = density N
    law:    the mean of C is C of the mean; without feedback there is no residual, and rank i selects the k/n largest of
            x
    bytes:  (n-1) (2 k/n itemsize + coded_bytes(k/n, N/n)), and never more than Dense: flat in the number of workers n;
            memory: 2 N bytes, double-buffered
    source: Zheng et al. 2026, arXiv:2607.01678 (masks by parts, one step late; only its abstract was read)

    The paper selects by the averaged first moment, and each worker keeps its part. Here the selection uses the
    residual, which feedback has anyway and which converged faster than a moving average of the inputs. Parts rotate
    among the ranks, so entries that are large on one rank only are found. The first mask is evenly spaced. A single
    worker sends as TopK.

    Final loss, and bytes per step, of four workers (digits-conv: AdamW, 200 steps; digits-resnet: SGD, one seed;
    bytelm: AdamW, 100 steps, one seed). TopK sends four times the indices:

                                  digits-conv      digits-resnet    bytelm
        SharedMask                0.050, 2.2 kB    0.034, 4.6 kB    3.15, 38 kB
        RandomK                   0.157, 2.1 kB    0.262, 4.3 kB    4.00, 36 kB
        SparseSum(TopK(0.01))     0.041, 2.4 kB    0.025, 5 kB      3.10, 41 kB
        TopK                      0.014, 3 kB      0.025, 7 kB      3.07, 58 kB

    Args:
        density: fraction of entries to send, in (0, 1].
        feedback: whether a recipe wraps it in Feedback.

    Example:
        >>> gossamer.SharedMask(density=0.01)
        SharedMask(density=0.01)
    """

    density: float
    feedback: bool = True

    def __post_init__(self) -> None:
        require_density(self.density, "SharedMask")

    @property
    def wants_feedback(self) -> bool:
        return self.feedback

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return State({MASK: FlatTensors.zeros(like.layout, dtype=torch.bool, device=like.flat.device)})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if at.world == 1:
            return beside(state, TopK(density=self.density).aggregate(x, State(), at, out))
        if self._dearer_than_dense(x, at):
            return beside(state, Dense().aggregate(x, State(), at, out))
        return self._masked(x, x.flat.to(accumulation_dtype(x.flat.dtype)), state, at, out, waits=False)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        if at.world == 1:
            return beside(state, TopK(density=self.density).aggregate_compensated(x, residual, State(), at, out))
        if self._dearer_than_dense(x, at):
            return beside(state, Dense().aggregate_compensated(x, residual, State(), at, out))
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        return self._masked(x, wanted, state, at, out, waits=True)

    def _parts(self, x: FlatTensors, world: int) -> MaskParts:
        return MaskParts.of(x.layout.numel, world, self.density)

    def _dearer_than_dense(self, x: FlatTensors, at: AggregationContext) -> bool:
        """Also true if a rank would have no part."""
        if x.layout.numel < at.world:
            return True
        parts, itemsize = self._parts(x, at.world), accumulation_dtype(x.flat.dtype).itemsize
        return 2 * parts.total * itemsize + at.world * parts.coded_bytes >= 2 * x.layout.numel * itemsize

    def _masked(
        self,
        x: FlatTensors,
        wanted: Tensor,
        state: State,
        at: AggregationContext,
        out: Tensor | None,
        *,
        waits: bool,
    ) -> Aggregation:
        """Compute the mean of wanted: (n,) at the mask, and the next mask.

        waits: leave the unsent part in `wanted`; sent entries become zero there.
        """
        require_places(x.layout)
        refuse_nonsense(wanted)
        parts = self._parts(x, at.world)
        places = parts.fitted(state[MASK].flat)
        values = wanted.index_select(0, places)
        refuse_large(values, at)
        if waits:
            wanted.index_fill_(0, places, 0)
        chosen = parts.chosen(wanted, at)
        results = yield from coalesce([mean_at(values, places, x.flat, out), _gathered((chosen,))])
        staged: AggregationResult = results[0]
        following = state.scratch(MASK)
        parts.mark(results[1], following.flat, at)
        return replace(staged, next_state=State({MASK: following}))


def _gathered(payload: Payload) -> Script:
    return (yield AllGather(payload))
