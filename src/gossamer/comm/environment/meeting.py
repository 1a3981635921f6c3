"""Meeting protocol: ranks prove that they belong to a run, exchange texts, and hear at once who has left.

    rank   <-> meeting   the handshake over the run's token: the rank claims a Hello; a refusal has the reason
    rank    -> meeting   said: a text on a topic
    meeting -> all       heard: what all ranks said on it; or failed: who has left, or never came
    meeting -> all       gone: who has left since the group stands, for those that wait for all at a later place

A run without a token has an empty one: then the proofs keep out other programs and other runs by accident, and nobody
who means harm. What follows the handshake is not authenticated message by message.

Each message is a JSON object behind a header of eight bytes, the protocol's name and the length. No sockets here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossamer.base.json_text import read_json
from gossamer.comm.environment.wait_progress import named_ranks
from gossamer.comm.environment.wait_timeout import duration
from gossamer.comm.handshake import Listener
from gossamer.errors import MalformedError

HEADER = struct.Struct("!4sI")
PURPOSE = b"meeting"
MAGIC = b"GSM1"
FROM_RANK_BYTES = 4096  # of one message of a rank's
FROM_MEETING_BYTES = 2**26  # of one message to a rank: a text of every rank
LARGEST_NUMBER = 2**31
SHOWN_CHARACTERS = 60  # of a text that nobody has vouched for
COMING, REACHING, STANDING = TOPICS = ("coming", "reaching", "standing")  # the last one ends the meeting
FEW, LEFT = "few", "left"

Message = dict[str, Any]
Replies = list[tuple["Guest", bytes]]


def pack(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(MAGIC, len(body)) + body


class Inbox:
    """Cuts a stream of bytes into messages of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[Message]:
        """The messages that are complete by now. Raises MalformedError for what is none."""
        self._bytes += received
        messages: list[Message] = []
        while len(self._bytes) >= HEADER.size or not MAGIC.startswith(self._bytes[: len(MAGIC)]):
            length = self._length()
            if len(self._bytes) < HEADER.size + length:
                break
            messages.append(_parsed(bytes(self._bytes[HEADER.size : HEADER.size + length])))
            del self._bytes[: HEADER.size + length]
        return messages

    def _length(self) -> int:
        if not self._bytes.startswith(MAGIC):
            raise MalformedError(f"it begins with {bytes(self._bytes[:20])!r}, as no message of a meeting does")
        length = int(HEADER.unpack_from(self._bytes)[1])
        if length > self._limit_bytes:
            raise MalformedError(f"it announces {length} bytes, and no message has more than {self._limit_bytes}")
        return length


def _text(claims: bytes) -> str:
    try:
        return claims.decode()
    except UnicodeDecodeError:
        raise MalformedError("it claims no text") from None


def read_refusal(claims: bytes) -> tuple[str, bool]:
    """The reason of a refusal, and whether the rank is there already. Raises MalformedError."""
    message = _parsed(claims)
    return text_in(message, "refused"), message.get("taken") is True


def _parsed(body: bytes) -> Message:
    try:
        message = read_json(body)
    except ValueError:
        raise MalformedError("it holds no JSON") from None
    if not isinstance(message, dict):
        raise MalformedError("it holds no JSON object")
    return message


def text_in(message: Mapping[str, Any], name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
        raise MalformedError(f"it has no text {name!r}")
    return text


def whole_in(message: Mapping[str, Any], name: str) -> int:
    number = message.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or abs(number) > LARGEST_NUMBER:
        raise MalformedError(f"it has no whole number {name!r}")
    return number


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What all ranks of one run share. token: its secret, empty where it has none."""

    run: str
    world: int
    token: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A rank's first words. gpus: names of those that it sees, with commas in between; address, port: where it listens
    for the next rank; store: where rank 0 keeps the store."""

    run: str
    world: int
    rank: int
    who: str  # its host and process
    gpus: str = ""
    address: str = ""
    port: int = 0
    store: str = ""

    def text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def read(cls, text: str) -> Hello:
        """Raises MalformedError for what is none."""
        given = _parsed(text.encode())
        hello = cls(
            run=text_in(given, "run"),
            world=whole_in(given, "world"),
            rank=whole_in(given, "rank"),
            who=text_in(given, "who"),
            gpus=text_in(given, "gpus"),
            address=text_in(given, "address"),
            port=whole_in(given, "port"),
            store=text_in(given, "store"),
        )
        if not all(each.isprintable() for each in vars(hello).values() if isinstance(each, str)):
            raise MalformedError("it holds characters that would not be printed")
        return hello


@dataclass(eq=False)
class Guest:
    """One connection to the meeting. hello: none before it has proven that it belongs to the run."""

    handshake: Listener = field(default_factory=lambda: Listener(PURPOSE, limit_bytes=FROM_RANK_BYTES))
    hello: Hello | None = None
    dismissed: bool = False


class Meeting:
    """The side of the meeting that all ranks come to. tell(kind, sentence): what the user should hear about strangers.

    Hand `admit` who has sent its claims, `take` what was said by whom, `left` whose connection has ended; send what
    they return.
    """

    def __init__(self, identity: RunIdentity, tell: Callable[[str, str], None]) -> None:
        self._identity = identity
        self._tell = tell
        self._members: dict[int, Guest] = {}
        self._said: dict[str, dict[int, str]] = {topic: {} for topic in TOPICS}
        self._failed = ""
        self._over = False

    def take(self, guest: Guest, message: Message) -> Replies:
        """Raises MalformedError for what no rank says."""
        assert guest.hello is not None
        topic = text_in(message, "topic")
        if topic not in self._said:
            raise MalformedError(f"nobody talks about {topic[:SHOWN_CHARACTERS]!r}")
        if "seconds" in message:
            return self._give_up(topic, whole_in(message, "seconds") / 1000)
        return self._hear(guest.hello.rank, topic, text_in(message, "text"))

    def left(self, guest: Guest) -> Replies:
        """Tell all others: the meeting has failed, or, where the group stands already, this rank waits for nothing."""
        if guest.hello is None or self._members.get(guest.hello.rank) is not guest:
            return []
        who = f"rank {guest.hello.rank} ({guest.hello.who})"
        if self._over:
            return self._to_all({"gone": who})
        return self._fail(f"{who} left while the workers were joining", LEFT)

    def admit(self, guest: Guest) -> Replies:
        """Accept or refuse a rank whose claims have come. Raises MalformedError for what no rank claims."""
        handshake, token = guest.handshake, self._identity.token
        said = _text(handshake.claims or b"")
        hello = Hello.read(said)
        proven = handshake.is_proven(token)
        if (reason := self._objection(hello, proven)) is not None:
            guest.dismissed = True
            self._tell("refused", f"a worker that says it is rank {hello.rank} was refused at the meeting: {reason}")
            taken = hello.rank in self._members and proven
            handshake.refuse(json.dumps({"refused": reason, "taken": taken}).encode())
            return [(guest, handshake.output())]
        guest.hello = hello
        self._members[hello.rank] = guest
        handshake.accept(token)
        return [(guest, handshake.output()), *self._hear(hello.rank, COMING, said)]

    def _objection(self, hello: Hello, proven: bool) -> str | None:
        """Why this worker is none of this run's, if it is not."""
        mine = self._identity
        if hello.run != mine.run:
            theirs = repr(hello.run[:SHOWN_CHARACTERS])
            return (
                f"it belongs to the run {theirs} and this is the run {mine.run!r}. Stop what is left of the older one; "
                "all workers of one run have the same GOSSAMER_RUN"
            )
        if not proven:
            return (
                "it cannot prove that it belongs to this run, since its token is another or it has none. Give all "
                "workers the same GOSSAMER_TOKEN_FILE, or start them by `gossamer run --token-file FILE`"
            )
        if hello.world != mine.world:
            return f"it was started with WORLD_SIZE={hello.world} and rank 0 with {mine.world}. Write the same for all"
        if not 0 <= hello.rank < mine.world:
            return f"its rank is {hello.rank} of {mine.world}"
        if (holder := self._members.get(hello.rank)) is not None and holder.hello is not None:
            return f"another worker ({holder.hello.who}) is there already under rank {hello.rank}"
        return self._failed or None

    def _hear(self, rank: int, topic: str, text: str) -> Replies:
        said = self._said[topic]
        said[rank] = text
        if len(said) < self._identity.world:
            return []
        self._over = topic == STANDING
        return self._to_all({"heard": topic, "texts": [said[rank] for rank in range(self._identity.world)]})

    def _give_up(self, topic: str, seconds: float) -> Replies:
        missing = self.missing(topic)
        if not missing or self._failed:
            return []  # the answer is on its way
        return self._fail(
            f"{named_ranks(missing)} of {self._identity.world} did not come within {duration(seconds)}", FEW
        )

    def missing(self, topic: str) -> list[int]:
        """The ranks that have said nothing on it so far. May be asked by any thread."""
        return [rank for rank in range(self._identity.world) if rank not in self._said[topic]]

    def _fail(self, what: str, cause: str) -> Replies:
        if self._failed:
            return []
        self._failed = what
        return self._to_all({"failed": what, "cause": cause})

    def _to_all(self, message: Message) -> Replies:
        return [(guest, pack(message)) for guest in self._members.values()]
