"""Tensors of a selection, and the room for its candidates."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.triton.spans import BLOCK, SAMPLE, Spans, beyond, span, spans

CPU = torch.device("cpu")


def made(sizes: list[int], counts: list[int]) -> Spans:
    found = spans(sum(sizes), sizes, counts, CPU)
    assert found is not None
    return found


def chance_of_at_least(count: int, expected: float) -> float:
    """Of a Poisson count, which those of samples without replacement vary less than."""
    return 1 - sum(math.exp(each * math.log(expected) - expected - math.lgamma(each + 1)) for each in range(count))


def rare(margin: Callable[[float], int]) -> bool:
    return all(chance_of_at_least(margin(expected), expected) < 1e-6 for expected in (0.01, 0.3, 1, 5, 40, 200))


def test_margins_are_left_once_in_millions() -> None:
    assert rare(beyond)
    assert not rare(lambda expected: math.ceil(expected + 3 * math.sqrt(expected)))  # a twin that is too narrow


def test_room_is_for_somewhat_more_than_travels_and_never_for_more_than_there_is() -> None:
    sizes, counts = [25_000_000, 25_000_000, 100_000, 65, 64, 7, 1, 0], [250_000, 25_000, 1000, 0, 64, 1, 1, 0]
    found = made(sizes, counts)
    rooms = found.rooms.tolist()
    assert all(count <= room <= size for count, room, size in zip(counts, rooms, sizes, strict=True))
    assert rooms[0] < 2 * counts[0]
    assert rooms[1] < 6 * counts[1]
    assert rooms[3:] == [0, 64, 7, 1, 0]
    assert found.room == sum(rooms)
    assert found.first_rooms.tolist() == [sum(rooms[:number]) for number in range(len(rooms))]


def test_every_entry_of_a_small_tensor_is_sampled() -> None:
    assert made([SAMPLE, SAMPLE + 1], [1, 1]).strides.tolist() == [1, 2]


def test_nothing_is_searched_where_nothing_travels() -> None:
    assert made([100, 100], [0, 1]).ranks.tolist() == [0, beyond(1)]


def test_blocks_of_the_room_follow_those_of_all_entries() -> None:
    found = made([BLOCK + 9, 5, BLOCK], [BLOCK, 0, 9])
    rows, first = found.rows, BLOCK + 9
    assert found.rooms[0] == first
    assert rows.starts.tolist() == [0, BLOCK, first, first + 5, 0, BLOCK, first]
    assert rows.lengths.tolist() == [BLOCK, 9, 5, BLOCK, BLOCK, 9, int(found.rooms[2])]
    assert rows.owners.tolist() == [0, 0, 1, 2, 0, 0, 2]


@pytest.mark.parametrize(("sizes", "even"), [([8, 16], 8), ([8, 12], 1), ([7], 1), ([0, 64], 8)], ids=str)
def test_threads_read_several_entries_at_once_where_no_block_begins_between(sizes: list[int], even: int) -> None:
    assert made(sizes, [0] * len(sizes)).even == even


def test_above_a_bound_there_is_as_much_room_as_was_asked_for() -> None:
    assert (span(100, 7, CPU).room, span(100, 700, CPU).room) == (7, 100)
    assert span(100, 7, CPU).counts.tolist() == [0]
