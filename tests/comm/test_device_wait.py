"""Device wait: the loss of a peer ends a wait within bounded time, on a clock of the test."""

from __future__ import annotations

from typing import NoReturn

import pytest

from gossamer.comm.device_wait import GRACE_SECONDS, LONGEST_SECONDS, DeviceWait
from gossamer.errors import PeerLost


class Moments:
    """A clock that nothing moves but waiting."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= LONGEST_SECONDS
        self.now += seconds
        assert self.now < 100, "it waits for ever"


class Leaving:
    """Peers of which rank 1 leaves at a moment."""

    def __init__(self, clock: Moments, at: float = float("inf")) -> None:
        self.clock, self.at, self.broken = clock, at, 0

    def hung_up(self) -> bool:
        return self.clock.now >= self.at

    def break_off(self, why: str) -> NoReturn:
        self.broken += 1
        raise PeerLost("rank 1 is gone" if self.hung_up() else why)


def watch(at: float = float("inf")) -> tuple[DeviceWait, Moments, Leaving]:
    clock = Moments()
    peers = Leaving(clock, at)
    return DeviceWait(peers, clock, clock.sleep), clock, peers


def check_noticed(kind: type[DeviceWait]) -> None:
    for at in (0.0, 3.0):  # before the wait, and in it
        clock = Moments()
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            kind(Leaving(clock, at), clock, clock.sleep).until(lambda: False, 50.0)
        assert at + GRACE_SECONDS <= clock.now <= at + GRACE_SECONDS + 2 * LONGEST_SECONDS


def test_a_peer_that_leaves_before_or_while_is_noticed_in_bounded_time() -> None:
    check_noticed(DeviceWait)


def test_the_check_catches_who_does_not_poll() -> None:
    class Blind(DeviceWait):
        def until(self, done: object, seconds: float) -> bool:
            self._sleep(LONGEST_SECONDS)
            return False

    with pytest.raises(BaseException, match="DID NOT RAISE"):
        check_noticed(Blind)


def test_what_a_peer_had_done_before_it_left_is_waited_for() -> None:
    watched, clock, peers = watch(at=3.0)
    assert watched.until(lambda: clock.now >= 3.0 + GRACE_SECONDS / 2, 50.0)
    assert peers.broken == 0


@pytest.mark.parametrize("pause_seconds", [20.0, 3600.0])
def test_time_in_which_this_process_was_stopped_does_not_count(pause_seconds: float) -> None:
    clock = Moments()

    def stopped_once(seconds: float) -> None:
        clock.now += pause_seconds if clock.now == 0.0 else seconds

    watched = DeviceWait(Leaving(clock), clock, stopped_once)
    assert watched.until(lambda: clock.now >= pause_seconds + 1.0, 2.0)
    assert not watched.until(lambda: False, 2.0)


def test_a_watch_ends_with_what_it_waits_for_or_with_its_time() -> None:
    watched, clock, _ = watch()
    assert watched.until(lambda: True, 0.0)
    assert clock.now == 0.0
    assert not watched.until(lambda: False, 2.0)
    assert 2.0 <= clock.now <= 2.0 + LONGEST_SECONDS
    watched, clock, peers = watch(at=1.9)  # noticed just before: no time is taken away
    with pytest.raises(PeerLost, match="rank 1"):
        watched.until(lambda: False, 2.0)
    assert peers.broken == 1


def test_an_engine_that_knows_first_waits_a_little_for_the_name() -> None:
    watched, clock, _ = watch(at=0.5)
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        watched.blame("remote process exited")
    assert clock.now <= 0.5 + LONGEST_SECONDS
    watched, clock, _ = watch()
    with pytest.raises(PeerLost, match="remote process exited"):
        watched.blame("remote process exited")
    assert clock.now <= GRACE_SECONDS + LONGEST_SECONDS
