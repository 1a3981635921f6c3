"""Pinned arena: slots never overlap, memory is taken once, and what was given back serves again."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gossamer.comm.staging.pinned_arena import PinnedArena, PinnedSlot


def arena(capacity_bytes: int) -> tuple[PinnedArena, list[int]]:
    allocated: list[int] = []

    def allocate(nbytes: int) -> Tensor:
        allocated.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    return PinnedArena(allocate, capacity_bytes), allocated


def check_apart(taken: list[PinnedSlot]) -> None:
    places = sorted((slot.memory.data_ptr(), slot.memory.data_ptr() + slot.memory.numel()) for slot in taken)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places)), "slots overlap"


def use(memory: PinnedArena, turns: int = 500) -> None:
    draws, taken = random.Random(0), []
    for _ in range(turns):
        if taken and draws.random() < 0.5:
            memory.give_back(taken.pop(draws.randrange(len(taken))))
        if (slot := memory.take(draws.randrange(1, 300))) is not None:
            taken.append(slot)
            check_apart(taken)


def test_slots_in_use_never_overlap_and_memory_is_taken_once() -> None:
    memory, allocated = arena(1024)
    assert allocated == []
    use(memory)
    assert allocated == [1024]


def test_the_check_catches_who_forgets_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = arena(1024)
    take = PinnedArena.take

    def forgets(self: PinnedArena, nbytes: int) -> PinnedSlot | None:
        found = take(self, nbytes)
        self._taken.clear()
        return found

    monkeypatch.setattr(PinnedArena, "take", forgets)
    with pytest.raises(AssertionError, match="overlap"):
        use(memory)


def test_where_there_is_no_gap_there_is_no_slot_until_one_is_given_back() -> None:
    memory, allocated = arena(256)
    first, second = memory.take(100), memory.take(100)
    assert first is not None
    assert second is not None
    assert memory.take(1) is None
    beyond = memory.beyond(1000)
    assert beyond.memory.numel() == 1000
    memory.give_back(beyond)
    memory.give_back(first)
    again = memory.take(128)
    assert again is not None
    assert again.memory.data_ptr() == first.memory.data_ptr()
    assert memory.take(300) is None
    assert allocated == [256, 1000]


def test_nothing_needs_no_memory() -> None:
    memory, allocated = arena(64)
    slot = memory.take(0)
    assert slot is not None
    assert slot.memory.numel() == 0
    assert allocated == []
