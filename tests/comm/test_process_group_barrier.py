"""The barrier before attach, in injected time: who is waited for, who says so, and what ends the wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import pytest
from support.virtual_workers import notices

from gossamer.comm.environment.wait_progress import WaitProgress
from gossamer.comm.process_group import BUSY, LONGEST_POLL_SECONDS, ArrivalRoll, monitored_barrier
from gossamer.errors import ConnectError, PeerLost


class Store:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.checks = 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self.checks += len(keys)
        return all(key in self.values for key in keys)


class Time:
    """A clock that is moved by who sleeps, and at whose moments something happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds <= LONGEST_POLL_SECONDS
        assert self.now < 2000, "nothing ends this wait"
        self.now += seconds
        for each in [each for each in self.due if each[0] <= self.now]:
            self.due.remove(each)
            each[1]()


@pytest.fixture
def said() -> Iterator[list[str]]:
    with notices() as heard:
        yield heard


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def time() -> Time:
    return Time()


def enter(store: Store, rank: int, world: int = 4, name: str = "attach 0") -> None:
    ArrivalRoll(store, name, rank, world).enter()


def wait(store: Store, time: Time, rank: int, seconds: float = 1800.0, gone: Callable[[], str] = lambda: "") -> None:
    progress = WaitProgress(rank, "gossamer.attach()", seconds, clock=time)
    monitored_barrier(ArrivalRoll(store, "attach 0", rank, 4), progress, gone, time.sleep)


def test_who_still_loads_its_data_is_waited_for_aloud(store: Store, time: Time, said: list[str]) -> None:
    time.due = [(1.0, lambda: enter(store, 2)), (12.0, lambda: enter(store, 1)), (25.0, lambda: enter(store, 3))]
    wait(store, time, 0)
    assert 25 <= time.now < 25.2
    assert said == [
        "rank 0 has waited 10 s for ranks 1 and 3 to reach gossamer.attach(), and waits for 30 min at most "
        f"(GOSSAMER_TIMEOUT=1800). {BUSY}",
        "rank 0 has waited 20 s for rank 3 to reach gossamer.attach(), and waits for 30 min at most "
        "(GOSSAMER_TIMEOUT=1800).",
        "rank 0 continues: all reached gossamer.attach() after 25 s",
    ]


def test_a_rank_that_is_alone_in_attach_names_the_line_that_every_rank_needs() -> None:
    assert "Every rank must call it, not only if world.is_first" in BUSY


@pytest.mark.parametrize(("rank", "speaks"), [(2, True), (3, False)])
def test_the_lowest_rank_that_has_come_speaks(
    store: Store, time: Time, said: list[str], rank: int, speaks: bool
) -> None:
    for each in {1, 2, 3} - {1, rank}:
        enter(store, each)
    time.due = [(15.0, lambda: enter(store, 0)), (15.0, lambda: enter(store, 1))]
    wait(store, time, rank)
    assert bool(said) == speaks
    assert [each for each in said if "for ranks 0 and 1 to reach" in each] == said[:1]


def test_ranks_that_come_together_wait_for_a_moment_and_say_nothing(store: Store, time: Time, said: list[str]) -> None:
    for rank in (1, 2, 3):
        enter(store, rank)
    wait(store, time, 0)
    assert time.now == 0
    assert said == []


def test_a_barrier_counts_only_who_came_to_it(store: Store, time: Time) -> None:
    for rank in range(4):
        enter(store, rank, name="attach 1")
    with pytest.raises(ConnectError, match="ranks 0 to 2 did not reach"):
        wait(store, time, 3, seconds=5.0)


def test_who_never_comes_is_named_when_the_time_is_up(store: Store, time: Time) -> None:
    enter(store, 1)
    with pytest.raises(ConnectError, match=r"ranks 0 and 3 did not reach gossamer\.attach\(\) within 30 min.*=7200"):
        wait(store, time, 2)
    assert 1800 <= time.now < 1801


def test_who_has_left_is_waited_for_no_longer(store: Store, time: Time) -> None:
    with pytest.raises(
        PeerLost, match=r"rank 3 \(w3\) left while rank 0 waited for all ranks to reach gossamer\.attach"
    ):
        wait(store, time, 0, inf, lambda: "rank 3 (w3)" if time.now > 7 else "")
    assert time.now < 7.2


@pytest.mark.parametrize(("gone", "error"), [("rank 0", PeerLost), ("", RuntimeError)])
def test_where_the_store_ends_with_its_rank_that_is_named(
    store: Store, time: Time, monkeypatch: pytest.MonkeyPatch, gone: str, error: type[Exception]
) -> None:
    def check(keys: list[str]) -> bool:
        raise RuntimeError("got 0 bytes")

    monkeypatch.setattr(store, "check", check)
    with pytest.raises(error):
        wait(store, time, 1, gone=lambda: gone)


def test_a_long_wait_asks_the_store_little(store: Store, time: Time) -> None:
    """A thousand ranks ask one store."""
    time.due = [(600.0, lambda: [enter(store, rank) for rank in (0, 1, 2)])]
    wait(store, time, 3)
    assert store.checks < 11 * 600
