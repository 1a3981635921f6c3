"""What workers are told of parameters: as they are, or as a chain of compressed differences."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.compressors import Compressor
from gossamer.core import rng
from gossamer.core.aggregation import AggregationContext
from gossamer.core.layout import FlatTensors, accumulation_dtype
from gossamer.core.ops import Payload, payload_bytes
from gossamer.core.peer_ops import Pulled
from gossamer.errors import MalformedError, NotFinite
from gossamer.parameter_server import shard_message

WHOLE = json.dumps({"links": None})
NOTHING = json.dumps({"links": []})


class Public(ABC):
    """What all workers may know of a shard's parameters, at `version`."""

    version: int

    @abstractmethod
    def publish(self, version: int, values: Sequence[FlatTensors]) -> None:
        """Let `values`, which are of `version`, be known as well as they can be."""

    @abstractmethod
    def every(self, workers: int) -> int:
        """After how many steps something is published, where each of `workers` asks after each of its own."""

    @abstractmethod
    def whole(self) -> Payload:
        """All that is known: (n,) for each block; nobody writes to it again."""

    def answer(self, known: int) -> Pulled:
        """What brings a worker that knows version `known` to this one."""
        if known == self.version:
            return Pulled(version=self.version, about=NOTHING)
        return Pulled(version=self.version, payload=self.whole(), about=WHOLE)

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "whole": list(self.whole())}

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Snapshot(Public):
    """The parameters as they are: one copy, shared by all who ask for the same version."""

    def __init__(self, values: Sequence[FlatTensors]) -> None:
        self.publish(0, values)

    def publish(self, version: int, values: Sequence[FlatTensors]) -> None:
        self.version = version
        self._copy = tuple(block.flat.clone() for block in values)

    def every(self, workers: int) -> int:
        return 1

    def whole(self) -> Payload:
        return self._copy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self._copy = state["version"], tuple(state["whole"])


class Delta(NamedTuple):
    """From version `known` to `version`: a bundle of letters, so many tensors for each block."""

    known: int
    version: int
    counts: tuple[int, ...]
    payload: Payload


def delta_at(seed: int, version: int) -> AggregationContext:
    """Where the link to `version` stands."""
    return AggregationContext(step=version, seed=rng.address(seed, "pull"))


class DeltaChain(Public):
    """A public estimate xhat of the parameters x that every worker comes to, bit for bit, by the same links.

    q = C(x - xhat), xhat <- xhat + q. What C loses is in the next difference, so nothing else is remembered.

    Links are kept while they are cheaper, all together, than the estimate itself. Memory: 3 N, one for all workers.
    """

    def __init__(self, compressor: Compressor, values: Sequence[FlatTensors], seed: int) -> None:
        self.version = 0
        self._compressor, self._seed = compressor, seed
        self._blocks = tuple(
            FlatTensors(b.flat.to(accumulation_dtype(b.flat.dtype), copy=True), b.layout) for b in values
        )
        self._states = shard_message.begin(compressor, self._blocks, delta_at(seed, 0))
        self._links: list[Delta] = []
        self._copy: Payload | None = None

    def publish(self, version: int, values: Sequence[FlatTensors]) -> None:
        try:
            self._link(version, values)
        except NotFinite:  # training diverged, which workers shall see
            self._links.clear()
            for known, x in zip(self._blocks, values, strict=True):
                known.flat.copy_(x.flat)
        self.version, self._copy = version, None

    def _link(self, version: int, values: Sequence[FlatTensors]) -> None:
        missing = [
            FlatTensors(x.flat - known.flat, known.layout) for x, known in zip(values, self._blocks, strict=True)
        ]
        written = shard_message.write(self._compressor, missing, self._states, delta_at(self._seed, version))
        link = Delta(self.version, version, written.counts, tuple(tensor.clone() for tensor in written.payload))
        apply_delta(self._blocks, self._compressor, link, self._seed)
        self._states = written.states
        self._links.append(link)
        while sum(payload_bytes(each.payload) for each in self._links) >= self._bytes:
            del self._links[0]

    @property
    def _bytes(self) -> int:
        return max(sum(block.flat.nbytes for block in self._blocks), 1)

    def every(self, workers: int) -> int:
        return max(workers, 1)

    def whole(self) -> Payload:
        if self._copy is None:
            self._copy = tuple(block.flat.clone() for block in self._blocks)
        return self._copy

    def answer(self, known: int) -> Pulled:
        missed = [link for link in self._links if link.known >= known]
        if not missed or missed[0].known != known:
            return super().answer(known)
        return Pulled(
            version=self.version,
            payload=tuple(tensor for link in missed for tensor in link.payload),
            about=json.dumps({"links": [[link.known, link.version, link.counts] for link in missed]}),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "links": [tuple(link) for link in self._links],
            "states": [{key: packed.flat for key, packed in state.items()} for state in self._states],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self._copy = state["version"], None
        for block, flat in zip(self._blocks, state["whole"], strict=True):
            block.flat.copy_(flat)
        self._links = [Delta(*link) for link in state["links"]]
        for mine, saved in zip(self._states, state["states"], strict=True):
            for key, packed in mine.items():
                packed.flat.copy_(saved[key])


def apply_delta(blocks: Sequence[FlatTensors], compressor: Compressor, link: Delta, seed: int) -> None:
    """xhat <- xhat + q, the same on the server and on every worker. Raises MalformedError before it writes."""
    found = shard_message.read(compressor, link.payload, link.counts, blocks, delta_at(seed, link.version))
    for block, q in zip(blocks, found, strict=True):
        block.flat.add_(q)


class Replica:
    """A worker's copy of what is public: `values` of `version`, -1 before anything came."""

    def __init__(self, like: Sequence[FlatTensors], compressor: Compressor | None, seed: int) -> None:
        self.version = -1
        self._compressor, self._seed = compressor, seed
        dtypes = [b.flat.dtype if compressor is None else accumulation_dtype(b.flat.dtype) for b in like]
        self.values = tuple(
            FlatTensors.zeros(b.layout, dtype=dtype, device=torch.device("cpu"))
            for b, dtype in zip(like, dtypes, strict=True)
        )

    def take(self, pulled: Pulled) -> None:
        """Come to the version that was pulled. Raises MalformedError for what no server sends."""
        try:
            links = json.loads(pulled.about)["links"]
            chain = None if links is None else [(int(k), int(v), tuple(map(int, counts))) for k, v, counts in links]
        except (ValueError, TypeError, KeyError) as error:
            raise MalformedError(f"a server told how to read its parameters by {pulled.about!r}") from error
        if chain is None:
            self._take_whole(pulled.payload)
        else:
            self._follow(chain, pulled.payload)
        self.version = pulled.version

    def _take_whole(self, payload: Payload) -> None:
        due = [(mine.flat.shape, mine.flat.dtype) for mine in self.values]
        if due != [(tensor.shape, tensor.dtype) for tensor in payload]:
            raise MalformedError(f"parameters came in other sizes than {due}")
        for mine, tensor in zip(self.values, payload, strict=True):
            mine.flat.copy_(tensor)

    def _follow(self, chain: Sequence[tuple[int, int, tuple[int, ...]]], payload: Payload) -> None:
        rest: list[Tensor] = list(payload)
        for known, version, counts in chain:
            if known != self.version or self._compressor is None:
                raise MalformedError(f"a link from version {known} came, and this worker is at {self.version}")
            mine, rest = rest[: sum(counts)], rest[sum(counts) :]
            apply_delta(self.values, self._compressor, Delta(known, version, counts, tuple(mine)), self._seed)
            self.version = version
