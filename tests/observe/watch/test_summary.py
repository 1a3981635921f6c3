"""Differences of ranks' environments: those alone, and who has what."""

from __future__ import annotations

from gossamer.observe.watch.summary import differences

ALIKE = {"python": "3.11.7", "torch": "2.13.0"}


def test_what_is_alike_is_not_listed() -> None:
    assert differences(dict.fromkeys(range(4), ALIKE)) == []
    assert differences({}) == []


def test_what_differs_is_listed_with_who_has_it() -> None:
    ranks = {0: {**ALIKE, "OMP_NUM_THREADS": "8"}, 1: ALIKE, 2: {**ALIKE, "torch": "2.12\x1b[31m.0"}}
    assert differences(ranks) == [
        {"name": "OMP_NUM_THREADS", "values": [{"value": None, "ranks": [1, 2]}, {"value": "8", "ranks": [0]}]},
        {
            "name": "torch",
            "values": [{"value": "2.13.0", "ranks": [0, 1]}, {"value": "2.12.0", "ranks": [2]}],
        },
    ]
