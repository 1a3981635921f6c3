"""Words as messages and back. A request's number ties an answer to its ask; peers never see it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from torch import Tensor

from gossamer.core.ops import Payload
from gossamer.core.peer_ops import Answer, Ask, Peer, Pull, Pulled, Push, Receipt, Stamp
from gossamer.errors import MalformedError
from gossamer.transports.wire.frames import Kind, Message
from gossamer.transports.wire.tensor_codec import Count, Laid, lay, views


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The control record of a frame. tensors: how its payload lies."""

    tensors: tuple[Laid, ...] = ()


class PushRecord(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request: Count
    key: str
    worker: int
    step: int
    known: int
    about: str

    def op(self, listener: Peer, payload: Payload) -> Push:
        stamp = Stamp(self.worker, self.step, self.known)
        return Push(to=listener, key=self.key, stamp=stamp, payload=payload, about=self.about)


class PullRecord(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request: Count
    key: str
    known: int
    at_least: int

    def op(self, listener: Peer, payload: Payload) -> Pull:
        return Pull(of=listener, key=self.key, known=self.known, at_least=self.at_least)


class ReceiptRecord(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request: Count
    version: int
    about: str

    def answer(self, payload: Payload) -> Receipt:
        return Receipt(version=self.version, payload=payload, about=self.about)


class PulledRecord(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request: Count
    version: int
    about: str

    def answer(self, payload: Payload) -> Pulled:
        return Pulled(version=self.version, payload=payload, about=self.about)


class Nothing(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frame that says by its kind what it has to say."""


Name = tuple[Annotated[str, msgspec.Meta(max_length=16, pattern=r"\A[a-z]+\Z")], int]  # strangers' are printed, too


class HelloRecord(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who speaks, whom to, and what must be alike at both ends. instance: of this process, nonce: of this hello."""

    gossamer: str
    run: str
    recipe: str
    layout: str
    me: Name
    you: Name
    instance: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    largest_frame_bytes: Count


class ProofRecord(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mac: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Kind, msgspec.msgpack.Decoder[Record]] = {
    kind: msgspec.msgpack.Decoder(record)
    for kind, record in {
        Kind.HELLO: HelloRecord,
        Kind.PROOF: ProofRecord,
        Kind.PUSH: PushRecord,
        Kind.PULL: PullRecord,
        Kind.RECEIPT: ReceiptRecord,
        Kind.PULLED: PulledRecord,
        Kind.PING: Nothing,
        Kind.GOODBYE: Nothing,
    }.items()
}

PING = Message(kind=Kind.PING, control=_encode(Nothing()))
GOODBYE = Message(kind=Kind.GOODBYE, control=_encode(Nothing()))


def asked(op: Ask, request: int) -> Message:
    """The message that says `word`; its answer will refer to `request`."""
    match op:
        case Push(key=key, stamp=stamp, payload=payload, about=about):
            laid, buffers = lay(payload)
            record: Record = PushRecord(
                request=request, key=key, worker=stamp.worker, step=stamp.step, known=stamp.known, about=about,
                tensors=laid,
            )  # fmt: skip
            return Message(kind=Kind.PUSH, control=_encode(record), payload=buffers, tensors=len(laid))
        case Pull(key=key, known=known, at_least=at_least):
            record = PullRecord(request=request, key=key, known=known, at_least=at_least)
            return Message(kind=Kind.PULL, control=_encode(record))


def answered(answer: Answer, request: int) -> Message:
    """The message that gives `answer` to whoever asked under `request`."""
    laid, buffers = lay(answer.payload)
    kind, record = _ANSWERS[type(answer)]
    control = record(request=request, version=answer.version, about=answer.about, tensors=laid)
    return Message(kind=kind, control=_encode(control), payload=buffers, tensors=len(laid))


_ANSWERS: dict[type, tuple[Kind, type[ReceiptRecord] | type[PulledRecord]]] = {
    Receipt: (Kind.RECEIPT, ReceiptRecord),
    Pulled: (Kind.PULLED, PulledRecord),
}


def message_of(kind: Kind, record: Record) -> Message:
    """A message without tensors."""
    return Message(kind=kind, control=_encode(record))


def record_of(kind: Kind, control: bytes | bytearray) -> Record:
    """Read a control record; unknown fields, other types and numbers out of range are malformed."""
    try:
        return _decoders[kind].decode(control)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise MalformedError(f"A frame of kind {kind.name} cannot be read: {fault}.") from None


def payload_of(record: Record, received: Tensor) -> Payload:
    return views(record.tensors, received)
