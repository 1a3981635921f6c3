"""Meeting protocol: ranks authenticate to the run, exchange texts, and learn which ranks have left.

    rank   <-> meeting   handshake over the run's token: the rank sends a Hello; a refusal has the reason
    rank    -> meeting   a text on a topic
    meeting -> all       the texts of all ranks on a topic; or failed: the ranks that left or never joined
    meeting -> all       gone: a rank that left after the group was formed, for ranks that wait for it later

A run without a token uses an empty one. The proofs then exclude only accidental connections of other programs and
runs, but no attacker. Messages after the handshake are not authenticated individually.

Each message is a JSON object behind an eight-byte header with the protocol's name and the length. No sockets here.
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
FROM_RANK_BYTES = 4096  # maximum size of a message from a rank
FROM_MEETING_BYTES = 2**26  # maximum size of a message to a rank, which may hold a text of every rank
LARGEST_NUMBER = 2**31
SHOWN_CHARACTERS = 60  # of an unauthenticated text
COMING, REACHING, STANDING = TOPICS = ("coming", "reaching", "standing")  # STANDING ends the meeting
FEW, LEFT = "few", "left"

Message = dict[str, Any]
Replies = list[tuple["Guest", bytes]]


def pack(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(MAGIC, len(body)) + body


class Inbox:
    """Splits a stream of bytes into messages of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[Message]:
        """Return the messages that are now complete. Raises MalformedError for invalid data."""
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
            raise MalformedError(f"invalid start of a meeting's message: {bytes(self._bytes[:20])!r}")
        length = int(HEADER.unpack_from(self._bytes)[1])
        if length > self._limit_bytes:
            raise MalformedError(f"message of {length} bytes exceeds the limit of {self._limit_bytes}")
        return length


def _text(claims: bytes) -> str:
    try:
        return claims.decode()
    except UnicodeDecodeError:
        raise MalformedError("the claims are not valid UTF-8") from None


def read_refusal(claims: bytes) -> tuple[str, bool]:
    """Return the reason of a refusal, and whether the rank is already present. Raises MalformedError."""
    message = _parsed(claims)
    return text_in(message, "refused"), message.get("taken") is True


def _parsed(body: bytes) -> Message:
    try:
        message = read_json(body)
    except ValueError:
        raise MalformedError("the message is not valid JSON") from None
    if not isinstance(message, dict):
        raise MalformedError("the message is not a JSON object")
    return message


def text_in(message: Mapping[str, Any], name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
        raise MalformedError(f"the field {name!r} is not a text")
    return text


def whole_in(message: Mapping[str, Any], name: str) -> int:
    number = message.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or abs(number) > LARGEST_NUMBER:
        raise MalformedError(f"the field {name!r} is not an integer")
    return number


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Values that all ranks of one run share. token: the run's secret; empty if it has none."""

    run: str
    world: int
    token: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First message of a rank.

    Attributes:
        run: Identity of the run.
        world: Number of ranks.
        rank: The sender's rank.
        `who`: Its host and process.
        gpus: Comma-separated names of the GPUs that it sees.
        address: Address where it listens for a reachability check.
        port: Port of that listener.
        store: Port and prefix of the process group's store; only from rank 0.
    """

    run: str
    world: int
    rank: int
    who: str
    gpus: str = ""
    address: str = ""
    port: int = 0
    store: str = ""

    def text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def read(cls, text: str) -> Hello:
        """Parse a Hello. Raises MalformedError for an invalid one."""
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
            raise MalformedError("a field has characters that cannot be printed")
        return hello


@dataclass(eq=False)
class Guest:
    """One connection to the meeting. hello: None until the peer has authenticated."""

    handshake: Listener = field(default_factory=lambda: Listener(PURPOSE, limit_bytes=FROM_RANK_BYTES))
    hello: Hello | None = None
    dismissed: bool = False


class Meeting:
    """The server side of the meeting.

    Pass a guest with complete claims to `admit`, its messages to `take`, and a guest to `left` when its connection
    ends. Send the replies that they return.

    Args:
        identity: Values that every rank must match.
        `warn`: Called with a kind and a sentence, to warn the user about rejected connections.
    """

    def __init__(self, identity: RunIdentity, warn: Callable[[str, str], None]) -> None:
        self._identity = identity
        self._warn = warn
        self._members: dict[int, Guest] = {}
        self._descriptions: dict[str, dict[int, str]] = {topic: {} for topic in TOPICS}
        self._failed = ""
        self._over = False

    def take(self, guest: Guest, message: Message) -> Replies:
        """Process a message. Raises MalformedError for an invalid one."""
        assert guest.hello is not None
        topic = text_in(message, "topic")
        if topic not in self._descriptions:
            raise MalformedError(f"unknown topic {topic[:SHOWN_CHARACTERS]!r}")
        if "seconds" in message:
            return self._give_up(topic, whole_in(message, "seconds") / 1000)
        return self._receive(guest.hello.rank, topic, text_in(message, "text"))

    def left(self, guest: Guest) -> Replies:
        """Notify all ranks: the meeting has failed or, if the group was formed, this rank has gone."""
        if guest.hello is None or self._members.get(guest.hello.rank) is not guest:
            return []
        who = f"rank {guest.hello.rank} ({guest.hello.who})"
        if self._over:
            return self._to_all({"gone": who})
        return self._fail(f"{who} left while the workers were joining", LEFT)

    def admit(self, guest: Guest) -> Replies:
        """Accept or refuse a rank after it has sent its claims. Raises MalformedError for invalid claims."""
        handshake, token = guest.handshake, self._identity.token
        description = _text(handshake.claims or b"")
        hello = Hello.read(description)
        proven = handshake.is_proven(token)
        if (reason := self._objection(hello, proven)) is not None:
            guest.dismissed = True
            self._warn("refused", f"a worker that claims to be rank {hello.rank} was refused at the meeting: {reason}")
            taken = hello.rank in self._members and proven
            handshake.refuse(json.dumps({"refused": reason, "taken": taken}).encode())
            return [(guest, handshake.output())]
        guest.hello = hello
        self._members[hello.rank] = guest
        handshake.accept(token)
        return [(guest, handshake.output()), *self._receive(hello.rank, COMING, description)]

    def _objection(self, hello: Hello, proven: bool) -> str | None:
        """Return why this worker is refused, or None."""
        own = self._identity
        if hello.run != own.run:
            peer_run = repr(hello.run[:SHOWN_CHARACTERS])
            return (
                f"it belongs to the run {peer_run} and this is the run {own.run!r}. Stop the older run's processes; "
                "all workers of one run need the same GOSSAMER_RUN"
            )
        if not proven:
            return (
                "it cannot prove that it belongs to this run: it has no token, or another one. Give all "
                "workers the same GOSSAMER_TOKEN_FILE, or start them with `gossamer run --token-file FILE`"
            )
        if hello.world != own.world:
            return f"it was started with WORLD_SIZE={hello.world}, rank 0 with {own.world}. Set the same value for all"
        if not 0 <= hello.rank < own.world:
            return f"its rank is {hello.rank} of {own.world}"
        if (holder := self._members.get(hello.rank)) is not None and holder.hello is not None:
            return f"another worker ({holder.hello.who}) is already present as rank {hello.rank}"
        return self._failed or None

    def _receive(self, rank: int, topic: str, text: str) -> Replies:
        description = self._descriptions[topic]
        description[rank] = text
        if len(description) < self._identity.world:
            return []
        self._over = topic == STANDING
        return self._to_all({"heard": topic, "texts": [description[rank] for rank in range(self._identity.world)]})

    def _give_up(self, topic: str, seconds: float) -> Replies:
        missing = self.missing(topic)
        if not missing or self._failed:
            return []  # the answer is on its way
        return self._fail(
            f"{named_ranks(missing)} of {self._identity.world} did not join within {duration(seconds)}", FEW
        )

    def missing(self, topic: str) -> list[int]:
        """Return the ranks without a text on this topic so far. Thread-safe."""
        return [rank for rank in range(self._identity.world) if rank not in self._descriptions[topic]]

    def _fail(self, what: str, cause: str) -> Replies:
        if self._failed:
            return []
        self._failed = what
        return self._to_all({"failed": what, "cause": cause})

    def _to_all(self, message: Message) -> Replies:
        packed = pack(message)  # the texts of all ranks, which is long
        return [(guest, packed) for guest in self._members.values()]
