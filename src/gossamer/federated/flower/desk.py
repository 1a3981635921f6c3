"""Message desk: letters for nodes that come and ask, and their answers; each letter is answered once. No sockets.

A node asks for the first letter that it has not answered, again after it was restarted, and pushes the answer. What
arrives twice is acknowledged twice and kept once. Letters of a node that is gone are given up, so that nobody waits for
it; what it answers to them later is not used.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Arrived, PeerEvent, PeerLeft, PeerScript, Pull, Pulled, Push, Receipt, Reply, Stamp
from gossamer.federated.messages import CLIENT, THE_SERVER

LETTER, ANSWER = "letter", "answer"  # keys of asks
END = "end"  # how the last letter is headed
NOT_USED = -1  # version of a receipt


class Letter(NamedTuple):
    """What goes to a node."""

    number: int  # ascends for every node
    head: str
    data: bytes


class MessageDesk:
    """Who is there, which letters wait for an answer, and the answers that came. Used under its owner's lock."""

    def __init__(self) -> None:
        self.present: set[int] = set()
        self._gone: set[int] = set()  # who was there and is not any more
        self.answers: dict[tuple[int, int], bytes | None] = {}  # by node and letter; None: given up
        self._letters: dict[int, deque[Letter]] = defaultdict(deque)  # unanswered
        self._waiting: dict[int, list[int]] = defaultdict(list)  # tokens of asks for a letter
        self._written: dict[int, int] = defaultdict(int)  # letters, by node
        self._forgotten: set[tuple[int, int]] = set()  # by node and letter: nobody waits for the answer
        self._ended = False

    def write(self, node: int, head: str, data: bytes) -> tuple[int, list[Reply]]:
        """Put down a letter; returns its number, and what is to be said at once."""
        number = self._written[node]
        self._written[node] += 1
        if node in self._gone:
            self.answers[node, number] = None
            return number, []
        self._letters[node].append(Letter(number, head, data))
        return number, self._handed(node)

    def forget(self, node: int, number: int) -> None:
        """Nobody waits for this answer any more; the node may still come to it."""
        if (node, number) in self.answers:
            del self.answers[node, number]
        else:
            self._forgotten.add((node, number))

    def end(self) -> list[Reply]:
        """There will be no more letters."""
        self._ended = True
        return [reply for node in list(self._waiting) for reply in self._handed(node)]

    def react(self, event: PeerEvent) -> list[Reply]:
        match event:
            case Arrived(token=token, sender=sender, op=Pull(key=key)) if sender.kind == CLIENT and key == LETTER:
                self.present.add(sender.number)
                self._gone.discard(sender.number)
                self._waiting[sender.number].append(token)
                return self._handed(sender.number)
            case Arrived(token=token, sender=sender, op=Push(key=key) as push) if sender.kind == CLIENT:
                return [Reply(token=token, answer=Receipt(version=self._taken(sender.number, key, push)))]
            case Arrived(token=token):
                return [Reply(token=token, answer=Receipt(version=NOT_USED))]
            case PeerLeft(peer=peer) if peer.kind == CLIENT:
                self._left(peer.number)
        return []

    def _handed(self, node: int) -> list[Reply]:
        """The first unanswered letter, to all who ask for it."""
        letters = self._letters[node]
        if not letters and not self._ended:
            return []
        letter = letters[0] if letters else Letter(-1, END, b"")
        answer = Pulled(version=letter.number, payload=as_payload(letter.data), about=letter.head)
        return [Reply(token=token, answer=answer) for token in self._waiting.pop(node, [])]

    def _taken(self, node: int, key: str, push: Push) -> int:
        number = push.stamp.step
        if key != ANSWER or push.stamp.worker != node or not 0 <= number < self._written[node]:
            return NOT_USED
        letters = self._letters[node]
        if not letters or letters[0].number != number:
            return number if number < (letters[0].number if letters else self._written[node]) else NOT_USED
        data = as_bytes(push.payload)
        if data is None:
            return NOT_USED
        letters.popleft()
        self._came(node, number, data)
        return number

    def _left(self, node: int) -> None:
        self.present.discard(node)
        self._gone.add(node)
        self._waiting.pop(node, None)
        for letter in self._letters.pop(node, ()):
            self._came(node, letter.number, None)

    def _came(self, node: int, number: int, data: bytes | None) -> None:
        if (node, number) in self._forgotten:
            self._forgotten.discard((node, number))
        else:
            self.answers[node, number] = data


def answer_letters(number: int, answer: Callable[[str, bytes], bytes]) -> PeerScript:
    """A node's script: answer letters until the last; returns how many."""
    count = 0
    while True:
        pulled = yield Pull(of=THE_SERVER, key=LETTER, known=count - 1)
        if pulled.about == END:
            return count
        data = answer(pulled.about, as_bytes(pulled.payload) or b"")
        yield Push(to=THE_SERVER, key=ANSWER, stamp=Stamp(number, pulled.version), payload=as_payload(data))
        count += 1


def as_payload(data: bytes) -> Payload:
    return (torch.frombuffer(bytearray(data), dtype=torch.uint8),) if data else ()


def as_bytes(payload: Payload) -> bytes | None:
    """None where it is no bytes."""
    if not payload:
        return b""
    if len(payload) != 1 or payload[0].dtype != torch.uint8:
        return None
    return payload[0].numpy().tobytes()
