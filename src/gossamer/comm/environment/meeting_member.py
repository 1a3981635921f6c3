"""Meeting member: one rank's connection to the meeting, from its hello until the process group stands."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable

from gossamer.comm.environment.meeting import (
    FROM_MEETING_BYTES,
    LEFT,
    PURPOSE,
    TOPICS,
    Hello,
    Inbox,
    Message,
    RunIdentity,
    pack,
    read_refusal,
    text_in,
)
from gossamer.comm.handshake import Dialer, WrongKeyError
from gossamer.errors import GossamerError, MalformedError, MismatchError

GREETING_SECONDS = 2.0  # from the first accepted connection on: a meeting speaks first, and at once
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 0.5
DIAL_SECONDS = 5.0  # of one attempt: two lost first packets are sent again
RECEIVED_BYTES = 2**16
TAIL_SECONDS = 1.0  # for the meeting to say who is missing
# Said by this machine and not by the network, so that no waiting helps
HOPELESS = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EAFNOSUPPORT}

Locate = Callable[[], tuple[str, int]]


class Unreachable(GossamerError):
    """Nobody accepts connections at the meeting point. problem: of the last attempt."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Foreign(GossamerError):
    """What accepts connections at the meeting point is no meeting."""


class Refused(GossamerError):
    """The meeting does not take this worker. taken: because its rank is there already."""

    def __init__(self, reason: str, taken: bool) -> None:
        super().__init__(reason)
        self.taken = taken


class Failed(GossamerError):
    """The meeting ended early. left: because a rank left, and not because some never came."""

    def __init__(self, what: str, left: bool) -> None:
        super().__init__(what)
        self.left = left


class MeetingMember:
    """A rank that the meeting has taken. Kept open once the group stands, it hears who leaves."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._inbox = link, Inbox(FROM_MEETING_BYTES)
        self._heard: dict[str, list[str]] = {}
        self._failed: Failed | None = None
        self._gone: list[str] = []

    @property
    def address_of_meeting(self) -> str:
        """Where rank 0 was found."""
        address: str = self._link.getpeername()[0]
        return address

    def everyone(
        self, topic: str, seconds: float, text: str | None = None, look: Callable[[], None] = lambda: None
    ) -> list[str]:
        """All ranks' texts on this topic, by rank; text: this one's, if the hello has not said it. Raises Failed.

        look: called again and again meanwhile.
        """
        if text is not None:
            self._send({"topic": topic, "text": text})
        deadline = time.monotonic() + seconds
        gave_up = False
        while topic not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 and gave_up:
                raise Failed(f"the meeting fell silent {seconds:g} s ago", left=False)
            if left <= 0:
                self._send({"topic": topic, "seconds": round(1000 * seconds)})
                deadline, gave_up = deadline + TAIL_SECONDS, True
            look()
            self.watch(min(max(left, POLL_SECONDS), LONGEST_POLL_SECONDS), topic)
        return self._heard[topic]

    def watch(self, seconds: float, topic: str | None = None) -> None:
        """Listen for that long, or until something is said. Raises Failed where a rank has left, unless all had
        talked about this topic before it did."""
        if self._failed is None and select.select([self._link], [], [], seconds)[0]:
            self._listen()
        if self._failed is not None and topic not in self._heard:
            raise self._failed

    @property
    def gone(self) -> str:
        """Who was first to leave after the group stood, as far as is heard by now; empty where nobody has."""
        while not self._gone and self._failed is None and select.select([self._link], [], [], 0.0)[0]:
            self._listen()
        return next(iter(self._gone), "" if self._failed is None else "rank 0")

    def _listen(self) -> None:
        try:
            received = self._link.recv(RECEIVED_BYTES)
        except OSError:
            received = b""
        if not received:
            self._failed = Failed("rank 0, at which the workers meet, left while they were joining", left=True)
            return
        try:
            self._take(self._inbox.feed(received))
        except MalformedError as problem:
            self._failed = Failed(f"what the meeting said cannot be read: {problem}", left=False)

    def close(self) -> None:
        self._link.close()

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # why it is gone is said by what is received
            self._link.sendall(pack(message))

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            if "failed" in message:
                self._failed = Failed(text_in(message, "failed"), left=message.get("cause") == LEFT)
                return
            if "gone" in message:
                self._gone.append(text_in(message, "gone"))
                continue
            topic, texts = message.get("heard"), message.get("texts")
            if topic not in TOPICS or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise MalformedError("it is none of a meeting's messages")
            self._heard[topic] = texts


def attend(
    locate: Locate,
    identity: RunIdentity,
    hello: Hello,
    seconds: float,
    look: Callable[[OSError], None] = lambda problem: None,
) -> MeetingMember:
    """Come to the meeting that `locate` finds, within `seconds`. locate: raises OSError while there is none.

    look: called after each attempt in vain, since what is not there yet may come. Raises Unreachable, at once where
    this machine itself refuses; Foreign, Refused or Failed.
    """
    deadline, pause = time.monotonic() + seconds, POLL_SECONDS
    accepted = None
    while True:
        try:
            link = _dial(locate(), min(max(deadline - time.monotonic(), POLL_SECONDS), DIAL_SECONDS))
        except OSError as problem:
            if problem.errno in HOPELESS or time.monotonic() + POLL_SECONDS >= deadline:
                raise Unreachable(problem) from None
            look(problem)  # nothing tells when another machine begins to listen
            time.sleep(min(pause, max(deadline - time.monotonic(), POLL_SECONDS)))
            accepted, pause = None, min(2 * pause, LONGEST_POLL_SECONDS)
            continue
        accepted = accepted or time.monotonic()
        try:
            return _introduce(link, identity, hello, accepted + GREETING_SECONDS)
        except ConnectionError as problem:
            link.close()
            if time.monotonic() >= accepted + GREETING_SECONDS:
                raise Foreign(f"whoever listens there closes every connection ({problem})") from None
            time.sleep(POLL_SECONDS)
        except BaseException:
            link.close()
            raise


def _dial(address: tuple[str, int], seconds: float) -> socket.socket:
    link = socket.create_connection(address, seconds)
    if link.getsockname() == link.getpeername():  # an ephemeral port that was given to its own client
        link.close()
        raise ConnectionRefusedError("nobody listens there")
    return link


def _introduce(link: socket.socket, identity: RunIdentity, hello: Hello, deadline: float) -> MeetingMember:
    """Prove to each other that both belong to the run. Raises ConnectionError where the other end is gone."""
    handshake = Dialer(PURPOSE, identity.token, hello.text().encode())
    try:
        while wanted := handshake.wanted_bytes:
            handshake.receive(_next(link, wanted, deadline))
            if answer := handshake.output():
                deadline += GREETING_SECONDS
                link.sendall(answer)
        if handshake.refused is not None:
            reason, taken = read_refusal(handshake.refused)
            raise Refused(reason, taken)
        link.settimeout(None)
        return MeetingMember(link)
    except WrongKeyError:
        raise Foreign("whoever listens there cannot prove that it belongs to this run") from None
    except (MalformedError, MismatchError) as problem:
        with contextlib.suppress(OSError):
            link.sendall(handshake.output())
        raise Foreign(f"whoever listens there is no meeting of workers: {problem}") from None


def _next(link: socket.socket, most_bytes: int, deadline: float) -> bytes:
    """The next bytes, at least one. The deadline is that of a whole message, also if it comes byte by byte."""
    try:
        link.settimeout(max(deadline - time.monotonic(), POLL_SECONDS))
        received = link.recv(most_bytes)
        if time.monotonic() > deadline + POLL_SECONDS:
            raise TimeoutError
    except TimeoutError:
        raise Foreign(f"whoever listens there says nothing within {GREETING_SECONDS:g} s") from None
    if not received:
        raise ConnectionResetError("closed before a word was said")
    return received
