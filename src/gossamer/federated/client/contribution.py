"""Contribution: what a device sends of a round, compressed with feedback, and what it remembers once that counts.

Conservation, for every device: what of its contributions was counted, decoded, and what feedback still owes add up to
what it had to give in the rounds that were counted. A contribution that was not leaves everything as it was.

Under privacy a contribution is bounded after feedback, by whoever adds the noise: the server clips what it decodes.
What is clipped away was counted, and is not owed: each round alone tells at most its bound either way, but were it
owed, one round's numbers would be told in every later one, and the debt would grow as long as norms exceed the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.federated import LocalPrivacy, Privacy
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.federated.client.store import ClientState
from gossamer.federated.privacy.mechanisms import check_budget, noised
from gossamer.federated.privacy.noise import RandomBits
from gossamer.train.parameter_server import shard_message


@dataclass(frozen=True)
class EncodedContribution:
    """An encoded contribution."""

    payload: Payload
    counts: tuple[int, ...]  # tensors of the payload, by block
    counted: ClientState  # the device's state once it was counted


def contribution_context(seed: int, client: int, index: int) -> AggregationContext:
    """Where a contribution stands, on the device that encodes and the server that decodes it."""
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
    """Encode blocks, (n,) each, with what feedback owes from before. Raises NotFinite.

    state: the device's, its memory already what it becomes when this counts. privacy: LocalPrivacy clips blocks and
    adds noise first, of `bits`: nothing that is made of them, nor what feedback would keep, then tells more. The device
    counts that itself: MismatchError where one more would cost more than the budget, whatever the server counts.
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
