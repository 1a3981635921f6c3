"""Record format: the bytes of a span file, a line of JSON followed by records of one size.

A file that was truncated, because its process was killed or the disk is full, ends within a record: complete records
are valid.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

MAGIC = "gossamer spans"
VERSION = 1
SUFFIX = ".spans"
OPERATORS_SUFFIX = ".torch.json.gz"  # of a file of torch.profiler next to it
CLOCK_MARK = "gossamer clock "  # in that file: prefix of a slice's name, followed by time.perf_counter() at its start
# begin and end: seconds of the process's time.perf_counter(); kind; channel; code; number; bytes; peers
RECORD = Struct("<ddHHiqqq")
FIELDS = [
    ("begin", "<f8"),
    ("end", "<f8"),
    ("kind", "<u2"),
    ("channel", "<u2"),
    ("code", "<i4"),
    ("number", "<i8"),
    ("nbytes", "<i8"),
    ("peers", "<i8"),
]  # the same for numpy
EVERYONE = -1  # as peers; otherwise a bit for each of the first ranks
MOST_PEERS = 63


class SpanKind(IntEnum):
    """The activity of a span.

    The first five are the training thread's, the next three the communication thread's.
    """

    STEP = 1  # number: of the step
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    WAITING = 5  # training thread waits for the communication thread
    ENCODE = 6
    WIRE = 7  # waiting for an answer
    DECODE = 8
    OPERATION = 9  # one collective operation in flight: channel, code, number, nbytes, peers
    SERVE = 11  # a parameter server in this process answers; number: the worker
    CHANNEL = 10  # channel: its index; number: the first rank of its group; nbytes: group size, 0 if members change
    NOT_TRACED = 12  # number: an Untraced; activity of this process without spans
    RELAYED = 13  # channel; number: the rank at a relay, NO_RANK without one; peers: those whose bytes it forwards


NO_RANK = -1
ABOUT = (SpanKind.CHANNEL, SpanKind.NOT_TRACED, SpanKind.RELAYED)  # descriptive records, which are not spans


class Untraced(IntEnum):
    """Activity that is not recorded."""

    SERVERS = 1  # in separate processes
    PAIRS = 2  # exchanges of two workers, unknown to others


OPERATIONS = ("Mean", "Gather", "Exchange", "Mix", "Among")  # the bits of code, by the operations' names
WORDS = ("all-reduce", "all-gather", "all-to-all", "neighbor all-gather", "in a group")  # displayed names


def code_of(names: set[str]) -> int:
    """Return the code of operations that are sent together."""
    return sum(1 << place for place, name in enumerate(OPERATIONS) if name in names)


def operation_text(code: int) -> str:
    return " + ".join(word for place, word in enumerate(WORDS) if code >> place & 1) or "operation"
