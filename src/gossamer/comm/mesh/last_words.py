"""Last words: why a rank hangs up, told on each of its connections, so that who is named is not the messenger.

A rank that loses another one hangs up at once, since others wait for it. They see that it hung up, and perhaps not yet
who went first. So it says what it knows behind its last whole message, in a form that the compiled loops take for the
header of an operation that is far ahead, and leave alone. Nothing can be said where a message was cut, or where nothing
more goes into a connection; nor is it heard where the kernel threw it away with the rest of a connection.

Over a connection that is sealed the words are, too, apart from its messages, and once: where something does not open,
they are looked for before it is called forged.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from gossamer.comm.environment.wait_progress import named_ranks

HEADER = struct.Struct("=IIII")  # Header in kernels-src/mesh.hpp
AHEAD = 2**30  # operations: more than anybody is ahead of another
TEXT_BYTES = 448
MARK = b"gossamer hangs up, and this is why"[:32]
WORDS_BYTES = TEXT_BYTES + len(MARK)  # what follows the header, and the tag of one that should have been encrypted
TAG_BYTES = 16  # behind words that are sealed
NBYTES = 32 + WORDS_BYTES
TOLD = ", as was told by rank "
COMING_MILLISECONDS = 200
PIECE_BYTES, MOST_BYTES = 2**18, 2**26  # of what is read to find them: at a time, and at most


Seal = Callable[[bytes], bytes]
Open = Callable[[int, bytes], bytes]  # of a rank; empty where it has not sealed that


def say(connection: socket.socket, words: str, next_operation: int, seal: Seal | None = None) -> None:
    """Tell the other end, as far as its connection takes it. next_operation: the number of this rank's next one."""
    header = HEADER.pack((next_operation + AHEAD) % 2**32, 0, 0, 0)
    text = words.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    said = header.ljust(32, b"\0") + text + MARK if seal is None else bytes(32) + seal(text + MARK)
    with suppress(OSError):
        connection.send(said, socket.MSG_DONTWAIT)


def waiting(connections: Sequence[socket.socket | None], rank: int) -> str:
    """A rank's last words, where they are next and all there is. Nothing is taken from its connection."""
    connection = connections[rank]
    assert connection is not None
    with suppress(OSError):
        _come(connection, WORDS_BYTES)
        return _told(rank, _text(connection.recv(NBYTES + 1, socket.MSG_DONTWAIT | socket.MSG_PEEK)))
    return ""


def _come(connection: socket.socket, nbytes: int) -> None:
    """Wait for so much: their header may have come in a packet before them."""
    if hasattr(select, "poll"):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        coming = select.poll()
        coming.register(connection, select.POLLIN)
        coming.poll(COMING_MILLISECONDS)


def cause(
    connections: Sequence[socket.socket | None], gone: int, why: str, opens: Open | None = None, comes: bool = False
) -> str:
    """Why the group broke, once a rank is gone: what it or another has said. The connections serve nothing else then.

    Where nobody has said anything, all are named who have hung up: which was the first cannot be known. opens: what is
    sealed; comes: something has come of the one that is gone which may have been the beginning of its words.
    """
    if comes and (connection := connections[gone]) is not None:
        with suppress(OSError):
            _come(connection, WORDS_BYTES + TAG_BYTES)
    silent = []
    for rank in sorted(range(len(connections)), key=lambda rank: rank != gone):
        connection = connections[rank]
        words, has_ended = ("", False) if connection is None else found(connection, opens and partial(opens, rank))
        if words:
            return _told(rank, words)
        if has_ended and rank != gone:
            silent.append(rank)
    also = f", and so {'is' if len(silent) == 1 else 'are'} {named_ranks(silent)}: one was the first" if silent else ""
    return f"rank {gone} is gone ({why}){also}"


def _told(rank: int, words: str) -> str:
    return words if not words or TOLD in words else f"{words}{TOLD}{rank}"


def found(connection: socket.socket, opens: Seal | None = None) -> tuple[str, bool]:
    """The other end's last words, behind all that it has sent; and whether it has hung up."""
    nbytes = WORDS_BYTES + (TAG_BYTES if opens else 0)
    tail, left, more = b"", MOST_BYTES, b"more"
    try:
        while left > 0 and (more := connection.recv(PIECE_BYTES, socket.MSG_DONTWAIT)):
            tail = (tail + more)[-nbytes:]
            left -= len(more)
    except BlockingIOError:
        pass
    except OSError:
        more = b""
    return _text(opens(tail) if opens and len(tail) == nbytes else b"" if opens else tail), not more


def _text(tail: bytes) -> str:
    """For people to read: whoever can cut a connection that is not encrypted could have written it."""
    if len(tail) < WORDS_BYTES or not tail.endswith(MARK):
        return ""
    said = tail[-WORDS_BYTES : -len(MARK)].rstrip(b"\0").decode(errors="replace")
    return "".join(each for each in said if each.isprintable())
