"""Flight recorder: operations are counted alike on all ranks, few are kept, and who waits shows in what it waits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.base import flight_recorder
from gossamer.base.flight_recorder import NOTHING, FlightRecorder
from gossamer.base.ops import AllGather, AllReduceMean, CollectiveOp, Script
from gossamer.base.runner import run_script


class Alone:
    """A group of one, whose answers come when they are let go."""

    rank, world, links = 0, 1, ""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        def wait() -> Any:
            self.asked.set()
            self.let_go.wait()
            return op.answer_alone(lambda payload: payload)

        return wait


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FlightRecorder:
    fresh = FlightRecorder(room=3)
    monkeypatch.setattr(flight_recorder, "current", fresh)
    return fresh


def script(numbers: Tensor, rounds: int) -> Script:
    for _ in range(rounds):
        yield AllReduceMean(numbers)
    yield AllGather((numbers,))


def test_the_latest_operations_are_kept_with_their_states(recorder: FlightRecorder) -> None:
    group = Alone()
    group.let_go.set()
    recorder.step = 7
    run_script(script(torch.ones(4), 4), group)  # type: ignore[arg-type]
    kept = recorder.operations()
    assert [(each.number, each.name, each.step) for each in kept] == [
        (2, "all-reduce", 7),
        (3, "all-reduce", 7),
        (4, "all-gather", 7),
    ]
    assert all(each.began < each.answered for each in kept)
    assert recorder.waiting is NOTHING


def test_a_rank_that_waits_is_seen_from_another_thread(recorder: FlightRecorder) -> None:
    group = Alone()
    thread = threading.Thread(target=run_script, args=(script(torch.ones(4), 0), group))
    thread.start()
    assert group.asked.wait(30)
    assert (recorder.waiting.name, recorder.waiting.answered) == ("all-gather", 0.0)
    group.let_go.set()
    thread.join()
    assert recorder.waiting is NOTHING
    assert recorder.latest.answered > 0


def test_no_tensor_is_kept(recorder: FlightRecorder) -> None:
    group, numbers = Alone(), torch.ones(4)
    group.let_go.set()
    run_script(script(numbers, 1), group)  # type: ignore[arg-type]
    gone = weakref.ref(numbers)
    del numbers
    assert gone() is None
    assert len(recorder.operations()) == 2


def test_groups_are_counted_apart(recorder: FlightRecorder) -> None:
    class Pair(Alone):
        world = 2

    pair, alone = Pair(), Alone()
    numbers = [recorder.begin(group, "call", 0, 0.0).number for group in (pair, alone, pair, pair, alone)]
    assert numbers == [0, 0, 1, 2, 1]
