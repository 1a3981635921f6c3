"""Notes: what the strategy's wrapper and the mod tell each other beside arrays, as one JSON text in a ConfigRecord."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from gossamer.base.json_text import read_json
from gossamer.errors import MalformedError
from gossamer.federated.messages import Count

RECORD = "gossamer"  # of the notes, among a message's records and a node's
PAYLOAD = "gossamer"  # of the payload, among a record's arrays
NOTE = "note"  # of the JSON text, in the record
MOST_LETTERS = 1 << 16

Since = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]  # -1: none yet
Short = Annotated[str, msgspec.Meta(max_length=8192)]


class NodeInvitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node is told beside the model."""

    run: Short  # of the wrapper; what a node kept of another is dropped
    recipe: Short  # the compressor of contributions
    pull: Short = ""  # the compressor of differences between versions; empty: parameters travel as they are
    seed: Count = 0
    step: Since = -1  # of the contribution that is asked for; -1: none
    counted: Since = -1  # the step of this node's last contribution that was counted
    version: Count = 0  # of the arrays in this message


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node tells beside what it learned."""

    run: Short
    step: Since = -1  # of the contribution; -1: none was asked for
    held: Since = -1  # the version that the node holds now


Note = TypeVar("Note", NodeInvitation, NodeAnswer)


def to_text(note: NodeInvitation | NodeAnswer) -> str:
    return msgspec.json.encode(note).decode()


def from_text(text: object, kind: type[Note], sender: str) -> Note:
    """Raises MalformedError."""
    try:
        if not isinstance(text, str) or len(text) > MOST_LETTERS:
            raise ValueError("a short JSON text was due")
        found: Any = read_json(text)
        return msgspec.convert(found, kind, strict=True)
    except (ValueError, msgspec.ValidationError) as error:
        raise MalformedError(
            f"{sender} sent a note that cannot be read ({error}); nothing of it was used. Install the same version of "
            "Gossamer everywhere"
        ) from error
