"""Round forecast: the cost of a round of a federated recipe in bytes, by encoding meta tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil

import torch

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies.federated_rules import FederatedStrategy, SecureAggregation
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import payload_bytes
from gossamer.train.parameter_server import shard_message

STEADY = 2**40  # a round after any warm-up
ROUNDS = (10, 100, 1000)  # with a privacy loss in the forecast


@dataclass(frozen=True, kw_only=True)
class RoundForecast:
    """Cost of a round, in payload bytes. Reports and headers, some hundred bytes per device, are not included."""

    clients: int
    cohort: int  # devices per version
    parameters: int  # exchanged numbers, with averaged buffers
    tensors: int
    up_bytes: int  # of a device's contribution
    masks: bool  # whether up_bytes are masked; keys and shares are not included
    whole_bytes: int  # pulled by a device without a version
    link_bytes: int | None  # of the difference between two versions; None: devices pull whole versions
    down_bytes: float  # of a device's task on average, with uniform cohorts
    device_bytes: int  # state of a device between rounds
    residual_bytes: int  # the part of device_bytes for residuals
    server_bytes: int  # state of the server, with a cohort's contributions
    dense_bytes: int  # of a device's round without compression, both ways
    epsilon: tuple[tuple[int, float], ...] = ()  # (rounds, epsilon); empty: without privacy

    @property
    def server_up_bytes(self) -> int:
        """Bytes that the server receives in a round."""
        return self.cohort * self.up_bytes

    @property
    def server_down_bytes(self) -> float:
        """Bytes that the server sends in a round."""
        return self.cohort * self.down_bytes


def forecast_round(recipe: Recipe, layout: Layout, dtype: torch.dtype, clients: int) -> RoundForecast:
    """Estimate a round of a resolved federated recipe. layout, dtype: of the exchanged tensors."""
    strategy = recipe.strategy
    assert isinstance(strategy, FederatedStrategy)
    cohort = min(strategy.contributions_per_version(clients), clients)  # average number of starts per version
    flat = FlatTensors.zeros(layout, dtype=dtype, device=torch.device("meta"))
    tensors = 1 + len(strategy.shared_keys)
    up_bytes, residual_bytes = _message(recipe.compressor, flat, strategy.contribution_count)
    masks = strategy.secure is not None
    if strategy.secure is not None:
        up_bytes = _masked_bytes(strategy.secure, recipe.compressor, flat, cohort) * strategy.contribution_count
    whole_bytes = tensors * flat.flat.nbytes
    pull = strategy.pull_compressor
    link_bytes = None if pull is None else _message(pull, flat, tensors)[0]
    memory = len(strategy.memory_keys) * flat.flat.nbytes
    kept = strategy.contribution_count * (1 if strategy.aggregator.is_linear else cohort)
    server_memory = sum(each.nbytes for each in strategy.server_memory(flat.flat).values())
    published = 1 if pull is None else 3  # a snapshot, or an estimate, its links and a snapshot
    return RoundForecast(
        clients=clients,
        cohort=cohort,
        parameters=layout.numel,
        tensors=len(layout),
        up_bytes=up_bytes,
        masks=masks,
        whole_bytes=whole_bytes,
        link_bytes=link_bytes,
        down_bytes=mean_pulled(whole_bytes, link_bytes, cohort / clients),
        device_bytes=whole_bytes + residual_bytes + memory,
        residual_bytes=residual_bytes,
        server_bytes=(1 + kept) * flat.flat.nbytes + server_memory + published * whole_bytes,
        dense_bytes=2 * flat.flat.nbytes,
        epsilon=_epsilon(strategy, cohort, clients, layout.numel, remembers=bool(residual_bytes + memory)),
    )


def mean_pulled(whole_bytes: int, link_bytes: int | None, chance: float) -> float:
    """Mean bytes of a device's task: one link per version since its last, or the whole version if that is smaller.

    chance: probability that a device is drawn in a round. It was last drawn g rounds ago with probability
    chance (1 - chance)^(g - 1).
    """
    if link_bytes is None:
        return float(whole_bytes)
    if link_bytes == 0 or link_bytes >= whole_bytes:
        return float(min(link_bytes, whole_bytes))
    longest = (whole_bytes - 1) // link_bytes  # links are kept while they are smaller than a whole version
    longest = min(longest, ceil(40 / chance))  # longer gaps have negligible probability
    missing = sum(gap * chance * (1 - chance) ** (gap - 1) for gap in range(1, longest + 1))
    return link_bytes * missing + whole_bytes * (1 - chance) ** longest


def _message(compressor: Compressor, flat: FlatTensors, tensors: int) -> tuple[int, int]:
    """Bytes of a message of `tensors` blocks, and of the compressor's state."""
    at = AggregationContext(step=STEADY)
    (state,) = shard_message.initial_states(compressor, [flat], at)
    message = shard_message.encode(compressor, [flat], [state], [at])
    remembered = sum(packed.flat.nbytes for packed in state.values())
    return tensors * payload_bytes(message.payload), tensors * remembered


def _masked_bytes(secure: SecureAggregation, compressor: Compressor, flat: FlatTensors, cohort: int) -> int:
    """Bytes of a block's message as integers with enough bits for the sum of a cohort."""
    at = AggregationContext(step=STEADY)
    (state,) = shard_message.initial_states(compressor, [flat], at)
    message = shard_message.encode(compressor, [flat], [state], [at])
    entries = sum(tensor.numel() for tensor in message.payload)
    return -(-entries * (secure.bits + (cohort - 1).bit_length()) // 8)


def _epsilon(
    strategy: FederatedStrategy, cohort: int, clients: int, entries: int, *, remembers: bool
) -> tuple[tuple[int, float], ...]:
    if strategy.privacy is None:
        return ()
    secure = strategy.secure
    fewest = cohort if secure is None else ceil(secure.threshold * cohort)
    bits = 32 if secure is None else secure.bits
    entries *= strategy.contribution_count
    forecast = partial(
        strategy.privacy.epsilon_after,
        cohort=fewest,
        clients=clients,
        feedback=remembers,
        entries=entries,
        bits=bits,
    )
    return tuple((rounds, forecast(rounds)) for rounds in ROUNDS)
