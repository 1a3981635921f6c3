"""Messages: conversion of peer ops and their answers to and from control records, with a number per request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Answer, Ask, Peer, Pull, Pulled, Push, Receipt, Stamp
from gossamer.comm.rpc_protocol.frames import Kind, Message
from gossamer.comm.rpc_protocol.tensor_codec import Count, TensorSpec, encode_tensors
from gossamer.errors import MalformedError


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The control record of a frame."""

    tensors: tuple[TensorSpec, ...] = ()  # dtypes and shapes of its payload


class PushRecord(ControlRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request: Count
    key: str
    worker: int
    step: int
    known: int
    about: str

    def op(self, listener: Peer, payload: Payload) -> Push:
        stamp = Stamp(self.worker, self.step, self.known)
        return Push(to=listener, key=self.key, stamp=stamp, payload=payload, about=self.about)


class PullRecord(ControlRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request: Count
    key: str
    known: int
    at_least: int

    def op(self, listener: Peer, payload: Payload) -> Pull:
        return Pull(of=listener, key=self.key, known=self.known, at_least=self.at_least)


class ReceiptRecord(ControlRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request: Count
    version: int
    about: str

    def answer(self, payload: Payload) -> Receipt:
        return Receipt(version=self.version, payload=payload, about=self.about)


class PulledRecord(ControlRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request: Count
    version: int
    about: str

    def answer(self, payload: Payload) -> Pulled:
        return Pulled(version=self.version, payload=payload, about=self.about)


class EmptyRecord(ControlRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a frame without content besides its kind."""


PeerName = tuple[
    Annotated[str, msgspec.Meta(max_length=16, pattern=r"\A[a-z]+\Z")], int
]  # printed for unauthenticated peers


class HelloRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Claims of a handshake: sender, receiver, and the settings that must be equal at both ends."""

    gossamer: str
    run: str
    recipe: str
    layout: str
    me: PeerName
    you: PeerName
    instance: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]  # of the sender's process
    largest_frame_bytes: Count
    polyval: bool  # whether the sender has the compiled hash of payloads


_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Kind, msgspec.msgpack.Decoder[ControlRecord]] = {
    kind: msgspec.msgpack.Decoder(record)
    for kind, record in {
        Kind.PUSH: PushRecord,
        Kind.PULL: PullRecord,
        Kind.RECEIPT: ReceiptRecord,
        Kind.PULLED: PulledRecord,
        Kind.PING: EmptyRecord,
        Kind.GOODBYE: EmptyRecord,
    }.items()
}

PING = Message(kind=Kind.PING, control=_encode(EmptyRecord()))
GOODBYE = Message(kind=Kind.GOODBYE, control=_encode(EmptyRecord()))


def encode_ask(op: Ask, request: int) -> Message:
    """Encode a request. Its answer will have the same `request` number."""
    match op:
        case Push(key=key, stamp=stamp, payload=payload, about=about):
            specs, buffers = encode_tensors(payload)
            record: ControlRecord = PushRecord(
                request=request, key=key, worker=stamp.worker, step=stamp.step, known=stamp.known, about=about,
                tensors=specs,
            )  # fmt: skip
            return Message(kind=Kind.PUSH, control=_encode(record), payload=buffers, tensors=len(specs))
        case Pull(key=key, known=known, at_least=at_least):
            record = PullRecord(request=request, key=key, known=known, at_least=at_least)
            return Message(kind=Kind.PULL, control=_encode(record))


def encode_answer(answer: Answer, request: int) -> Message:
    """Encode the answer to the request with this number."""
    specs, buffers = encode_tensors(answer.payload)
    kind, record = _ANSWERS[type(answer)]
    control = record(request=request, version=answer.version, about=answer.about, tensors=specs)
    return Message(kind=kind, control=_encode(control), payload=buffers, tensors=len(specs))


_ANSWERS: dict[type, tuple[Kind, type[ReceiptRecord] | type[PulledRecord]]] = {
    Receipt: (Kind.RECEIPT, ReceiptRecord),
    Pulled: (Kind.PULLED, PulledRecord),
}


_decode_hello = msgspec.msgpack.Decoder(HelloRecord).decode


def encode_hello(record: HelloRecord) -> bytes:
    return _encode(record)


def decode_hello(claims: bytes) -> HelloRecord:
    """Decode the claims of a handshake. Raises MalformedError."""
    try:
        return _decode_hello(claims)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise MalformedError(f"The claims of a handshake are invalid: {fault}.") from None


def decode_record(kind: Kind, control: bytes | bytearray) -> ControlRecord:
    """Decode a control record. Raises MalformedError for unknown fields, wrong types and numbers out of range."""
    try:
        return _decoders[kind].decode(control)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise MalformedError(f"The control record of a {kind.name} frame is invalid: {fault}.") from None
