"""Roll call: values of the ranks that are left, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count, pairwise
from typing import Any

import pytest
from laws.laws import in_threads
from support.virtual_workers import notices
from torch.distributed import HashStore

from gossamer.comm.environment import roll_call
from gossamer.comm.environment.roll_call import RollCall
from gossamer.errors import ConnectError, MismatchError, PeerLost


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "FIRST_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(roll_call, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(roll_call, "SURE_SECONDS", 0.0)


def seconds() -> Callable[[], float]:
    """A clock that moves on by a second each time it is read."""
    ticks = count()
    return lambda: float(next(ticks))


class Ranks:
    """The roll calls of three ranks, and of restarted ones, in one store."""

    def __init__(self, size: int = 3, **options: Any) -> None:
        self.store, self.size, self.gone, self.silent = HashStore(), size, set[int](), set[int]()
        self.options: dict[str, Any] = options
        self.calls = [self.begun(rank) for rank in range(size)]

    def begun(self, rank: int, **options: Any) -> RollCall:
        heard = {"silent": lambda: self.silent, "exited": self.gone.__contains__}
        return RollCall(self.store, "0", rank, self.size, **(heard | self.options | options))

    def gather(self, *ranks: int, form: str = "number", caller: str = "gossamer.mean") -> list[dict[int, bytes]]:
        """One call by these ranks at once."""
        return in_threads(lambda place: said(self.calls[ranks[place]], form, caller), len(ranks))


def said(calls: RollCall, form: str = "number", caller: str = "gossamer.mean") -> dict[int, bytes]:
    return calls.gather(caller, form, value(calls.rank, form))


def value(rank: int, form: str = "number") -> bytes:
    return f"{form} of {rank}".encode()


def of(*ranks: int, form: str = "number") -> dict[int, bytes]:
    return {rank: value(rank, form) for rank in ranks}


def test_every_rank_receives_the_values_of_all_ranks() -> None:
    ranks = Ranks()
    assert ranks.gather(0, 1, 2) == [of(0, 1, 2)] * 3
    assert ranks.gather(0, 1, 2, form="text") == [of(0, 1, 2, form="text")] * 3


def test_a_rank_whose_process_has_exited_is_left_out() -> None:
    ranks = Ranks()
    ranks.gone.add(2)
    assert ranks.gather(0, 1) == [of(0, 1)] * 2


def test_a_rank_that_the_protocol_does_not_hear_is_left_out() -> None:
    ranks = Ranks()
    ranks.silent.add(1)
    assert ranks.gather(0, 2) == [of(0, 2)] * 2


def test_a_rank_that_has_ended_is_left_out() -> None:
    ranks = Ranks()
    ranks.calls[0].end()
    assert ranks.gather(1, 2) == [of(1, 2)] * 2


def test_a_rank_that_is_not_heard_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a worker that was stopped itself, and hears the others again a moment later."""
    monkeypatch.setattr(roll_call, "SURE_SECONDS", 100.0)
    ranks, looks = Ranks(2), count()

    def silent() -> Collection[int]:
        if next(looks) == 0:
            return {1}
        assert said(ranks.calls[1]) == of(0, 1)
        return ()

    assert said(ranks.begun(0, silent=silent)) == of(0, 1)


def test_a_silent_rank_is_left_out_after_as_long_as_it_takes_to_be_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "SURE_SECONDS", 2.0)
    now = [10.0]
    ranks = Ranks(clock=lambda: now[0])

    def left_out(moment: float, *silent: int) -> set[int]:
        now[0], ranks.silent = moment, {*silent}
        return ranks.calls[0]._out([1, 2])

    assert left_out(10.0, 2) == left_out(11.9, 2) == set()
    assert left_out(12.0, 2) == {2}
    assert left_out(12.1) == left_out(12.2, 2) == left_out(14.1, 2) == set(), "it was heard again"
    assert left_out(14.2, 2) == {2}


def test_a_rank_that_is_late_receives_what_the_others_agreed_on_and_stays_in_step() -> None:
    ranks = Ranks()
    ranks.silent.add(2)
    ranks.gather(0, 1)
    ranks.gather(0, 1, form="text")
    ranks.silent.clear()
    assert ranks.gather(2) == [of(0, 1)]
    assert ranks.gather(2, form="text") == [of(0, 1, form="text")]
    assert ranks.gather(0, 1, 2) == [of(0, 1, 2)] * 3


def test_a_rank_that_is_many_calls_late_joins_the_open_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "KEPT_CALLS", 2)
    ranks = Ranks()
    ranks.silent.add(2)
    for _ in range(6):
        ranks.gather(0, 1)
    ranks.silent.clear()
    assert ranks.gather(0, 1, 2) == [of(0, 1, 2)] * 3


def test_a_rank_that_is_many_calls_late_is_not_counted_in_a_call_that_it_does_not_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roll_call, "KEPT_CALLS", 2)
    ranks = Ranks()
    ranks.silent.add(2)
    for _ in range(6):
        ranks.gather(0, 1)
    ranks.silent.clear()

    def others(rank: int) -> list[dict[int, bytes]]:
        return [said(ranks.calls[rank]), said(ranks.calls[rank], "text")]

    *found, late = in_threads(lambda rank: said(ranks.calls[2], "text") if rank == 2 else others(rank), 3)
    assert found == [[of(0, 1), of(0, 1, 2, form="text")]] * 2
    assert late == of(0, 1, 2, form="text")


def test_old_values_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "KEPT_CALLS", 2)
    ranks = Ranks()
    counts = []
    for _ in range(8):
        ranks.gather(0, 1, 2)
        counts.append(ranks.store.num_keys())
    assert counts[3:] == [counts[3]] * 5


def test_a_large_value_travels_in_pieces_and_is_deleted_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "PIECE_BYTES", 4)
    monkeypatch.setattr(roll_call, "LARGE_BYTES", 8)
    ranks = Ranks()
    counts = []
    for _ in range(6):
        assert ranks.gather(0, 1, 2) == [of(0, 1, 2)] * 3
        counts.append(ranks.store.num_keys())
    grown = [after - before for before, after in pairwise(counts[2:])]
    assert grown == [1] * 3, "the list of members only"


def test_a_restarted_rank_joins_the_call_that_the_others_make() -> None:
    ranks = Ranks()
    ranks.gather(0, 1, 2)
    ranks.silent.add(2)
    ranks.gather(0, 1, form="text")
    ranks.silent.clear()
    ranks.calls[2] = ranks.begun(2, restart=1)
    assert ranks.gather(0, 1, 2) == [of(0, 1, 2)] * 3
    assert ranks.gather(0, 1, 2, form="text") == [of(0, 1, 2, form="text")] * 3


def test_a_restarted_rank_waits_for_the_call_that_it_makes_itself() -> None:
    """The others make another one: it is not counted there, and no call fails."""
    ranks = Ranks()
    ranks.calls[2] = ranks.begun(2, restart=1)

    def others(rank: int) -> list[dict[int, bytes]]:
        return [said(ranks.calls[rank], "text"), said(ranks.calls[rank])]

    *found, back = in_threads(lambda rank: said(ranks.calls[2]) if rank == 2 else others(rank), 3)
    assert found == [[of(0, 1, form="text"), of(0, 1, 2)]] * 2
    assert back == of(0, 1, 2)


def test_a_restarted_rank_that_makes_more_calls_than_the_others_fails_none_of_theirs() -> None:
    """Its loop began at an earlier step: at the end it still saves, and the others evaluate."""
    ranks = Ranks()
    ranks.calls[2] = ranks.begun(2, restart=1)
    saves = ranks.gather(0, 1, 2, form="save")
    assert saves == [of(0, 1, 2, form="save")] * 3

    def work(rank: int) -> list[dict[int, bytes]]:
        forms = ["save", "number"] if rank == 2 else ["number"]
        found = [said(ranks.calls[rank], form) for form in forms]
        ranks.calls[rank].end()
        return found

    assert in_threads(work, 3) == [[of(0, 1)], [of(0, 1)], [of(2, form="save"), of(2)]]


def entry(restart: int) -> roll_call.RollEntry:
    return roll_call.RollEntry("gossamer.mean", "number", restart, restart == 0, 0)


def test_a_restarted_rank_never_replaces_the_value_of_its_former_start() -> None:
    """Other ranks may have read it."""
    ranks = Ranks()
    ranks.calls[2]._write(0, entry(0), b"from before")
    ranks.begun(2, restart=1)._write(0, entry(1), b"other")
    assert ranks.gather(0, 1) == [of(0, 1) | {2: b"from before"}] * 2


def test_a_call_in_which_its_former_start_was_counted_is_not_the_one_of_a_restarted_rank() -> None:
    ranks = Ranks()
    ranks.calls[2]._write(0, entry(0), b"from before")
    back = ranks.calls[2] = ranks.begun(2, restart=1)
    ranks.gather(0, 1)
    back._next = 0
    assert ranks.gather(0, 1, 2) == [of(0, 1, 2)] * 3


def test_a_restarted_rank_replays_the_calls_of_its_first_start() -> None:
    """Those before attach, which every start of the script makes."""
    ranks = Ranks(replays=True)
    ranks.gather(0, 1, 2)
    ranks.calls[2] = ranks.begun(2, restart=1)
    assert ranks.gather(2) == [of(0, 1, 2)]
    assert ranks.gather(0, 1, 2, form="text") == [of(0, 1, 2, form="text")] * 3


def test_a_restarted_rank_replays_no_call_that_it_does_not_make() -> None:
    ranks = Ranks(replays=True)
    ranks.silent.add(2)
    ranks.gather(0, 1, form="text")
    ranks.silent.clear()
    ranks.calls[2] = ranks.begun(2, restart=1)
    assert ranks.gather(0, 1, 2) == [of(0, 1, 2)] * 3


def test_ranks_that_call_different_functions_are_told_on_every_rank() -> None:
    ranks = Ranks(2)
    failed: list[str] = []

    def work(rank: int) -> None:
        with pytest.raises(MismatchError) as failure:
            said(ranks.calls[rank], caller=("gossamer.mean", "gossamer.gather")[rank])
        failed.append(str(failure.value))

    in_threads(work, 2)
    assert failed == ["rank 0 called gossamer.mean while rank 1 called gossamer.gather. Make the same calls in the "
                      "same order on every rank."] * 2  # fmt: skip


def test_a_rank_that_runs_and_does_not_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "30")
    ranks = Ranks(clock=seconds())
    ranks.gone.add(2)
    with notices() as told, pytest.raises(PeerLost, match=r"rank 0 waited 30 s in gossamer\.mean for rank 1 of 3"):
        ranks.gather(0)
    assert any("has waited" in each and "for rank 1 of 3 to reach gossamer.mean" in each for each in told)


def test_the_ranks_that_are_left_out_are_named_once() -> None:
    ranks = Ranks()
    ranks.gone.add(1)
    with notices() as told:
        for _ in range(3):
            ranks.gather(0, 2)
    assert [each for each in told if "covers" in each] == [
        "gossamer.mean covers ranks 0 and 2, without rank 1: lost, ended, late, or restarted and at another call. This "
        "notice repeats when the missing ranks change"
    ]


def test_a_store_that_does_not_answer_is_an_error() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    calls = Ranks().calls[0]
    calls._store = Gone()  # type: ignore[assignment]
    with pytest.raises(ConnectError, match="the store of this run did not answer"):
        said(calls)
