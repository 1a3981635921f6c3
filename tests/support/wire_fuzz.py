"""Fuzzing of the frame parser: of changed frames nothing is accepted but an unchanged prefix.

PYTHONPATH=tests python -m support.wire_fuzz 100000 [SEED]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence

import torch
from support.wire_pairs import LIMIT, SERVED, authenticated_pair

from gossamer.base.kernels.checks import SHORT
from gossamer.base.peer_ops import Pull, Push, Stamp
from gossamer.comm.rpc_protocol.connection_state import STAGING_BYTES, ConnectionState, ReceivedFrame
from gossamer.comm.rpc_protocol.frame_mac import TAG_BYTES, FrameMac
from gossamer.comm.rpc_protocol.frames import HEADER_BYTES, Message
from gossamer.comm.rpc_protocol.messages import PING, encode_ask
from gossamer.errors import MalformedError

Frames = Sequence[bytes]
Change = Callable[[random.Random, list[bytes]], bytes]
LENGTHS = [0, 1, 7, 255, 2**16, LIMIT, LIMIT + 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]


def messages() -> tuple[Message, ...]:
    payload = (torch.arange(40, dtype=torch.float32), torch.tensor([True, False, True]), torch.tensor(7))
    large = (torch.arange(9000, dtype=torch.float64),)
    return (
        encode_ask(Push(to=SERVED, key="layer.0", stamp=Stamp(3, 17, 4), payload=payload, about='{"weight": 8}'), 0),
        PING,
        encode_ask(Pull(of=SERVED, key="layer.0", known=-1, at_least=3), 1),
        encode_ask(Push(to=SERVED, key="layer.1", stamp=Stamp(3, 18, 4), payload=large), 2),
        encode_ask(Pull(of=SERVED, key="layer.2"), 3),
    )


def sent_by(state: ConnectionState) -> list[bytes]:
    return [b"".join(state.send(message)) for message in messages()]


# -- what may happen on the way ------------------------------------------------------------------------


def flip(draw: random.Random, frames: list[bytes]) -> bytes:
    data = bytearray(b"".join(frames))
    for _ in range(draw.choice([1, 1, 2, 9])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def flip_at_the_start(draw: random.Random, frames: list[bytes]) -> bytes:
    place = draw.randrange(len(frames))
    data = bytearray(frames[place])
    data[draw.randrange(min(len(data), 2 * HEADER_BYTES))] ^= 1 << draw.randrange(8)
    return b"".join([*frames[:place], bytes(data), *frames[place + 1 :]])


def cut(draw: random.Random, frames: list[bytes]) -> bytes:
    data = b"".join(frames)
    start = draw.randrange(len(data))
    return data[:start] + data[start + draw.choice([1, 8, 48, 5000, len(data)]) :]


def lie_about_length(draw: random.Random, frames: list[bytes]) -> bytes:
    """Another length in a header, with the tag that it would have if there were no key."""
    place = draw.randrange(len(frames))
    data = bytearray(frames[place])
    start, size = draw.choice([(24, 4), (28, 4), (32, 8)])
    length = min(draw.choice(LENGTHS), 2 ** (8 * size) - 1)
    data[start : start + size] = length.to_bytes(size, "little")
    data[HEADER_BYTES - TAG_BYTES : HEADER_BYTES] = FrameMac(b"").begin().add(data[: HEADER_BYTES - TAG_BYTES])
    return b"".join([*frames[:place], bytes(data), *frames[place + 1 :]])


def duplicate(draw: random.Random, frames: list[bytes]) -> bytes:
    place = draw.randrange(len(frames))
    frames.insert(draw.randrange(len(frames) + 1), frames[place])
    return b"".join(frames)


def reorder(draw: random.Random, frames: list[bytes]) -> bytes:
    draw.shuffle(frames)
    return b"".join(frames)


def lose(draw: random.Random, frames: list[bytes]) -> bytes:
    del frames[draw.randrange(len(frames))]
    return b"".join(frames)


def noise(draw: random.Random, frames: list[bytes]) -> bytes:
    place = draw.randrange(len(frames))
    return b"".join(frames[:place]) + draw.randbytes(draw.choice([1, 48, 200])) + b"".join(frames[place:])


CHANGES: tuple[Change, ...] = (flip, flip_at_the_start, cut, lie_about_length, duplicate, reorder, lose, noise)


# -- what must not -------------------------------------------------------------------------------------


def ops(heard: Sequence[ReceivedFrame]) -> list[tuple[object, ...]]:
    return [(each.kind, each.record, [tensor.tolist() for tensor in each.payload]) for each in heard]


def hear(listener: ConnectionState, data: bytes) -> list[ReceivedFrame]:
    """What is accepted until something is refused."""
    heard: list[ReceivedFrame] = []
    left = memoryview(data)
    try:
        while left.nbytes:
            buffer = listener.receive_buffer()
            assert buffer.nbytes <= LIMIT, "more memory was allocated than agreed on"
            nbytes = min(buffer.nbytes, left.nbytes)
            buffer[:nbytes], left = left[:nbytes], left[nbytes:]
            for frame in listener.receive_data(nbytes):
                assert frame is not None, "a handshake took place"
                heard.append(frame)
    except MalformedError:
        pass
    return heard


class Rehearsed:
    """A listener authenticated to the sender of `frames`, as often as one wants."""

    def __init__(self) -> None:
        dialer, self._listener = authenticated_pair()
        self.frames = sent_by(dialer)
        self.ops = ops(self.hear(b"".join(self.frames)))

    def hear(self, data: bytes) -> list[ReceivedFrame]:
        self._listener._frames_received = 0
        self._listener._expect_frame()
        return hear(self._listener, data)


def fuzz(count: int, seed: int = 0) -> None:
    """Streams of five frames, each changed in one way."""
    rehearsed = Rehearsed()
    assert len(rehearsed.ops) == len(messages())
    assert max(map(len, rehearsed.frames)) > max(STAGING_BYTES, SHORT), "nothing is received where it belongs"
    for number in range(seed, seed + count):
        change = CHANGES[number % len(CHANGES)]
        heard = ops(rehearsed.hear(change(random.Random(number), list(rehearsed.frames))))
        if heard != rehearsed.ops[: len(heard)]:
            raise AssertionError(
                f"{change.__name__} made another word of a frame: python -m support.wire_fuzz 1 {number}"
            )


if __name__ == "__main__":
    number = int(sys.argv[1])
    fuzz(number, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{number} changed streams: no frame was taken for another")
