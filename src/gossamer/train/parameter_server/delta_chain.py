"""Delta chain: publishes parameters to workers as compressed differences of versions, or as uncompressed snapshots."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.base.ops import Payload, payload_bytes
from gossamer.base.peer_ops import Pulled
from gossamer.errors import MalformedError, NotFinite
from gossamer.train.parameter_server import shard_message

ABOUT_SNAPSHOT = json.dumps({"links": None})
ABOUT_NOTHING_NEW = json.dumps({"links": []})


class PublicParameters(ABC):
    """The published parameters of a shard at `version`, which workers can pull."""

    version: int

    @abstractmethod
    def publish(self, version: int, values: Sequence[FlatTensors], changed: Collection[int] | None = None) -> None:
        """Make `values` of `version` available to pulls, as exactly as the codec can.

        Args:
            changed: numbers of the blocks that changed since the last publication; None: all.
        """

    @abstractmethod
    def publish_interval(self, workers: int) -> int:
        """Number of steps between two publications, if each of `workers` pulls after each of its own steps."""

    @abstractmethod
    def snapshot(self) -> Payload:
        """The whole published parameters: (n,) for each block; they are not modified later."""

    def pulled_since(self, known: int) -> Pulled:
        """The answer for a worker with version `known`."""
        if known == self.version:
            return Pulled(version=self.version, about=ABOUT_NOTHING_NEW)
        return Pulled(version=self.version, payload=self.snapshot(), about=ABOUT_SNAPSHOT)

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "whole": list(self.snapshot())}

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Snapshot(PublicParameters):
    """Uncompressed publication: one copy of each block, shared by all pulls that do not have it."""

    def __init__(self, values: Sequence[FlatTensors]) -> None:
        self._snapshot: Payload = tuple(block.flat for block in values)
        self._changed_at = [0] * len(values)  # by block, the version of its last change
        self.publish(0, values)

    def publish(self, version: int, values: Sequence[FlatTensors], changed: Collection[int] | None = None) -> None:
        self.version = version
        replaced = range(len(values)) if changed is None else changed
        self._snapshot = tuple(
            block.flat.clone() if number in replaced else self._snapshot[number] for number, block in enumerate(values)
        )
        for number in replaced:
            self._changed_at[number] = version

    def pulled_since(self, known: int) -> Pulled:
        missing = [number for number, changed_at in enumerate(self._changed_at) if changed_at > known]
        if known == self.version or len(missing) == len(self._snapshot):
            return super().pulled_since(known)
        payload = tuple(self._snapshot[number] for number in missing)
        return Pulled(version=self.version, payload=payload, about=json.dumps({"links": None, "blocks": missing}))

    def publish_interval(self, workers: int) -> int:
        return 1

    def snapshot(self) -> Payload:
        return self._snapshot

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The blocks' versions are not in the state: all count as changed at the last publication."""
        self.version, self._snapshot = state["version"], tuple(state["whole"])
        self._changed_at = [self.version] * len(self._snapshot)


class Delta(NamedTuple):
    """A compressed difference between two versions."""

    known: int  # the version before
    version: int  # the version after
    counts: tuple[int, ...]  # number of payload tensors, by block
    payload: Payload


def delta_context(seed: int, version: int) -> AggregationContext:
    """The context for encoding and decoding the delta to `version`."""
    return AggregationContext(step=version, seed=rng.address(seed, "pull"))


class DeltaChain(PublicParameters):
    """Server-side estimate xhat of the parameters x; every replica equals it bit for bit by applying the same deltas.

    q = C(x - xhat), xhat <- xhat + q. The next difference includes the error of C, so no other error feedback is used.

    Deltas are kept while their total size is below that of the estimate. Memory: 3 N, independent of the number of
    workers.
    """

    def __init__(self, compressor: Compressor, values: Sequence[FlatTensors], seed: int) -> None:
        self.version = 0
        self._compressor, self._seed = compressor, seed
        self._blocks = tuple(
            FlatTensors(b.flat.to(accumulation_dtype(b.flat.dtype), copy=True), b.layout) for b in values
        )
        self._states = shard_message.initial_states(compressor, self._blocks, delta_context(seed, 0))
        self._deltas: list[Delta] = []
        self._snapshot: Payload | None = None

    def publish(self, version: int, values: Sequence[FlatTensors], changed: Collection[int] | None = None) -> None:
        try:
            self._append_delta(version, values)
        except NotFinite:  # training diverged; workers must receive these values
            self._deltas.clear()
            for known, x in zip(self._blocks, values, strict=True):
                known.flat.copy_(x.flat)
        self.version, self._snapshot = version, None

    def _append_delta(self, version: int, values: Sequence[FlatTensors]) -> None:
        difference = [
            FlatTensors(x.flat - known.flat, known.layout) for x, known in zip(values, self._blocks, strict=True)
        ]
        contexts = [delta_context(self._seed, version)] * len(difference)
        message = shard_message.encode(self._compressor, difference, self._states, contexts)
        delta = Delta(self.version, version, message.counts, tuple(tensor.clone() for tensor in message.payload))
        apply_delta(self._blocks, self._compressor, delta, self._seed)
        self._states = message.states
        self._deltas.append(delta)
        while sum(payload_bytes(each.payload) for each in self._deltas) >= self._bytes:
            del self._deltas[0]

    @property
    def _bytes(self) -> int:
        return max(sum(block.flat.nbytes for block in self._blocks), 1)

    def publish_interval(self, workers: int) -> int:
        return max(workers, 1)

    def snapshot(self) -> Payload:
        if self._snapshot is None:
            self._snapshot = tuple(block.flat.clone() for block in self._blocks)
        return self._snapshot

    def pulled_since(self, known: int) -> Pulled:
        since = [delta for delta in self._deltas if delta.known >= known]
        if not since or since[0].known != known:
            return super().pulled_since(known)
        return Pulled(
            version=self.version,
            payload=tuple(tensor for delta in since for tensor in delta.payload),
            about=json.dumps({"links": [[delta.known, delta.version, delta.counts] for delta in since]}),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "links": [tuple(delta) for delta in self._deltas],
            "states": [{key: packed.flat for key, packed in state.items()} for state in self._states],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self._snapshot = state["version"], None
        for block, flat in zip(self._blocks, state["whole"], strict=True):
            block.flat.copy_(flat)
        self._deltas = [Delta(*delta) for delta in state["links"]]
        for compressor_state, saved in zip(self._states, state["states"], strict=True):
            for key, packed in compressor_state.items():
                packed.flat.copy_(saved[key])


def apply_delta(blocks: Sequence[FlatTensors], compressor: Compressor, delta: Delta, seed: int) -> None:
    """xhat <- xhat + q, the same on the server and on every worker. Raises MalformedError before any write."""
    found = shard_message.decode(compressor, delta.payload, delta.counts, blocks, delta_context(seed, delta.version))
    for block, q in zip(blocks, found, strict=True):
        block.flat.add_(q)


class Replica:
    """A worker's replica of the published parameters: `values` of `version`, -1 before the first pull."""

    def __init__(
        self, like: Sequence[FlatTensors], compressor: Compressor | None, seed: int, sender: str = "a server"
    ) -> None:
        self.version = -1
        self._compressor, self._seed, self._sender = compressor, seed, sender
        dtypes = [b.flat.dtype if compressor is None else accumulation_dtype(b.flat.dtype) for b in like]
        self.values = tuple(
            FlatTensors.zeros(b.layout, dtype=dtype, device=torch.device("cpu"))
            for b, dtype in zip(like, dtypes, strict=True)
        )

    def update(self, pulled: Pulled) -> None:
        """Apply a pull. Raises MalformedError for an invalid one."""
        try:
            description = json.loads(pulled.about)
            deltas, numbers = description["links"], description.get("blocks")
            own = self.values if numbers is None else [self.values[number] for number in numbers]
            chain = None if deltas is None else [(int(k), int(v), tuple(map(int, counts))) for k, v, counts in deltas]
        except (ValueError, TypeError, LookupError) as error:
            raise MalformedError(
                f"{self._sender} described its parameters by {pulled.about[:200]!r}, which cannot be read; nothing was "
                "applied. Install the same version of Gossamer everywhere"
            ) from error
        if chain is None:
            self._replace(own, pulled.payload)
        else:
            self._apply_deltas(chain, pulled.payload)
        self.version = pulled.version

    def _replace(self, blocks: Sequence[FlatTensors], payload: Payload) -> None:
        due = [(own.flat.shape, own.flat.dtype) for own in blocks]
        if due != [(tensor.shape, tensor.dtype) for tensor in payload]:
            came = [(tuple(tensor.shape), tensor.dtype) for tensor in payload]
            raise MalformedError(
                f"{self._sender} sent parameters of sizes {came}, but this worker expects {due}: the server was "
                "started with another model or recipe. Run the same script with the same recipe on every worker"
            )
        for own, tensor in zip(blocks, payload, strict=True):
            own.flat.copy_(tensor)

    def _apply_deltas(self, chain: Sequence[tuple[int, int, tuple[int, ...]]], payload: Payload) -> None:
        rest: list[Tensor] = list(payload)
        for known, version, counts in chain:
            if known != self.version or self._compressor is None:
                raise MalformedError(
                    f"{self._sender} sent a delta from version {known} to {version}, but this worker is at version "
                    f"{self.version} {'without' if self._compressor is None else 'with'} pull compression: the server "
                    "runs another recipe, or lost its journal. Run the same recipe everywhere"
                )
            message, rest = rest[: sum(counts)], rest[sum(counts) :]
            apply_delta(self.values, self._compressor, Delta(known, version, counts, tuple(message)), self._seed)
            self.version = version
