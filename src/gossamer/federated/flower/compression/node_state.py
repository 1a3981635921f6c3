"""Node state: what a Flower node keeps between its rounds: feedback, and the version of the model that it holds.

A node is not told at once whether its contribution was counted: the reply may be late, or lost. So it keeps what
feedback owed before and what it owes if the contribution counted, and the next message to it says which is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
from torch import Tensor

from gossamer.base.ops import Payload
from gossamer.errors import MalformedError
from gossamer.federated.flower.compression.array_layout import ArrayLayout
from gossamer.federated.flower.compression.framing import PayloadHeader, frame, unframe
from gossamer.federated.flower.compression.notes import NodeInvitation, Since

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
