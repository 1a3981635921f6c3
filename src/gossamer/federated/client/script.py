"""Client script: a device asks for a task, trains, sends what it learned, and hears what became of it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import msgspec
import torch
from torch import Tensor

from gossamer.compressors import Compressor
from gossamer.core.layout import FlatTensors
from gossamer.core.ops import Payload
from gossamer.core.peer_ops import Pull, Push, Stamp
from gossamer.errors import MismatchError, NotFinite
from gossamer.federated.client import contribution as contributions
from gossamer.federated.client.store import ClientState, ClientStore, PendingContribution
from gossamer.federated.messages import (
    FATE_UNKNOWN,
    PART,
    PART_BYTES,
    REPORT,
    TASK,
    THE_SERVER,
    Fate,
    Report,
    Task,
    decode,
    encode,
)
from gossamer.federated.model_state import ModelState
from gossamer.federated.upload import cut
from gossamer.parameter_server.delta_chain import Replica
from gossamer.strategies.federated import FederatedStrategy, LocalWork
from gossamer.strategies.federated.base import Memory


@dataclass(frozen=True, kw_only=True)
class Train:
    """An op: train from these parameters. Answered by Trained; by whom and in which seconds, the runner says."""

    client: int
    task: Task
    anchor: Tensor  # (n,) the round's parameters; only read
    shared: Memory  # what the server publishes beside them; only read
    memory: Memory  # the device's; only read


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What local training came to."""

    flat: Tensor  # (n,) the trained parameters
    work: LocalWork
    metrics: dict[str, float]
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ClientRecipe:
    """What all devices of a federation have alike."""

    strategy: FederatedStrategy
    compressor: Compressor
    pull: Compressor | None
    state: ModelState
    seed: int = 0
    part_bytes: int = PART_BYTES


ClientScript = Generator[Any, Any, int]


def participate(number: int, recipe: ClientRecipe, store: ClientStore) -> ClientScript:
    """Take part until the federation has ended; returns how many contributions of this start were counted.

    Besides peer ops it yields Train. Raises MalformedError for what no server of this federation sends.
    """
    counted = 0
    while True:
        state = store.load()
        if state.pending is not None:  # this device was restarted
            counted += yield from _deliver(recipe, store, state, begun=True)
            continue
        replica = _replica(recipe, state)
        pulled = yield Pull(of=THE_SERVER, key=TASK, known=replica.version, at_least=state.round + 1)
        task = decode(pulled.about, Task, THE_SERVER)
        if task.refused:
            raise MismatchError(f"The server refused this device. {task.refused}")
        if task.finished:
            return counted
        replica.update(replace(pulled, about=task.chain))
        anchor, *shared = [block.flat for block in replica.values]
        state = _kept(recipe, replace(state, version=replica.version, replica=tuple(b.flat for b in replica.values)))
        store.save(state)
        named = dict(zip(recipe.strategy.shared_keys, shared, strict=True))
        trained: Trained = yield Train(
            client=number, task=task, anchor=anchor, shared=named, memory=_memory(recipe, state, anchor)
        )
        if (yield from _contribute(number, recipe, store, state, task, trained, anchor, named)):
            counted += 1


def _contribute(
    number: int,
    recipe: ClientRecipe,
    store: ClientStore,
    state: ClientState,
    task: Task,
    trained: Trained,
    anchor: Tensor,
    shared: Memory,
) -> Generator[Any, Any, bool]:
    """Encode and send a contribution; whether it was counted."""
    blocks, memory = recipe.strategy.contribute(
        anchor - trained.flat, trained.work, shared, _memory(recipe, state, anchor)
    )
    stamp = Stamp(number, task.round, task.version)
    report = Report(
        samples=trained.work.samples,
        steps=trained.work.steps,
        learning_rate=trained.work.learning_rate,
        metrics={name: value for name, value in trained.metrics.items() if isfinite(value)},
        layout=recipe.state.fingerprint(),
        train_seconds=trained.seconds,
    )
    at = contributions.contribution_context(recipe.seed, number, task.round)
    try:
        encoded = contributions.encode(
            recipe.compressor, recipe.state.layout, blocks, replace(state, memory=dict(memory)), at
        )
    except NotFinite as error:  # training diverged: the next round begins from other parameters
        report = msgspec.structs.replace(report, failed=str(error)[:300])
        yield Push(to=THE_SERVER, key=REPORT, stamp=stamp, about=encode(report))
        store.save(replace(state, round=task.round))
        return False
    report = msgspec.structs.replace(report, counts=encoded.counts)
    state = replace(state, pending=PendingContribution(stamp, report, encoded.payload, encoded.counted))
    store.save(state)
    return (yield from _deliver(recipe, store, state))


def _deliver(
    recipe: ClientRecipe, store: ClientStore, state: ClientState, begun: bool = False
) -> Generator[Any, Any, bool]:
    """Send the contribution whose fate is not known, and remember it; whether it was counted."""
    pending = state.pending
    assert pending is not None
    fate_version = yield from upload(pending.stamp, pending.report, pending.payload, recipe.part_bytes, begun)
    was_counted = fate_version >= 0
    store.save(pending.counted if was_counted else replace(state, round=pending.stamp.step, pending=None))
    return was_counted


def upload(
    stamp: Stamp, report: Report, payload: Payload, part_bytes: int = PART_BYTES, begun: bool = False
) -> Generator[Any, Any, int]:
    """Send a contribution, in parts where it is long; returns the version that it was counted in, or NOT_COUNTED.

    Each part is acknowledged by itself, so what a broken connection costs is one part. begun: parts may have arrived
    before this process began, so the server is asked first which it has not.
    """
    parts = cut(payload, part_bytes)
    for number, part in enumerate(() if begun else parts):
        receipt = yield Push(to=THE_SERVER, key=PART, stamp=stamp, payload=(part,), about=str(number))
        if receipt.version != FATE_UNKNOWN:  # it counted before, or the round is over
            return int(receipt.version)
    if parts:
        report = msgspec.structs.replace(
            report, parts=len(parts), shapes=tuple(tuple(tensor.shape) for tensor in payload)
        )
    while True:
        receipt = yield Push(
            to=THE_SERVER, key=REPORT, stamp=stamp, payload=() if parts else payload, about=encode(report)
        )
        if receipt.version != FATE_UNKNOWN:
            return int(receipt.version)
        for number in decode(receipt.about, Fate, THE_SERVER).missing:
            yield Push(to=THE_SERVER, key=PART, stamp=stamp, payload=(parts[number],), about=str(number))


def _replica(recipe: ClientRecipe, state: ClientState) -> Replica:
    """As it was kept; at version -1 where nothing was."""
    blocks = 1 + len(recipe.strategy.shared_keys)
    like = [
        FlatTensors.zeros(recipe.state.layout, dtype=recipe.state.dtype, device=torch.device("cpu"))
        for _ in range(blocks)
    ]
    replica = Replica(like, recipe.pull, recipe.seed, sender=str(THE_SERVER))
    if state.version >= 0 and len(state.replica) == blocks:
        replica.version = state.version
        for block, flat in zip(replica.values, state.replica, strict=True):
            block.flat.copy_(flat)
    return replica


def _kept(recipe: ClientRecipe, state: ClientState) -> ClientState:
    """What feedback owes is dropped where it is older than the strategy keeps it."""
    limit = recipe.strategy.stale_after
    if limit is None or not state.residuals or state.version - state.residual_version <= limit:
        return state
    return replace(state, residuals=())


def _memory(recipe: ClientRecipe, state: ClientState, like: Tensor) -> Memory:
    return {key: state.memory.get(key, torch.zeros_like(like)) for key in recipe.strategy.memory_keys}
