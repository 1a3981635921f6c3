"""Meeting member: one rank's connection to the meeting, from its Hello until the process group is formed."""

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

GREETING_SECONDS = 2.0  # from the first accepted connection: a meeting sends first, without delay
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.02, 0.5
DIAL_SECONDS = 5.0  # per attempt: enough to retransmit two lost first packets
RECEIVED_BYTES = 2**16
TAIL_SECONDS = 1.0  # for the meeting to report the missing ranks
# Errors of this machine and not of the network, so waiting cannot help
HOPELESS = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EAFNOSUPPORT}

Locate = Callable[[], tuple[str, int]]


class Unreachable(GossamerError):
    """No process accepts connections at the meeting's address. problem: error of the last attempt."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Foreign(GossamerError):
    """The program that accepts connections at the meeting's address is not a meeting."""


class Refused(GossamerError):
    """The meeting refused this worker. taken: because its rank is already present."""

    def __init__(self, reason: str, taken: bool) -> None:
        super().__init__(reason)
        self.taken = taken


class Failed(GossamerError):
    """The meeting ended early. left: because a rank left, rather than never joined."""

    def __init__(self, what: str, left: bool) -> None:
        super().__init__(what)
        self.left = left


class MeetingMember:
    """A rank that the meeting has admitted. After the group is formed, the open connection reports ranks that leave."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._inbox = link, Inbox(FROM_MEETING_BYTES)
        self._received: dict[str, list[str]] = {}
        self._failed: Failed | None = None
        self._gone: list[str] = []

    @property
    def address_of_meeting(self) -> str:
        """IP address of rank 0."""
        address: str = self._link.getpeername()[0]
        return address

    def everyone(
        self, topic: str, seconds: float, text: str | None = None, look: Callable[[], None] = lambda: None
    ) -> list[str]:
        """All-gather the texts on this topic, by rank. Raises Failed.

        Args:
            topic: The topic.
            seconds: How long to wait.
            text: This rank's text, unless the Hello contained it.
            look: Called repeatedly during the wait.
        """
        if text is not None:
            self._send({"topic": topic, "text": text})
        deadline = time.monotonic() + seconds
        gave_up = False
        while topic not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 and gave_up:
                raise Failed(f"the meeting stopped answering {seconds:g} s ago", left=False)
            if left <= 0:
                self._send({"topic": topic, "seconds": round(1000 * seconds)})
                deadline, gave_up = deadline + TAIL_SECONDS, True
            look()
            self.watch(min(max(left, POLL_SECONDS), LONGEST_POLL_SECONDS), topic)
        return self._received[topic]

    def watch(self, seconds: float, topic: str | None = None) -> None:
        """Receive for that long, or until a message arrives. Raises Failed if a rank has left, unless the texts of all
        ranks on this topic arrived first."""
        if self._failed is None and select.select([self._link], [], [], seconds)[0]:
            self._listen()
        if self._failed is not None and topic not in self._received:
            raise self._failed

    @property
    def gone(self) -> str:
        """The first rank known to have left after the group was formed; else empty."""
        while not self._gone and self._failed is None and select.select([self._link], [], [], 0.0)[0]:
            self._listen()
        return next(iter(self._gone), "" if self._failed is None else "rank 0")

    def _listen(self) -> None:
        try:
            received = self._link.recv(RECEIVED_BYTES)
        except OSError:
            received = b""
        if not received:
            self._failed = Failed("rank 0, which hosts the meeting, left while the workers were joining", left=True)
            return
        try:
            self._take(self._inbox.feed(received))
        except MalformedError as problem:
            self._failed = Failed(f"invalid message from the meeting: {problem}", left=False)

    def close(self) -> None:
        self._link.close()

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the received messages explain why the connection closed
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
                raise MalformedError("unknown kind of message")
            self._received[topic] = texts


def attend(
    locate: Locate,
    identity: RunIdentity,
    hello: Hello,
    seconds: float,
    look: Callable[[OSError], None] = lambda problem: None,
) -> MeetingMember:
    """Join the meeting.

    Args:
        locate: Returns the meeting's address; raises OSError while it is unknown.
        identity: Values that all ranks of the run share.
        hello: First message of this rank.
        seconds: How long to wait for the meeting.
        look: Called with the error after each failed attempt.

    Raises:
        Unreachable: No connection within `seconds`, or at once if this machine itself refuses to dial.
        Foreign: Another program listens at the address.
        Refused: The meeting does not admit this worker.
        Failed: The meeting ended early.
    """
    deadline, pause = time.monotonic() + seconds, POLL_SECONDS
    accepted = None
    while True:
        try:
            link = _dial(locate(), min(max(deadline - time.monotonic(), POLL_SECONDS), DIAL_SECONDS))
        except OSError as problem:
            if problem.errno in HOPELESS or time.monotonic() + POLL_SECONDS >= deadline:
                raise Unreachable(problem) from None
            look(problem)  # another machine does not announce that it begins to listen
            time.sleep(min(pause, max(deadline - time.monotonic(), POLL_SECONDS)))
            accepted, pause = None, min(2 * pause, LONGEST_POLL_SECONDS)
            continue
        accepted = accepted or time.monotonic()
        try:
            return _introduce(link, identity, hello, accepted + GREETING_SECONDS)
        except ConnectionError as problem:
            link.close()
            if time.monotonic() >= accepted + GREETING_SECONDS:
                raise Foreign(f"the program at this address closes every connection ({problem})") from None
            time.sleep(POLL_SECONDS)
        except BaseException:
            link.close()
            raise


def _dial(address: tuple[str, int], seconds: float) -> socket.socket:
    link = socket.create_connection(address, seconds)
    if link.getsockname() == link.getpeername():  # TCP connected an ephemeral port to itself
        link.close()
        raise ConnectionRefusedError("nothing listens there")
    return link


def _introduce(link: socket.socket, identity: RunIdentity, hello: Hello, deadline: float) -> MeetingMember:
    """Authenticate both ends. Raises ConnectionError if the other end has closed."""
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
        raise Foreign("the program at this address cannot prove that it belongs to this run") from None
    except (MalformedError, MismatchError) as problem:
        with contextlib.suppress(OSError):
            link.sendall(handshake.output())
        raise Foreign(f"the program at this address is not a meeting of workers: {problem}") from None


def _next(link: socket.socket, most_bytes: int, deadline: float) -> bytes:
    """Receive at least one byte. The deadline holds for a whole message, even if it arrives byte by byte."""
    try:
        link.settimeout(max(deadline - time.monotonic(), POLL_SECONDS))
        received = link.recv(most_bytes)
        if time.monotonic() > deadline + POLL_SECONDS:
            raise TimeoutError
    except TimeoutError:
        raise Foreign(f"the program at this address sent nothing within {GREETING_SECONDS:g} s") from None
    if not received:
        raise ConnectionResetError("closed before the first message")
    return received
