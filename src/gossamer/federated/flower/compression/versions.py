"""Versions: the server's arrays as nodes hold them, sent as compressed differences to those who hold an earlier one."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated import FederatedStrategy
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Pulled
from gossamer.errors import LayoutError, MalformedError
from gossamer.federated.flower.compression.array_layout import ArrayLayout
from gossamer.federated.flower.compression.framing import PayloadHeader, codec_noun, frame, stype_of, unframe
from gossamer.train.parameter_server.delta_chain import DeltaChain, Replica


class PullCodec(NamedTuple):
    """How differences between versions travel."""

    compressor: Compressor
    seed: int = 0

    @classmethod
    def of(cls, recipe: str, seed: int = 0) -> PullCodec:
        return cls(_compressor(recipe), seed)

    @property
    def stype(self) -> str:
        return stype_of(codec_noun(self.compressor))


class Sent(NamedTuple):
    """What goes to a node: the difference as bytes, or the whole model (n,)."""

    version: int
    difference: bytes | None
    whole: Tensor


class Versions:
    """The server's side: a chain of differences, bounded by the bytes of one whole model."""

    def __init__(self, codec: PullCodec, layout: ArrayLayout, arrays: Tensor) -> None:
        """arrays: (n,) of version 0. Raises LayoutError where nodes would not hold the same bits."""
        if not layout.is_exact:
            raise LayoutError(
                f"Differences of versions need parameters in float32 or float64, and these are {layout.array_dtype}: a "
                "node would hold other bits than the server thinks. Leave pull= out, or train in float32."
            )
        self._codec, self.layout = codec, layout
        self._latest = arrays.clone()
        self._chain = DeltaChain(codec.compressor, [FlatTensors(arrays, layout.layout)], codec.seed)

    @property
    def version(self) -> int:
        return self._chain.version

    def publish(self, arrays: Tensor) -> None:
        """Make (n,) the next version, unless it is the one that is out."""
        if not torch.equal(arrays, self._latest):
            self._latest = arrays.clone()
            self._chain.publish(self.version + 1, [FlatTensors(arrays, self.layout.layout)])

    def sent_to(self, held: int) -> Sent:
        """What brings a node from the version that it holds to this one; -1: it holds none."""
        pulled = self._chain.pulled_since(held)
        (whole,) = self._chain.snapshot()
        if json.loads(pulled.about)["links"] is None:
            return Sent(self.version, None, whole)
        header = PayloadHeader(
            recipe=repr(self._codec.compressor),
            layout=self.layout.fingerprint(),
            step=self.version,
            about=pulled.about,
        )
        return Sent(self.version, frame(header, pulled.payload), whole)


def brought(codec: PullCodec, layout: ArrayLayout, replica: Payload, held: int, data: bytes) -> tuple[int, Tensor]:
    """A node's side: the version that a difference leads to from the one that it holds, and its arrays (n,).

    Links that the node has followed already are passed over: the server hears late of what a node holds. Raises
    MalformedError where the node does not hold what the difference begins with.
    """
    header, payload = unframe(data)
    if header.layout != layout.fingerprint() or header.recipe != repr(codec.compressor) or len(replica) != 1:
        raise MalformedError(
            f"a difference to version {header.step} came, made by {header.recipe[:200]} for other arrays than this "
            "node holds; nothing was applied, and the next message brings the whole model"
        )
    own = Replica([FlatTensors(replica[0], layout.layout)], codec.compressor, codec.seed, sender="the server")
    own.version = held
    own.values[0].flat.copy_(replica[0])
    own.update(_beyond(Pulled(version=header.step, payload=payload, about=header.about), held))
    return header.step, own.values[0].flat


def _beyond(pulled: Pulled, held: int) -> Pulled:
    """The links of a chain that lead beyond a version."""
    try:
        links = [(int(known), int(version), list(map(int, counts))) for known, version, counts in _links(pulled)]
    except (ValueError, TypeError) as error:
        raise MalformedError(f"a difference's links cannot be read ({error}); nothing was applied") from error
    done = sum(sum(counts) for _, version, counts in links if version <= held)
    left = [link for link in links if link[1] > held]
    return replace(pulled, payload=pulled.payload[done:], about=json.dumps({"links": left}))


def _links(pulled: Pulled) -> list[tuple[int, int, list[int]]]:
    found = json.loads(pulled.about)
    if not isinstance(found, dict) or not isinstance(found.get("links"), list):
        raise ValueError("there are none")
    links: list[tuple[int, int, list[int]]] = found["links"]
    return links


@lru_cache(maxsize=64)
def _compressor(recipe: str) -> Compressor:
    """As a strategy's `pull`: without feedback, since what one difference loses is in the next. The same object for the
    same text: it is asked for with every message."""
    strategy = resolve(f"FedAvg(pull={recipe})").strategy
    assert isinstance(strategy, FederatedStrategy)
    assert strategy.pull_compressor is not None
    return strategy.pull_compressor
