"""Connection state: one end of a connection as a state machine without I/O (sans-IO, like h11).

write state.control_frames()                        of the handshake; repeat after every receive_data()
read n bytes into state.receive_buffer()            -> state.receive_data(n) -> every complete ReceivedFrame
write state.send(message)                           once state.authenticated, whole, in the order of the calls
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

from torch import Tensor

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Peer
from gossamer.comm.rpc_protocol.credentials import AuthenticatedPeer, Credentials, PeerHandshake
from gossamer.comm.rpc_protocol.frame_mac import TAG_BYTES, FrameMac, FrameTags
from gossamer.comm.rpc_protocol.frames import (
    CHUNK_BYTES,
    HEADER_BYTES,
    TRAILER_BYTES,
    Header,
    Kind,
    Message,
    PayloadDigest,
    frame_bytes,
)
from gossamer.comm.rpc_protocol.messages import ControlRecord, decode_record
from gossamer.comm.rpc_protocol.tensor_codec import allocate, decode_tensors
from gossamer.errors import GossamerError, MalformedError, MismatchError

STAGING_BYTES = 2**14  # shorter parts are received together and copied, longer ones directly into their memory

_NOTHING = memoryview(b"")


class ReceivedFrame(NamedTuple):
    """A completely received frame."""

    kind: Kind
    record: ControlRecord  # the decoded control record
    payload: Payload  # shares the memory of the frame
    payload_bytes: int
    frame_bytes: int  # on the wire: header, record, payload and tags


class ConnectionState:
    """Parses and numbers the frames of one connection, from the first hello on.

    After an error no more data may be parsed, because the frame boundary is unknown.
    """

    _reading: Generator[memoryview, None, ReceivedFrame]  # parser of the current frame
    _unfilled: memoryview  # part of the current buffer that is not received yet
    _unhashed: memoryview  # part of the payload that is not in the digest yet
    _digest: PayloadDigest  # of the payload received so far
    _sending_mac: FrameMac  # of the frames after the handshake, like the next one
    _receiving_mac: FrameMac

    def __init__(self, credentials: Credentials, dialed_peer: Peer | None = None) -> None:
        self._handshake = PeerHandshake(credentials, dialed_peer)
        self._limit_bytes = self._sending_epoch = self._receiving_epoch = 0
        self._frames_sent = self._frames_received = 0
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._expect_frame()

    @property
    def authenticated(self) -> AuthenticatedPeer | None:
        """The peer, once both ends have proven the token and belong to one run."""
        return None if self._handshake.refusal else self._handshake.authenticated

    @property
    def refusal(self) -> GossamerError | None:
        """Why the two do not belong to one run, although both have the token."""
        return self._handshake.refusal

    def control_frames(self) -> list[memoryview]:
        """Return handshake bytes to send, each once; also call it after an error, before closing the connection."""
        output = self._handshake.output()
        return [memoryview(output)] if output else []

    def send(self, message: Message) -> Iterator[memoryview]:
        """Return the buffers of the next frame."""
        self._frames_sent += 1
        return message.frame(self._sending_mac, self._sending_epoch, self._frames_sent - 1)

    def receive_buffer(self) -> memoryview:
        """Return memory for the next bytes; never empty."""
        return self._staging if self._unfilled.nbytes < STAGING_BYTES else self._unfilled

    def receive_data(self, nbytes: int) -> Iterator[ReceivedFrame | None]:
        """Parse the first `nbytes` of receive_buffer(). Yields each completed frame, and None for the handshake."""
        if self._unfilled.nbytes >= STAGING_BYTES:
            filled = self._unfilled[:nbytes]
            self._advance(filled)
            rest = filled[nbytes:]
        else:
            rest = self._staging[:nbytes]
        while rest.nbytes and self._handshake.wants_bytes:
            rest = rest[self._handshake.receive(rest) :]
            self._begin_frames()
            yield None
        if rest.nbytes and self._handshake.authenticated is None:
            raise MalformedError("Bytes arrived after a refused handshake.")
        while True:
            while not self._unfilled.nbytes:
                try:
                    self._unfilled = next(self._reading)
                except StopIteration as done:
                    self._expect_frame()
                    yield done.value
            if not rest.nbytes:
                return
            filled = rest[: self._unfilled.nbytes]
            self._unfilled[: filled.nbytes] = filled
            self._advance(filled)
            rest = rest[filled.nbytes :]

    def _advance(self, filled: memoryview) -> None:
        """Account for received bytes: advance the unfilled part, and hash complete chunks."""
        self._unfilled = self._unfilled[filled.nbytes :]
        ready_bytes = self._unhashed.nbytes - self._unfilled.nbytes
        if ready_bytes >= CHUNK_BYTES or (ready_bytes > 0 and not self._unfilled.nbytes):
            self._digest.update(self._unhashed[:ready_bytes])
            self._unhashed = self._unhashed[ready_bytes:]

    def _expect_frame(self) -> None:
        """Begin to parse the next frame."""
        self._unhashed = _NOTHING
        self._reading = self._read()
        self._unfilled = next(self._reading)

    def _read(self) -> Generator[memoryview, None, ReceivedFrame]:
        """Parse one frame; yields memory to fill, part by part."""
        raw_header = memoryview(bytearray(HEADER_BYTES))
        yield raw_header
        tags = self._receiving_mac.begin()
        header = self._parse(raw_header, tags)
        arrived = memoryview(bytearray(header.control_bytes + TAG_BYTES))
        yield arrived
        control = bytes(arrived[: header.control_bytes])
        tags.check(control, arrived[header.control_bytes :], "control record")
        record = decode_record(header.kind, control)
        if header.tensors != len(record.tensors):
            raise MalformedError(
                f"A frame of kind {header.kind.name} announces {header.tensors} tensors but describes "
                f"{len(record.tensors)}. Install the same version of Gossamer everywhere."
            )
        payload: Payload = ()
        if record.tensors or header.payload_bytes:
            received = allocate(record.tensors, header.payload_bytes)
            yield from self._payload(received, tags)
            payload = decode_tensors(record.tensors, received)
        nbytes = frame_bytes(header.control_bytes, header.payload_bytes)
        return ReceivedFrame(header.kind, record, payload, header.payload_bytes, nbytes)

    def _payload(self, received: Tensor, tags: FrameTags) -> Generator[memoryview, None, None]:
        """Hash the payload while it arrives, and compare the hash with its trailer."""
        if not received.numel():
            return
        self._unhashed, self._digest = received.numpy().data, PayloadDigest(self._receiving_mac)
        yield self._unhashed
        trailer = bytearray(TRAILER_BYTES)
        yield memoryview(trailer)
        self._digest.check(tags, trailer)

    def _parse(self, raw_header: memoryview, tags: FrameTags) -> Header:
        try:
            header = Header.parse(raw_header, tags)
        except MismatchError:
            raise MalformedError("A frame has another protocol version than the handshake.") from None
        expected = (self._receiving_epoch, self._frames_received)
        if (header.epoch, header.sequence) != expected:
            raise MalformedError(
                f"A frame has number {header.sequence} of epoch {header.epoch:#x}, expected number "
                f"{expected[1]} of {expected[0]:#x}: it is a replay, or belongs to another connection."
            )
        header.check_lengths(self._limit_bytes)
        self._frames_received += 1
        return header

    def _begin_frames(self) -> None:
        """Use the keys and limits of the completed handshake for the following frames."""
        authenticated = self._handshake.authenticated
        if authenticated is not None:
            self._limit_bytes = authenticated.limit_bytes
            self._sending_epoch, self._receiving_epoch = authenticated.sending_epoch, authenticated.receiving_epoch
            self._sending_mac, self._receiving_mac = authenticated.sending_mac, authenticated.receiving_mac
