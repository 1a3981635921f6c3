"""Last words: a disconnecting rank sends the reason on each connection, so that errors name the rank that failed first.

A rank that loses another disconnects at once, because other ranks wait for it. These see the disconnect, perhaps before
they detect the original failure. The rank therefore sends its reason after its last complete message, in a form that
the compiled loops interpret as the header of a far later operation and leave unread. This is impossible if a message
was cut, or if the connection accepts no more data, and the words are lost if the kernel discards the receive buffer.

On an encrypted connection the words are encrypted, separately from its messages and once. Data that fails to decrypt
is searched for last words before it is reported as forged.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from gossamer.base import system
from gossamer.comm.environment.wait_progress import named_ranks

HEADER = struct.Struct("=IIII")  # Header in kernels-src/mesh.hpp
AHEAD = 2**30  # operations: more than one rank can be ahead of another
TEXT_BYTES = 448
MARK = b"gossamer hangs up, and this is why"[:32]
WORDS_BYTES = TEXT_BYTES + len(MARK)  # behind the header
TAG_BYTES = 16  # behind encrypted words
NBYTES = 32 + WORDS_BYTES
REPORTED_BY = ", as reported by rank "
COMING_SECONDS = 0.2
CLOSED_HERE = ValueError  # of a selector for a socket that another thread has closed meanwhile
PIECE_BYTES, MOST_BYTES = 2**18, 2**26  # of a read, and of all reads that search for the words


Seal = Callable[[bytes], bytes]
Open = Callable[[int, bytes], bytes]  # decrypts words of a rank; empty if they are not from it


def send_words(connection: socket.socket, words: str, next_operation: int, seal: Seal | None = None) -> None:
    """Send the words if the connection accepts them. next_operation: the number of this rank's next operation."""
    header = HEADER.pack((next_operation + AHEAD) % 2**32, 0, 0, 0)
    text = words.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    content = header.ljust(32, b"\0") + text + MARK if seal is None else bytes(32) + seal(text + MARK)
    with suppress(OSError):
        connection.send(content, system.DONT_WAIT)


def waiting(connections: Sequence[socket.socket | None], rank: int) -> str:
    """Return a rank's last words if they are the only unread data of its connection. The data remains unread."""
    connection = connections[rank]
    assert connection is not None
    with suppress(OSError, CLOSED_HERE):
        _come(connection, WORDS_BYTES)
        return _attributed(rank, _text(connection.recv(NBYTES + 1, system.DONT_WAIT | socket.MSG_PEEK)))
    return ""


def _come(connection: socket.socket, nbytes: int) -> None:
    """Wait for this many bytes: the header may arrive in an earlier packet."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
    with selectors.DefaultSelector() as coming:
        coming.register(connection, selectors.EVENT_READ)
        coming.select(COMING_SECONDS)


def cause(
    connections: Sequence[socket.socket | None], gone: int, why: str, opens: Open | None = None, comes: bool = False
) -> str:
    """Return why the group broke after a rank disconnected: the words of that rank or of another one.

    Without any words, all ranks that have disconnected are named, because their order is unknown. The connections
    cannot be used for operations afterwards.

    Args:
        connections: Sockets by rank; None at this rank.
        gone: The rank that disconnected.
        why: Description of the disconnect.
        opens: Decrypts words.
        comes: Whether the data of `gone` may have been the beginning of its words.
    """
    if comes and (connection := connections[gone]) is not None:
        with suppress(OSError, CLOSED_HERE):
            _come(connection, WORDS_BYTES + TAG_BYTES)
    silent = []
    for rank in sorted(range(len(connections)), key=lambda rank: rank != gone):
        connection = connections[rank]
        words, has_ended = ("", False) if connection is None else found(connection, opens and partial(opens, rank))
        if words:
            return _attributed(rank, words)
        if has_ended and rank != gone:
            silent.append(rank)
    also = f", and so {'is' if len(silent) == 1 else 'are'} {named_ranks(silent)}: one was the first" if silent else ""
    return f"rank {gone} is gone ({why}){also}"


def _attributed(rank: int, words: str) -> str:
    return words if not words or REPORTED_BY in words else f"{words}{REPORTED_BY}{rank}"


def found(connection: socket.socket, opens: Seal | None = None) -> tuple[str, bool]:
    """Return the peer's last words, behind all that it has sent, and whether it has disconnected."""
    nbytes = WORDS_BYTES + (TAG_BYTES if opens else 0)
    tail, left, more = b"", MOST_BYTES, b"more"
    try:
        while left > 0 and (more := connection.recv(PIECE_BYTES, system.DONT_WAIT)):
            tail = (tail + more)[-nbytes:]
            left -= len(more)
    except BlockingIOError:
        pass
    except OSError:
        more = b""
    return _text(opens(tail) if opens and len(tail) == nbytes else b"" if opens else tail), not more


def _text(tail: bytes) -> str:
    """Return the printable characters only: on an unencrypted connection, an attacker could have written the text."""
    if len(tail) < WORDS_BYTES or not tail.endswith(MARK):
        return ""
    content = tail[-WORDS_BYTES : -len(MARK)].rstrip(b"\0").decode(errors="replace")
    return "".join(each for each in content if each.isprintable())
