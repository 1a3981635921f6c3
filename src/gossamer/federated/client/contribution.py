"""Contribution: a device's update of one round, compressed with error feedback, and the state once it is counted.

Conservation, for every device: the decoded contributions that were counted, plus the current residual, equal the sum of
the uncompressed updates of the counted rounds. A contribution that was not counted leaves the state unchanged.

Under central privacy the server clips the decoded contribution, after error feedback, and adds the noise. The part that
the clip removes does not return to the residual. With it, each round would still be bounded, but the values of one
round would leak into all later rounds, and the residual would grow as long as norms exceed the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.federated_rules import LocalPrivacy, Privacy
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.federated.client.store import ClientState
from gossamer.federated.privacy.clipping_and_noise import check_budget, noised
from gossamer.federated.privacy.noise_sampling import RandomBits
from gossamer.train.parameter_server import shard_message


@dataclass(frozen=True)
class EncodedContribution:
    """An encoded contribution."""

    payload: Payload
    counts: tuple[int, ...]  # tensors of the payload, by block
    counted: ClientState  # the device's state once it was counted


def contribution_context(seed: int, client: int, index: int) -> AggregationContext:
    """The context that the device encodes with and the server decodes with."""
    return AggregationContext(step=index, seed=rng.address(seed, "contribution", client))


def encode(
    compressor: Compressor,
    layout: Layout,
    blocks: Sequence[Tensor],
    state: ClientState,
    at: AggregationContext,
    privacy: Privacy | None = None,
    bits: RandomBits | None = None,
) -> EncodedContribution:
    """Encode blocks, (n,) each, with the device's residuals.

    Args:
        compressor: the recipe's compressor.
        layout: of the model's tensors.
        blocks: the tensors of the contribution, (n,) each.
        state: of the device, with the strategy's memory as it will be once this contribution counts.
        at: from `contribution_context`.
        privacy: LocalPrivacy clips the blocks and adds noise before compression, so that the payload and the residual
            carry no further information.
        bits: random bits of the noise.

    Raises:
        NotFinite: a block has a value that is not finite.
        MismatchError: this contribution would exceed the device's own privacy budget, which the device accounts for
            independently of the server.
    """
    if isinstance(privacy, LocalPrivacy):
        check_budget(privacy, state.told + 1)
        state = replace(state, told=state.told + 1)
        blocks = noised(blocks, privacy, bits)
    packed = [FlatTensors(block, layout) for block in blocks]
    states = shard_message.initial_states(compressor, packed, at)
    for own, saved in zip(states, state.residuals, strict=False):
        for key, each in own.items():
            each.flat.copy_(saved[key])
    message = shard_message.encode(compressor, packed, states, [at] * len(packed))
    after = tuple({key: each.flat for key, each in own.items()} for own in message.states)
    counted = replace(state, round=at.step, residuals=after, residual_version=state.version)
    payload = tuple(tensor.clone() for tensor in message.payload)
    return EncodedContribution(payload, message.counts, counted)
