"""Round forecast: prices a round of a federated recipe in bytes, by real encodings of meta tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil

import torch

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies.federated import FederatedStrategy, SecureAggregation
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import payload_bytes
from gossamer.train.parameter_server import shard_message

STEADY = 2**40  # a round after any warm-up
ROUNDS = (10, 100, 1000)  # for which a privacy loss is told


@dataclass(frozen=True, kw_only=True)
class RoundForecast:
    """What a round costs, in payload bytes; reports and headers, some hundred bytes a device, are not counted."""

    clients: int
    cohort: int  # devices that a version is made of
    parameters: int  # that travel, averaged buffers among them
    tensors: int
    up_bytes: int  # of a device's contribution
    masks: bool  # whether up_bytes are under masks, beside which keys and shares travel
    whole_bytes: int  # of all that a device pulls when it holds nothing
    link_bytes: int | None  # of the difference between two versions; None: what is pulled is whole
    down_bytes: float  # of a device's task on average, where cohorts are drawn evenly
    device_bytes: int  # that a device keeps between its rounds
    residual_bytes: int  # of these what feedback owes
    server_bytes: int  # that the server holds, with a cohort's contributions
    dense_bytes: int  # of a device's round in which parameters travel as they are, both ways
    epsilon: tuple[tuple[int, float], ...] = ()  # after so many rounds; empty: nothing is promised

    @property
    def server_up_bytes(self) -> int:
        """That the server receives in a round."""
        return self.cohort * self.up_bytes

    @property
    def server_down_bytes(self) -> float:
        """That the server sends in a round."""
        return self.cohort * self.down_bytes


def forecast_round(recipe: Recipe, layout: Layout, dtype: torch.dtype, clients: int) -> RoundForecast:
    """Price a round of a resolved federated recipe. layout, dtype: of what travels of the model."""
    strategy = recipe.strategy
    assert isinstance(strategy, FederatedStrategy)
    cohort = min(strategy.contributions_per_version(clients), clients)  # on average so many begin for each version
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
    """Bytes of a device's task: a link for every version since its last, or everything where that is less.

    chance: that a device is drawn in a round. It was last drawn g rounds ago with probability
    chance (1 - chance)^(g - 1).
    """
    if link_bytes is None:
        return float(whole_bytes)
    if link_bytes == 0 or link_bytes >= whole_bytes:
        return float(min(link_bytes, whole_bytes))
    longest = (whole_bytes - 1) // link_bytes  # links are kept while they have fewer bytes than everything
    longest = min(longest, ceil(40 / chance))  # nobody waits longer
    missing = sum(gap * chance * (1 - chance) ** (gap - 1) for gap in range(1, longest + 1))
    return link_bytes * missing + whole_bytes * (1 - chance) ** longest


def _message(compressor: Compressor, flat: FlatTensors, tensors: int) -> tuple[int, int]:
    """Bytes of so many tensors' message, and of the compressor's state."""
    at = AggregationContext(step=STEADY)
    (state,) = shard_message.initial_states(compressor, [flat], at)
    message = shard_message.encode(compressor, [flat], [state], [at])
    remembered = sum(packed.flat.nbytes for packed in state.values())
    return tensors * payload_bytes(message.payload), tensors * remembered


def _masked_bytes(secure: SecureAggregation, compressor: Compressor, flat: FlatTensors, cohort: int) -> int:
    """Of a tensor's message in whole numbers wide enough for the sum of a cohort."""
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
