"""Rank activity: told once it lasts, from one look to the next; a rank that trains on tells nothing."""

from __future__ import annotations

from gossamer.base.flight_recorder import NOTHING, FlightRecorder
from gossamer.observe.activity import ActivityWatch


class Group:
    rank, world = 1, 4


class Looked:
    def __init__(self) -> None:
        self.now, self.recorder = 100.0, FlightRecorder()
        self.watch = ActivityWatch(self.recorder, lambda: self.now)

    def begin(self, bucket: int = 0) -> None:
        self.recorder.step += 1
        self.recorder.waiting = self.recorder.begin(Group(), {"Mean"}, 8.0, self.now, bucket)

    def answer(self) -> None:
        self.recorder.waiting.answered, self.recorder.waiting = self.now, NOTHING

    def look(self) -> object:
        self.now += 2.0
        return self.watch.look()


def test_a_rank_that_trains_tells_it_once() -> None:
    """Broken twin: telling whatever a look finds tells of every operation that is under way just then."""
    rank, told = Looked(), list[object]()
    for _ in range(50):
        rank.begin()
        told.append(rank.look())
        rank.answer()
    assert [each for each in told if each] == [{"kind": "activity", "state": "training"}]


def test_an_operation_that_lasts_is_told_with_whom_it_waits_for() -> None:
    rank = Looked()
    rank.begin(bucket=3)
    rank.recorder.buckets = 7
    assert rank.look() == {"kind": "activity", "state": "training"}
    told = rank.look()
    assert told == {
        "kind": "activity",
        "state": "waiting",
        "operation": "all-reduce",
        "under_way": True,
        "number": 0,
        "place": 1,
        "world": 4,
        "step": 1,
        "bucket": 3,
        "buckets": 7,
        "waits_for": [],
        "seconds": 4.0,
    }
    assert rank.look() is None
    rank.recorder.waiting.waits_for = (2,)
    assert rank.look()["waits_for"] == [2]  # type: ignore[index]
    rank.answer()
    assert rank.look() == {"kind": "activity", "state": "training"}


def test_a_rank_that_is_in_no_operation_for_long_tells_its_last_one() -> None:
    rank = Looked()
    rank.begin()
    rank.answer()
    rank.look()
    told = rank.look()
    assert isinstance(told, dict)
    assert (told["state"], told["under_way"], told["number"], told["seconds"]) == ("training", False, 0, 4.0)


def test_saving_is_told_while_it_lasts() -> None:
    rank = Looked()
    rank.begin()
    rank.answer()
    rank.look()
    with rank.recorder.save():
        assert rank.look() == {"kind": "activity", "state": "saving"}
    assert rank.look() == {"kind": "activity", "state": "training"}
