"""Chunk tables: literal tables; every byte and number is in one chunk, and parts are those that a whole is cut into."""

from __future__ import annotations

import pytest

from gossamer.algorithms.collectives import bounds
from gossamer.comm.staging import chunk_tables
from gossamer.comm.staging.chunk_tables import PART_CHUNKS, byte_chunks, mean_chunks, spans


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_tables, "CHUNK_BYTES", 128)
    monkeypatch.setattr(chunk_tables, "SLOT_BYTES", 512)


def test_bytes_are_cut_alike_at_all_ranks_whatever_a_slot_holds() -> None:
    assert byte_chunks(300, 1, whole=True) == [(0, 128), (128, 256), (256, 300)]
    assert byte_chunks(300, 8, whole=True) == [(0, 64), (64, 128), (128, 192), (192, 256), (256, 300)]
    assert byte_chunks(0, 3, whole=True) == [(0, 0)]


def test_sub_groups_have_a_number_of_chunks_that_others_know() -> None:
    assert byte_chunks(300, 2, whole=False) == [(0, 128), (128, 256), (256, 300), (300, 300)]
    assert byte_chunks(0, 2, whole=False) == [(0, 0)] * PART_CHUNKS
    assert len(mean_chunks(10**6, 3, 4, whole=False)) == len(mean_chunks(0, 3, 4, whole=False)) == PART_CHUNKS


def test_every_chunk_of_a_mean_has_a_part_of_every_piece() -> None:
    assert mean_chunks(10, 3, 64, whole=True) == [
        [(0, 1), (4, 5), (7, 8)],
        [(1, 2), (5, 6), (8, 9)],
        [(2, 3), (6, 7), (9, 10)],
        [(3, 4), (7, 7), (10, 10)],
    ]
    assert mean_chunks(0, 2, 4, whole=True) == [[(0, 0), (0, 0)]]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("numel", [0, 1, 2, 31, 32, 33, 1003])
@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
def test_a_mean_s_parts_are_what_each_sum_is_cut_into(numel: int, pieces: int, whole: bool) -> None:
    """As mean_program takes them; and together they are everything, once."""
    chunks = mean_chunks(numel, pieces, 4, whole=whole)
    assert sorted(x for chunk in chunks for low, high in chunk for x in range(low, high)) == list(range(numel))
    for chunk in chunks:
        lengths = [high - low for low, high in chunk]
        at = bounds(sum(lengths), pieces)
        assert lengths == [at[piece + 1] - at[piece] for piece in range(pieces)]


def test_spans_leave_out_what_has_no_bytes() -> None:
    assert list(spans([3, 0, 5, 2], 2, 9)) == [(0, 2, 3), (2, 0, 5), (3, 0, 1)]
    assert list(spans([3, 5], 4, 4)) == []
    assert list(spans([], 0, 9)) == []
