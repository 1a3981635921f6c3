"""Record format: the bytes of a span file, which is a line of JSON and then records of one size.

A file that was torn, because its process was killed or its disk is full, ends within a record: what is whole counts.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

MAGIC = "gossamer spans"
VERSION = 1
SUFFIX = ".spans"
OPERATORS_SUFFIX = ".torch.json.gz"  # of a file of torch.profiler beside it
CLOCK_MARK = (
    "gossamer clock "  # in that file: begins the name of a slice that began when time.perf_counter() was what follows
)
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
EVERYONE = -1  # as peers, else a bit for each of the first ranks
MOST_PEERS = 63


class SpanKind(IntEnum):
    """What a process does meanwhile. The first five are its training thread's, the next three its communication
    thread's."""

    STEP = 1  # number: of the step
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    WAITING = 5  # for the communication thread
    ENCODE = 6
    WIRE = 7  # waiting for an answer
    DECODE = 8
    OPERATION = 9  # one collective operation under way: channel, code, number, nbytes, peers
    SERVE = 11  # a parameter server in this process answers; number: whom
    CHANNEL = 10  # channel: which; number: the first rank of its group; nbytes: how many, 0 where members change
    NOT_TRACED = 12  # number: an Untraced; what this process takes part in, and no span tells of


ABOUT = (SpanKind.CHANNEL, SpanKind.NOT_TRACED)  # records of what there is, which are no spans


class Untraced(IntEnum):
    """What passes beside all that is recorded."""

    SERVERS = 1  # those in processes of their own
    PAIRS = 2  # exchanges of two workers, of which others know nothing


OPERATIONS = ("Mean", "Gather", "Exchange", "Mix", "Among")  # the bits of code, by the operations' names
WORDS = ("all-reduce", "all-gather", "all-to-all", "neighbor all-gather", "in a group")  # what they are called


def code_of(names: set[str]) -> int:
    """The operations that travel as one."""
    return sum(1 << place for place, name in enumerate(OPERATIONS) if name in names)


def operation_text(code: int) -> str:
    return " + ".join(word for place, word in enumerate(WORDS) if code >> place & 1) or "operation"
