"""One end of a connection as a machine that is fed bytes: no sockets, no threads, no clock.

send conversation.courtesies()                      what the handshake says; ask again after every filled()
read n bytes into conversation.room()               -> conversation.filled(n) -> every Spoken that is complete
send conversation.frame(message)                    once conversation.met, whole, in the order of the calls
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

from torch import Tensor

from gossamer.core.ops import Payload
from gossamer.core.peer_ops import Peer
from gossamer.errors import GossamerError, MalformedError, MismatchError
from gossamer.kernels.crc import crc32
from gossamer.transports.wire.authentication import AuthenticatedPeer, Credentials, Handshake
from gossamer.transports.wire.frames import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    PIECE_BYTES,
    STRANGERS_LIMIT,
    Header,
    Kind,
    Message,
    check_payload,
    frame_bytes,
)
from gossamer.transports.wire.messages import PING, Record, payload_of, record_of
from gossamer.transports.wire.tensor_codec import room

GATHERED_BYTES = 2**14  # short parts are received together and copied to their places, longer ones into theirs

_NOTHING = memoryview(b"")
_HANDSHAKE = frozenset({Kind.HELLO, Kind.PROOF})


class ReceivedFrame(NamedTuple):
    """A frame that arrived whole."""

    kind: Kind
    record: Record
    payload: Payload
    payload_bytes: int
    frame_bytes: int


class ConnectionState:
    """Reads and numbers the frames of one connection, from the first hello on.

    After an error nothing more may be read: where a frame ends is not known any more.
    """

    _reading: Generator[memoryview, None, ReceivedFrame | None]  # the frame that comes
    _part: memoryview  # of it, yet to be filled
    _unsummed: memoryview  # the payload, where the part belongs to it, from where its checksum has not come to
    _checksum: int

    def __init__(self, papers: Credentials, calls: Peer | None = None) -> None:
        self._handshake = Handshake(papers, calls)
        self._limit_bytes = STRANGERS_LIMIT
        self._saying_epoch = self._hearing_epoch = 0
        self._said = self._heard = 0  # frames in this epoch
        self._courtesies = [part for message in self._handshake.begin() for part in self.frame(message)]
        self._gathered = memoryview(bytearray(GATHERED_BYTES))
        self._begin()

    @property
    def met(self) -> AuthenticatedPeer | None:
        """Who is at the other end, once both have shown the token and belong together."""
        return None if self._handshake.refused else self._handshake.met

    @property
    def refused(self) -> GossamerError | None:
        """Why they do not belong together, though both hold the token."""
        return self._handshake.refused

    def courtesies(self) -> list[memoryview]:
        """What the handshake wants sent, each buffer once; also after an error, before the connection is closed."""
        owed, self._courtesies = self._courtesies, []
        return owed

    def frame(self, message: Message) -> Iterator[memoryview]:
        """The buffers of the next frame."""
        self._said += 1
        return message.frame(self._saying_epoch, self._said - 1)

    def room(self) -> memoryview:
        """Where the bytes that come next belong; never empty."""
        return self._gathered if self._part.nbytes < GATHERED_BYTES else self._part

    def filled(self, nbytes: int) -> Iterator[ReceivedFrame | None]:
        """So many bytes of room() were received. Yields the frames that they complete; None for one of a handshake."""
        if self._part.nbytes >= GATHERED_BYTES:
            came = self._part[:nbytes]
            self._taken(came)
            left = came[nbytes:]
        else:
            left = self._gathered[:nbytes]
        while True:
            while not self._part.nbytes:
                try:
                    self._part = next(self._reading)
                except StopIteration as done:
                    self._begin()
                    yield done.value
            if not left.nbytes:
                return
            came = left[: self._part.nbytes]
            self._part[: came.nbytes] = came
            self._taken(came)
            left = left[came.nbytes :]

    def _taken(self, came: memoryview) -> None:
        """These bytes are in their place."""
        self._part = self._part[came.nbytes :]
        there = self._unsummed.nbytes - self._part.nbytes
        if there >= PIECE_BYTES or (there > 0 and not self._part.nbytes):
            self._checksum = crc32(self._unsummed[:there], self._checksum)
            self._unsummed = self._unsummed[there:]

    def _begin(self) -> None:
        """Expect a frame."""
        self._unsummed, self._checksum = _NOTHING, 0
        self._reading = self._read()
        self._part = next(self._reading)

    def _read(self) -> Generator[memoryview, None, ReceivedFrame | None]:
        """One frame: yields memory to fill, part by part."""
        start = memoryview(bytearray(HEADER_BYTES))
        yield start
        header = self._parse(start)
        control = bytearray(header.control_bytes)
        yield memoryview(control)
        header.check_control(control)
        record = record_of(header.kind, control)
        if header.tensors != len(record.tensors):
            raise MalformedError(f"A frame announces {header.tensors} tensors and describes {len(record.tensors)}.")
        payload: Payload = ()
        if record.tensors or header.payload_bytes:
            received = room(record.tensors, header.payload_bytes)
            yield from self._payload(received)
            payload = payload_of(record, received)
        if header.kind in _HANDSHAKE:
            self._greet(record, bytes(control))
            return None
        nbytes = frame_bytes(header.control_bytes, header.payload_bytes)
        return ReceivedFrame(header.kind, record, payload, header.payload_bytes, nbytes)

    def _payload(self, received: Tensor) -> Generator[memoryview, None, None]:
        """Summed as it comes, and compared with what the other end has summed."""
        if not received.numel():
            return
        self._unsummed = received.numpy().data
        yield self._unsummed
        said = bytearray(CHECKSUM_BYTES)
        yield memoryview(said)
        check_payload(self._checksum, said)

    def _parse(self, start: memoryview) -> Header:
        try:
            header = Header.parse(start)
        except MismatchError as other:
            if self._handshake.met is not None:
                raise MalformedError("A frame names another protocol than the one before it did.") from None
            self._courtesies += self.frame(PING)  # its header tells the other end the same
            raise other
        expected = (self._hearing_epoch, self._heard)
        if (header.epoch, header.sequence) != expected:
            raise MalformedError(
                f"A frame says that it is number {header.sequence} of epoch {header.epoch:#x} where number "
                f"{self._heard} of {self._hearing_epoch:#x} is due: it was sent before, elsewhere or by this end."
            )
        if (header.kind in _HANDSHAKE) == (self._handshake.met is not None):
            raise MalformedError(f"A frame of kind {header.kind.name} has no place here.")
        header.check_lengths(self._limit_bytes)
        self._heard += 1
        return header

    def _greet(self, record: Record, control: bytes) -> None:
        for message in self._handshake.hear(record, control):
            self._courtesies += self.frame(message)
        met = self._handshake.met
        if met is not None:
            self._limit_bytes = met.limit_bytes
            self._saying_epoch, self._hearing_epoch = met.saying_epoch, met.hearing_epoch
            self._said = self._heard = 0
