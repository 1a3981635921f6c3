"""Codecs: contributions of nodes with feedback, and differences between versions, as the bytes of one Array.

A node is not told at once whether its contribution was counted: the reply may be late, or lost. So it keeps what
feedback owed before and what it owes if the contribution counted, and the next message to it says which is true."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated import FederatedStrategy
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Pulled
from gossamer.errors import LayoutError, MalformedError, RecipeError
from gossamer.federated.client import contribution
from gossamer.federated.client.store import ClientState
from gossamer.federated.flower.arrays import ArrayLayout, PayloadHeader, codec_noun, frame, stype_of, unframe
from gossamer.federated.flower.records import NodeInvitation, Since
from gossamer.train.parameter_server import shard_message
from gossamer.train.parameter_server.delta_chain import DeltaChain, Replica

Residuals = tuple[dict[str, Tensor], ...]  # a compressor's state, by block
STYPE = "gossamer.state.v1"


class KeptNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a node keeps beside tensors."""

    run: str = ""
    recipe: str = ""
    arrays: str = ""  # of the model, as an ArrayLayout's text
    names: tuple[str, ...] = ()  # of all arrays of the model, in its order
    step: Since = -1  # of the contribution whose fate is not known
    version: Since = -1  # of the replica


@dataclass(frozen=True)
class NodeState:
    """What a node keeps: nothing at first."""

    note: KeptNote = KeptNote()
    before: Residuals = ()  # what feedback owes if the last contribution was not counted
    after: Residuals = ()  # what it owes if it was
    replica: Payload = ()  # (n,) of note.version, where versions travel compressed

    def for_invitation(self, told: NodeInvitation) -> NodeState:
        """The state with which the invitation is answered: feedback is settled, and what is of another run is gone."""
        if (self.note.run, self.note.recipe) != (told.run, told.recipe):
            return NodeState(KeptNote(run=told.run, recipe=told.recipe))
        if told.step < 0 or self.note.step < 0:
            return self
        owed = self.after if told.counted == self.note.step else self.before  # what was sent before is now given up
        return replace(self, note=msgspec.structs.replace(self.note, step=-1), before=owed, after=())

    def holding(self, told: NodeInvitation, layout: ArrayLayout, names: tuple[str, ...], flat: Tensor) -> NodeState:
        """The state once the whole model came: (n,). What feedback owes is of these arrays, or dropped."""
        text = layout.to_text()
        kept = self if self.note.arrays == text else replace(self, before=(), after=())
        version = told.version if told.pull else -1
        note = msgspec.structs.replace(kept.note, arrays=text, names=names, version=version)
        return replace(kept, note=note, replica=(flat,) if told.pull else ())

    def to_bytes(self) -> tuple[str, dict[str, bytes]]:
        """A JSON text, and the bytes of Arrays by name."""
        arrays = {name: _pack(kept) for name, kept in (("before", self.before), ("after", self.after)) if kept}
        if self.replica:
            arrays["replica"] = frame(PayloadHeader(), self.replica)
        return msgspec.json.encode(self.note).decode(), arrays

    @classmethod
    def from_bytes(cls, text: str, arrays: Mapping[str, bytes]) -> NodeState:
        """Raises MalformedError for what `to_bytes` did not write."""
        try:
            note = msgspec.json.decode(text, type=KeptNote)
        except msgspec.DecodeError as error:
            raise MalformedError(f"what a node kept cannot be read: {error}") from error
        before, after = (_unpack(arrays[name]) if name in arrays else () for name in ("before", "after"))
        replica = unframe(arrays["replica"]).payload if "replica" in arrays else ()
        return cls(note, before, after, replica)


def _pack(residuals: Residuals) -> bytes:
    keys = [list(block) for block in residuals]
    payload = tuple(tensor for block in residuals for tensor in block.values())
    return frame(PayloadHeader(about=msgspec.json.encode(keys).decode()), payload)


def _unpack(data: bytes) -> Residuals:
    header, payload = unframe(data)
    try:
        keys = msgspec.json.decode(header.about, type=list[list[str]])
    except msgspec.DecodeError as error:
        raise MalformedError(f"what a node kept of feedback cannot be read: {error}") from error
    if sum(map(len, keys)) != len(payload):
        raise MalformedError(f"what a node kept of feedback has {len(payload)} tensors for {keys}")
    rest = iter(payload)
    return tuple({key: next(rest) for key in block} for block in keys)


@dataclass(frozen=True)
class ContributionCodec:
    """Encodes on nodes and decodes on the server, alike on both: compressor and seed."""

    compressor: Compressor  # complete: with feedback, and a way for every shape
    seed: int = 0

    @classmethod
    def of(cls, recipe: str, seed: int = 0) -> ContributionCodec:
        """Of a compressor's text. Raises RecipeError for what devices cannot send."""
        return cls(_compressor(recipe), seed)

    @property
    def text(self) -> str:
        return repr(self.compressor)

    @property
    def stype(self) -> str:
        return stype_of(codec_noun(self.compressor))

    def encode(
        self, difference: Tensor, layout: ArrayLayout, residuals: Residuals, node: int, step: int
    ) -> tuple[bytes, Residuals]:
        """The bytes for (n,), with what feedback owes, and what it owes once they count. Raises NotFinite."""
        at = contribution.contribution_context(self.seed, node, step)
        made = contribution.encode(self.compressor, layout.layout, [difference], ClientState(residuals=residuals), at)
        header = PayloadHeader(recipe=self.text, layout=layout.fingerprint(), step=step, counts=made.counts)
        return frame(header, made.payload), made.counted.residuals

    def decode(self, data: bytes, layout: ArrayLayout, node: int, step: int) -> Tensor:
        """The difference, (n,), fresh and finite. Raises MalformedError.

        All memory is of this server's own layout: what a node claims of sizes is only compared.
        """
        header, payload = unframe(data)
        due = PayloadHeader(recipe=self.text, layout=layout.fingerprint(), step=step)
        for name in ("recipe", "layout", "step"):
            came, wanted = getattr(header, name), getattr(due, name)
            if came != wanted:
                raise MalformedError(
                    f"node {node} sent a contribution of {name} {str(came)[:200]!r} and {str(wanted)[:200]!r} was due; "
                    "nothing of it was used. Give the mod and the strategy's wrapper the same recipe"
                )
        like = FlatTensors.zeros(layout.layout, dtype=layout.dtype, device=torch.device("cpu"))
        at = contribution.contribution_context(self.seed, node, step)
        (found,) = shard_message.decode(self.compressor, payload, header.counts, [like], at)
        return found


@lru_cache(maxsize=64)
def _compressor(recipe: str) -> Compressor:
    """The same object for the same text: it is asked for with every message."""
    compressor = resolve(f"FedAvg() + {recipe}").compressor
    if compressor.incremental or compressor.adapts:
        raise RecipeError(
            f"{recipe} sends changes to what it sent before, and a node's reply may be lost or left out: the next "
            'one would mean nothing. Write a compressor whose messages stand alone, such as "TopK(0.01)".'
        )
    return compressor


class PullCodec(NamedTuple):
    """How differences between versions travel."""

    compressor: Compressor
    seed: int = 0

    @classmethod
    def of(cls, recipe: str, seed: int = 0) -> PullCodec:
        return cls(_pull_compressor(recipe), seed)

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
def _pull_compressor(recipe: str) -> Compressor:
    """As a strategy's `pull`: without feedback, since what one difference loses is in the next. The same object for the
    same text: it is asked for with every message."""
    strategy = resolve(f"FedAvg(pull={recipe})").strategy
    assert isinstance(strategy, FederatedStrategy)
    assert strategy.pull_compressor is not None
    return strategy.pull_compressor
