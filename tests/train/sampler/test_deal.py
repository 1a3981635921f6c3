"""Deals: what is left of an order goes round again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.train.sampler.deal import NO_PLACE, Deal, left_of, part_of


def test_the_table() -> None:
    first = [Deal(total=10, place=place, places=3) for place in range(3)]
    assert [deal.entries().tolist() for deal in first] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    second = [Deal(total=10, place=place, places=2, drawn=((2, 1, 1),)) for place in range(2)]
    assert [deal.entries().tolist() for deal in second] == [[4, 6, 8], [5, 7, 9]]
    third = [Deal(total=10, place=place, places=3, drawn=((2, 1, 1), (0, 2))) for place in range(3)]
    assert [deal.entries().tolist() for deal in third] == [[4, 9], [6], [8]]
    assert [deal.part for deal in third] == [2, 1, 1]


def test_whose_epoch_is_over_has_no_entries() -> None:
    deal = Deal(total=10, place=NO_PLACE, places=2, drawn=((4, 3, 2),))
    assert (deal.entries().tolist(), deal.part, deal.left) == ([], 0, 1)


def test_what_was_drawn_in_another_order_is_replayed() -> None:
    """A stratified part is shuffled after it was dealt out, differently in every deal."""

    def arranged(entries: torch.Tensor, deals_before: int, place: int) -> torch.Tensor:
        return entries.roll(1 + deals_before)

    first = Deal(total=6, place=1, places=2)
    assert first.entries(arranged).tolist() == [5, 1, 3]
    second = Deal(total=6, place=0, places=1, drawn=((1, 1),))  # 4 and 5
    assert second.entries(arranged).tolist() == [2, 3, 0, 1]


@given(st.integers(4, 60), st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=3), st.integers(1, 4))
def test_a_stream_is_dealt_out_as_an_order_is(total: int, asked: list[list[int]], places: int) -> None:
    drawn: tuple[tuple[int, ...], ...] = ()
    for counts in asked:
        deals = [Deal(total=total, place=place, places=len(counts), drawn=drawn) for place in range(len(counts))]
        drawn = (*drawn, tuple(min(count, deal.part) for count, deal in zip(counts, deals, strict=True)))
    for place in range(places):
        deal = Deal(total=total, place=place, places=places, drawn=drawn)
        assert [*part_of(left_of(range(total), drawn), place, places)] == deal.entries().tolist()


def test_a_last_row_that_is_short() -> None:
    parts = {even: [[*part_of(range(8), place, 3, even)] for place in range(3)] for even in (None, "drop", "pad")}
    assert parts[None] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert parts["drop"] == [[0, 3], [1, 4], [2, 5]]
    assert parts["pad"] == [[0, 3, 6], [1, 4, 7], [2, 5, 6]]
