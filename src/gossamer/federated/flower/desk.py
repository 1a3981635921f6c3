"""Message desk: queues of messages ("letters") for nodes that poll, and their answers, without sockets.

A node pulls its first unanswered letter, again after a restart, and pushes the answer. A repeated answer is
acknowledged again and kept once. Letters of a node that left are given up, so that no caller waits for them; later
answers to them are not used.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Arrived, PeerEvent, PeerLeft, PeerScript, Pull, Pulled, Push, Receipt, Reply, Stamp
from gossamer.federated.messages import CLIENT, THE_SERVER

LETTER, ANSWER = "letter", "answer"  # keys of requests
END = "end"  # head of the last letter
NOT_USED = -1  # version of a receipt


class Letter(NamedTuple):
    """A message to a node."""

    number: int  # ascending for each node
    head: str
    data: bytes


class MessageDesk:
    """Present nodes, unanswered letters and answers. Used under its owner's lock."""

    def __init__(self) -> None:
        self.present: set[int] = set()
        self._gone: set[int] = set()  # nodes that left
        self.answers: dict[tuple[int, int], bytes | None] = {}  # by node and letter; None: given up
        self._letters: dict[int, deque[Letter]] = defaultdict(deque)  # unanswered
        self._waiting: dict[int, list[int]] = defaultdict(list)  # tokens of requests for a letter
        self._written: dict[int, int] = defaultdict(int)  # letters, by node
        self._forgotten: set[tuple[int, int]] = set()  # by node and letter: the answer is no longer needed
        self._ended = False
        self._told: set[int] = set()  # nodes that were sent the last letter

    @property
    def untold(self) -> set[int]:
        """Present nodes that were not sent the last letter."""
        return self.present - self._told

    def write(self, node: int, head: str, data: bytes) -> tuple[int, list[Reply]]:
        """Queue a letter. Returns its number and the replies to send now."""
        number = self._written[node]
        self._written[node] += 1
        if node in self._gone:
            self.answers[node, number] = None
            return number, []
        self._letters[node].append(Letter(number, head, data))
        return number, self._handed(node)

    def forget(self, node: int, number: int) -> None:
        """Discard this answer when it arrives."""
        if (node, number) in self.answers:
            del self.answers[node, number]
        else:
            self._forgotten.add((node, number))

    def end(self) -> list[Reply]:
        """End: there are no more letters. Returns the replies to send now."""
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
        """Send the first unanswered letter to all waiting requests of a node."""
        letters = self._letters[node]
        if not letters and not self._ended:
            return []
        letter = letters[0] if letters else Letter(-1, END, b"")
        if letter.head == END and self._waiting.get(node):
            self._told.add(node)
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
    """A node's script: answer all letters. Returns their number."""
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
    """The bytes of a payload; None for another payload."""
    if not payload:
        return b""
    if len(payload) != 1 or payload[0].dtype != torch.uint8:
        return None
    return payload[0].numpy().tobytes()
