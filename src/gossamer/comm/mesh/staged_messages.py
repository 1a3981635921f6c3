"""Staged messages: parts of what ranks tell each other straight, each in memory of a slot."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from gossamer.comm.mesh.operations import MeshOperations, Wait
from gossamer.comm.mesh.program import form_of, straight_program
from gossamer.comm.staging.byte_views import ByteViews
from gossamer.comm.staging.pinned_arena import ALIGNED_BYTES
from gossamer.comm.staging.staged_op import Chunk
from gossamer.comm.staging.staging_area import Move

Parts = Mapping[int, tuple[int, int]]  # by rank: where a part lies in a slot, and how many bytes it has


class StagedMessages:
    """told: the message for each other rank, perhaps the same for several; heard: how many bytes come from each."""

    def __init__(self, operations: MeshOperations, told: Mapping[int, ByteViews], heard: Mapping[int, int]) -> None:
        self._operations, self._told, self._heard = operations, told, heard
        self._distinct = list({id(message): message for message in told.values()}.values())

    def chunk(self, begin: int, end: int, answers: Mapping[int, ByteViews]) -> Chunk:
        """The bytes from `begin` on until before `end` of all of them. answers: where what is heard belongs."""
        layout = SlotLayout()
        inward: list[Move] = []
        told_at: dict[int, tuple[int, int]] = {}
        for message in self._distinct:
            length = message.length(begin, end)
            told_at[id(message)] = layout.add(length), length
            inward += message.moves(begin, end, told_at[id(message)][0])
        told = {peer: told_at[id(message)] for peer, message in self._told.items()}
        lengths = {peer: max(0, min(nbytes, end) - begin) for peer, nbytes in self._heard.items()}
        heard = {peer: (layout.add(length), length) for peer, length in lengths.items()}
        outward = [move for peer, each in answers.items() for move in each.moves(begin, end, heard[peer][0])]
        return Chunk(layout.nbytes, inward, partial(straight, self._operations, told, heard), outward)


class SlotLayout:
    """Where parts lie in a slot, one after another, aligned."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, length: int) -> int:
        """The place of another part."""
        place = -(-self.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self.nbytes = place + length
        return place


def straight(operations: MeshOperations, told: Parts, heard: Parts, slot: Tensor) -> Wait:
    """Begin to send bytes of a slot to other ranks and to take others' there."""
    to, of = ([parts.get(peer, (0, 0)) for peer in operations.everyone] for parts in (told, heard))
    sizes = tuple(length for _, length in to), tuple(length for _, length in of)
    program = straight_program(*sizes, form_of("staged", max(map(max, sizes))))
    places = [slot.data_ptr() + place for place, _ in (*to, *of)]
    return operations.run(program, places, slot, lambda: None)
