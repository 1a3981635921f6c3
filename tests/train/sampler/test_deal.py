"""Deals: what is left of an order goes round again."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.train.sampler.deal import NO_PLACE, Deal, left_of, part_of
from gossamer.train.sampler.position import dealt_among

Drawn = tuple[tuple[int, ...], ...]
# (widths by worker, entries that each worker draws) of each deal
changes = st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=4), max_size=4)


def dealt(total: int, widths: list[int], drawn: Drawn = ()) -> list[Deal]:
    """Each worker's deal."""
    workers = range(len(widths))
    return [dealt_among(workers, rank, widths, total=total, drawn=drawn) for rank in workers]


def after(deals: list[Deal], counts: list[int]) -> Drawn:
    """`drawn` of the next deal, after each worker has drawn some entries of its part."""
    now = [count for deal, number in zip(deals, counts, strict=True) for count in deal.counts(min(number, deal.part))]
    return (*deals[0].drawn, tuple(now))


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


@given(st.integers(4, 60), changes, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_stream_is_dealt_out_as_an_order_is(
    total: int, story: list[list[tuple[int, int]]], widths: list[int]
) -> None:
    drawn: Drawn = ()
    for each in story:
        own, counts = map(list, zip(*each, strict=True))
        drawn = after(dealt(total, own, drawn), counts)
    for deal in dealt(total, widths, drawn):
        left = left_of(range(total), drawn)
        assert [*part_of(left, deal.place, deal.places, width=deal.width)] == deal.entries().tolist()


def test_a_last_row_that_is_short() -> None:
    parts = {even: [[*part_of(range(8), place, 3, even)] for place in range(3)] for even in (None, "drop", "pad")}
    assert parts[None] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert parts["drop"] == [[0, 3], [1, 4], [2, 5]]
    assert parts["pad"] == [[0, 3, 6], [1, 4, 7], [2, 5, 6]]


def test_a_short_last_row_of_workers_with_several_places() -> None:
    places = [(0, 2), (2, 1)]  # and widths
    for even, expected in {
        None: [[0, 1, 3, 4, 6], [2, 5]],
        "drop": [[0, 1, 3, 4], [2, 5]],
        "pad": [[0, 1, 3, 4, 6, 6], [2, 5, 6]],
    }.items():
        assert [[*part_of(range(7), place, 3, even, width=width)] for place, width in places] == expected


# -- workers with several places ---------------------------------------------------------------------------------------


def test_the_table_of_widths() -> None:
    first = dealt(10, [2, 1])
    assert [deal.entries().tolist() for deal in first] == [[0, 1, 3, 4, 6, 7, 9], [2, 5, 8]]
    assert after(first, [3, 1]) == ((2, 1, 1),)
    second = dealt(10, [1, 2], after(first, [3, 1]))
    assert [deal.entries().tolist() for deal in second] == [[4, 7], [5, 6, 8, 9]]


@given(st.integers(1, 60), changes, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_draws_are_disjoint_and_with_the_rest_they_are_the_order(
    total: int, story: list[list[tuple[int, int]]], last: list[int]
) -> None:
    drawn: Drawn = ()
    seen: list[int] = []
    for each in story:
        widths, counts = map(list, zip(*each, strict=True))
        deals = dealt(total, widths, drawn)
        for deal, count in zip(deals, counts, strict=True):
            seen += deal.entries().tolist()[:count]
        drawn = after(deals, counts)
    rest = [deal.entries().tolist() for deal in dealt(total, last, drawn)]
    assert sorted(chain(seen, *rest)) == list(range(total))
    assert [deal.part for deal in dealt(total, last, drawn)] == [len(part) for part in rest]


@given(st.integers(1, 300), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 40))
def test_workers_that_draw_in_proportion_to_their_widths_end_within_one_step(
    total: int, widths: list[int], early: int
) -> None:
    """Also if the first entries were divided equally. In a step, each worker draws as many entries as it has places."""
    equal = dealt(total, [1] * len(widths))
    deals = dealt(total, widths, after(equal, [early] * len(widths)))
    steps = [-(-deal.part // deal.width) for deal in deals]
    assert max(steps) - min(steps) <= 1


def test_equal_widths_are_the_plain_deal() -> None:
    plain = [Deal(total=21, place=place, places=4) for place in range(4)]
    assert dealt(21, [1, 1, 1, 1]) == plain
    assert [dealt_among(range(4), rank, (), total=21) for rank in range(4)] == plain
