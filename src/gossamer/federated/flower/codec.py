"""Codecs: contributions of nodes with error feedback, and differences between versions, as the bytes of one Array.

A node does not learn immediately whether its contribution was counted: the reply can be late or lost. It therefore
keeps two residuals, for both outcomes, and the next message of the server selects one."""

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
from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
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
    """State of a node, except tensors."""

    run: str = ""
    recipe: str = ""
    arrays: str = ""  # of the model, as an ArrayLayout's text
    names: tuple[str, ...] = ()  # of all arrays of the model, in its order
    step: Since = -1  # of the contribution with an unknown outcome
    version: Since = -1  # of the replica


@dataclass(frozen=True)
class NodeState:
    """State of a node between rounds; empty at first."""

    note: KeptNote = KeptNote()
    before: Residuals = ()  # residuals if the last contribution was not counted
    after: Residuals = ()  # residuals if it was counted
    replica: Payload = ()  # (n,) of note.version, if versions are compressed

    def for_invitation(self, invitation: NodeInvitation) -> NodeState:
        """The state after the server's note: one residual is selected, and the state of another run is dropped."""
        if (self.note.run, self.note.recipe) != (invitation.run, invitation.recipe):
            return NodeState(KeptNote(run=invitation.run, recipe=invitation.recipe))
        if invitation.step < 0 or self.note.step < 0:
            return self
        unsent = (
            self.after if invitation.counted == self.note.step else self.before
        )  # an uncounted contribution is lost
        return replace(self, note=msgspec.structs.replace(self.note, step=-1), before=unsent, after=())

    def holding(
        self, invitation: NodeInvitation, layout: ArrayLayout, names: tuple[str, ...], flat: Tensor
    ) -> NodeState:
        """The state after a whole model (n,) arrived. Residuals of other arrays are dropped."""
        text = layout.to_text()
        kept = self if self.note.arrays == text else replace(self, before=(), after=())
        version = invitation.version if invitation.pull else -1
        note = msgspec.structs.replace(kept.note, arrays=text, names=names, version=version)
        return replace(kept, note=note, replica=(flat,) if invitation.pull else ())

    def to_bytes(self) -> tuple[str, dict[str, bytes]]:
        """A JSON text, and the bytes of Arrays by name."""
        arrays = {name: _pack(kept) for name, kept in (("before", self.before), ("after", self.after)) if kept}
        if self.replica:
            arrays["replica"] = frame(PayloadHeader(), self.replica)
        return msgspec.json.encode(self.note).decode(), arrays

    @classmethod
    def from_bytes(cls, text: str, arrays: Mapping[str, bytes]) -> NodeState:
        """Parse the result of `to_bytes`. Raises MalformedError."""
        try:
            note = msgspec.json.decode(text, type=KeptNote)
        except msgspec.DecodeError as error:
            raise MalformedError(f"a node's stored state cannot be read: {error}") from error
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
        raise MalformedError(f"a node's stored residuals cannot be read: {error}") from error
    if sum(map(len, keys)) != len(payload):
        raise MalformedError(f"a node's stored residuals have {len(payload)} tensors for {keys}")
    rest = iter(payload)
    return tuple({key: next(rest) for key in block} for block in keys)


@dataclass(frozen=True)
class ContributionCodec:
    """Encodes contributions on nodes and decodes them on the server, with the same compressor and seed."""

    compressor: Compressor  # complete: with error feedback, and a rule for every shape
    seed: int = 0

    @classmethod
    def of(cls, recipe: str, seed: int = 0) -> ContributionCodec:
        """From a compressor's text. Raises RecipeError if nodes cannot use it."""
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
        """Encode (n,) plus residuals. Returns the bytes and the residuals once they are counted. Raises NotFinite."""
        at = contribution.contribution_context(self.seed, node, step)
        made = contribution.encode(self.compressor, layout.layout, [difference], ClientState(residuals=residuals), at)
        header = PayloadHeader(recipe=self.text, layout=layout.fingerprint(), step=step, counts=made.counts)
        return frame(header, made.payload), made.counted.residuals

    def decode(self, data: bytes, layout: ArrayLayout, node: int, step: int) -> Tensor:
        """Decode a difference, (n,), new and finite. Raises MalformedError.

        Memory is allocated by the server's own layout; sizes in the message are only compared.
        """
        header, payload = unframe(data)
        due = PayloadHeader(recipe=self.text, layout=layout.fingerprint(), step=step)
        for name in ("recipe", "layout", "step"):
            came, wanted = getattr(header, name), getattr(due, name)
            if came != wanted:
                raise MalformedError(
                    f"node {node} sent a contribution of {name} {str(came)[:200]!r}, expected {str(wanted)[:200]!r}; "
                    "it was not used. Give the mod and the strategy's wrapper the same recipe"
                )
        like = FlatTensors.zeros(layout.layout, dtype=layout.dtype, device=torch.device("cpu"))
        at = contribution.contribution_context(self.seed, node, step)
        (found,) = shard_message.decode(self.compressor, payload, header.counts, [like], at)
        return found


@lru_cache(maxsize=64)
def _compressor(recipe: str) -> Compressor:
    """Cached, since every message needs the compressor."""
    compressor = resolve(f"FedAvg() + {recipe}").compressor
    if compressor.incremental or compressor.adapts:
        raise RecipeError(
            f"{recipe} sends changes to its previous message, but a node's reply can be lost or left out, and the next "
            'one would be useless. Write a compressor with independent messages, such as "TopK(0.01)".'
        )
    return compressor


class PullCodec(NamedTuple):
    """Compressor of differences between versions."""

    compressor: Compressor
    seed: int = 0

    @classmethod
    def of(cls, recipe: str, seed: int = 0) -> PullCodec:
        return cls(_pull_compressor(recipe), seed)

    @property
    def stype(self) -> str:
        return stype_of(codec_noun(self.compressor))


class Sent(NamedTuple):
    """A message to a node: the difference as bytes, or the whole model (n,)."""

    version: int
    difference: bytes | None
    whole: Tensor


class Versions:
    """The server's side: a chain of differences, bounded by the bytes of one whole model."""

    def __init__(self, codec: PullCodec, layout: ArrayLayout, arrays: Tensor) -> None:
        """arrays: (n,) of version 0. Raises LayoutError for dtypes that nodes cannot reproduce bit by bit."""
        if not layout.is_exact:
            raise LayoutError(
                f"Differences of versions need parameters in float32 or float64, but these are {layout.array_dtype}: a "
                "node's model would differ in bits from the server's. Leave pull= out, or train in float32."
            )
        self._codec, self.layout = codec, layout
        self._latest = arrays.clone()
        self._chain = DeltaChain(codec.compressor, [FlatTensors(arrays, layout.layout)], codec.seed)

    @property
    def version(self) -> int:
        return self._chain.version

    def publish(self, arrays: Tensor) -> None:
        """Make (n,) the next version, unless it equals the latest."""
        if not torch.equal(arrays, self._latest):
            self._latest = arrays.clone()
            self._chain.publish(self.version + 1, [FlatTensors(arrays, self.layout.layout)])

    def sent_to(self, held: int) -> Sent:
        """The update of a node from version `held` to the latest; held=-1: the node has no version."""
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
    """A node's side: apply a difference to the version that it holds.

    Links that are already applied are skipped, since the server can be late to learn the node's version.

    Args:
        codec: of the differences.
        layout: of the arrays.
        replica: (n,) of version `held`.
        held: version that the node holds.
        data: the difference.

    Returns:
        The new version and its arrays (n,).

    Raises:
        MalformedError: the difference does not start at a version that the node holds.
    """
    header, payload = unframe(data)
    if header.layout != layout.fingerprint() or header.recipe != repr(codec.compressor) or len(replica) != 1:
        raise MalformedError(
            f"received a difference to version {header.step}, made by {header.recipe[:200]} for other arrays than this "
            "node holds; it was not applied, and the next message has the whole model"
        )
    own = Replica([FlatTensors(replica[0], layout.layout)], codec.compressor, codec.seed, sender="the server")
    own.version = held
    own.values[0].flat.copy_(replica[0])
    own.update(_beyond(Pulled(version=header.step, payload=payload, about=header.about), held))
    return header.step, own.values[0].flat


def _beyond(pulled: Pulled, held: int) -> Pulled:
    """The links of a chain after version `held`."""
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
        raise ValueError("links are missing")
    links: list[tuple[int, int, list[int]]] = found["links"]
    return links


@lru_cache(maxsize=64)
def _pull_compressor(recipe: str) -> Compressor:
    """Compressor of a strategy's `pull`, without error feedback: the next difference includes the error of this one.
    Cached, since every message needs it."""
    strategy = resolve(f"FedAvg(pull={recipe})").strategy
    assert isinstance(strategy, FederatedStrategy)
    assert strategy.pull_compressor is not None
    return strategy.pull_compressor
