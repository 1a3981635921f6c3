from __future__ import annotations

from math import inf

import pytest

from gossamer.plan.emulation import Schedule, read_fault
from gossamer.plan.emulation.namespaces import EmulationError


class Told:
    """Writes down what is done to it."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def cut(self, host: int, other: int | None) -> None:
        self.done.append(("cut", host, other))

    def heal(self, host: int, other: int | None) -> None:
        self.done.append(("heal", host, other))

    def slow(self, host: int, factor: float) -> None:
        self.done.append(("slow", host, factor))

    def stop(self, rank: int) -> None:
        self.done.append(("stop", rank))

    def resume(self, rank: int) -> None:
        self.done.append(("resume", rank))

    def kill(self, rank: int) -> None:
        self.done.append(("kill", rank))


@pytest.mark.parametrize(
    ("text", "at", "lasts", "done"),
    [
        ("cut(2, at=10, for_seconds=5)", 10, 5, [("cut", 2, None), ("heal", 2, None)]),
        ("cut(0, 1, at=0.5)", 0.5, inf, [("cut", 0, 1)]),
        ("slow(1, factor=5, at=1, for_seconds=2)", 1, 2, [("slow", 1, 5), ("slow", 1, 1.0)]),
        ("slow(1, 2.5, at=1)", 1, inf, [("slow", 1, 2.5)]),
        ("stop(3, at=1, for_seconds=2)", 1, 2, [("stop", 3), ("resume", 3)]),
        (" stop(0, 1, at=1, for_seconds=2)", 1, 2, [("stop", 0), ("stop", 1), ("resume", 0), ("resume", 1)]),
        ("kill(1, at=3)", 3, inf, [("kill", 1)]),
    ],
)
def test_a_fault_begins_and_ends(text: str, at: float, lasts: float, done: list[tuple[object, ...]]) -> None:
    fault = read_fault(text, 4)
    assert (fault.at, fault.for_seconds, fault.text) == (at, lasts, text)
    target = Told()
    Schedule([fault], target, lambda sentence: None).tick(1e9)
    assert target.done == done


def test_faults_happen_in_the_order_of_time() -> None:
    target, said = Told(), list[str]()
    late, early = read_fault("kill(0, at=7)", 2), read_fault("cut(1, at=2, for_seconds=3)", 2)
    schedule = Schedule([late, early], target, said.append)
    schedule.tick(1.9)
    assert target.done == []
    schedule.tick(2.1)
    assert target.done == [("cut", 1, None)]
    assert said == ["cut(1, at=2, for_seconds=3) begins 2.1 s after training began."]
    schedule.tick(5.5)
    assert target.done == [("cut", 1, None), ("heal", 1, None)]
    assert schedule.not_begun == ["kill(0, at=7)"]
    schedule.tick(8)
    assert target.done[2:] == [("kill", 0)]
    assert schedule.not_begun == []


def test_the_end_of_a_fault_leaves_overlapping_faults_in_force() -> None:
    target = Told()
    texts = (
        "cut(1, at=1, for_seconds=9)",
        "cut(0, at=2, for_seconds=1)",
        "slow(2, factor=5, at=4, for_seconds=3)",
        "slow(2, factor=3, at=5, for_seconds=1)",
        "kill(0, at=2)",
    )
    schedule = Schedule([read_fault(text, 4) for text in texts], target, lambda sentence: None)
    schedule.tick(3.5)
    assert target.done == [("cut", 1, None), ("cut", 0, None), ("kill", 0), ("heal", 0, None), ("cut", 1, None)]
    schedule.tick(11)
    assert target.done[5:] == [
        *(("slow", 2, 5), ("slow", 2, 3), ("slow", 2, 1.0), ("slow", 2, 5), ("slow", 2, 1.0)),
        ("heal", 1, None),
    ]


def test_a_fault_that_begins_when_another_ends_begins_after_that_end() -> None:
    target = Told()
    texts = "slow(1, factor=2, at=20)", "slow(1, factor=5, at=10, for_seconds=10)"
    Schedule([read_fault(text, 2) for text in texts], target, lambda sentence: None).tick(30)
    assert target.done == [("slow", 1, 5), ("slow", 1, 1.0), ("slow", 1, 2)]


def test_servers_are_numbered_after_workers() -> None:
    assert read_fault("kill(2, at=1)", 2, 1).numbers == (2,)
    with pytest.raises(EmulationError, match="there is no 3; 2 workers and 1 server are numbered from 0 to 2"):
        read_fault("kill(3, at=1)", 2, 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cut(2)", "(cut() missing 1 required keyword-only argument: 'at')"),
        ("cut(at=3)", "host"),
        ("cut(1, 1, at=2)", "cut needs two different hosts, got 1 twice; cut(1, at=2) cuts it from all"),
        ("cut(4, at=1)", "there is no 4; 4 workers are numbered from 0 to 3"),
        ("cut(-1, at=1)", "there is no -1"),
        ("cut(0.5, at=1)", "whole numbers, got 0.5"),
        ("kill(1.0, at=1)", "whole numbers, got 1.0"),
        ("kill(1, at=1e400)", "at least 0 seconds after training began, got at=inf"),
        ("slow(1, factor=1e400, at=1)", "positive, finite factor, got inf"),
        (f"kill(1, at=1{'0' * 400})", "too large"),
        pytest.param(f"kill({'-' * 3000}1, at=1)", "recursion", id="deep"),
        ("cut(True, at=1)", "not a number"),
        ("cut('a', at=1)", "not a number"),
        ("kill(at=1)", "kill needs a rank"),
        ("stop(at=1)", "stop needs a rank"),
        ("kill(1, at=-1)", "at least 0 seconds"),
        ("cut(1, at=1, for_seconds=0)", "for_seconds of a fault must be above 0"),
        ("slow(1, factor=0, at=1)", "positive, finite factor"),
        ("explode(1, at=1)", "one of cut, slow, stop, kill"),
        ("cut(__import__('os').getpid(), at=1)", "malformed"),
        ("cut(1, at=1", "was never closed"),
        ("cut", "one of cut"),
        ("cut(*[1], at=1)", "malformed"),
        ("cut(1, **{'at': 1})", ""),
    ],
)
def test_an_unreadable_text_names_the_line_to_write(text: str, reason: str) -> None:
    with pytest.raises(EmulationError) as refused:
        read_fault(text, 4)
    assert reason in str(refused.value)
    assert "numbered from 0" in str(refused.value) or "cut(2, at=10, for_seconds=5)" in str(refused.value)
