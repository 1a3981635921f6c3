"""Who acts, where, in which order: one at a time, in the caller's thread where nobody else is at it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from selectors import EVENT_READ
from time import monotonic

import pytest

from gossamer.comm.rpc.event_loop import EventLoop, Task


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


def thread_of(run_or_post: Callable[[Task], None]) -> list[int]:
    found: list[int] = []
    run_or_post(lambda: found.append(threading.get_ident()))
    return found


def elsewhere(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_peer_that_is_alone_acts_at_once(loop: EventLoop) -> None:
    assert thread_of(loop.run_or_post) == [threading.get_ident()]


def test_what_is_posted_is_left_to_the_loops_thread(loop: EventLoop) -> None:
    found = thread_of(loop.post)
    assert found == []
    elsewhere(lambda: loop.run_once(monotonic() + 10))
    assert len(found) == 1
    assert found != [threading.get_ident()]


def test_a_peer_that_is_not_alone_has_it_done_after_what_others_wished(loop: EventLoop) -> None:
    done: list[str] = []

    def first() -> None:
        elsewhere(lambda: loop.run_or_post(lambda: done.append("while another acts")))
        done.append("first")

    loop.run_or_post(first)
    loop.run_or_post(lambda: done.append("behind it"))
    assert done == ["first"]
    loop.run_once(monotonic() + 10)
    assert done == ["first", "while another acts", "behind it"]
    assert thread_of(loop.run_or_post) == [threading.get_ident()]


def test_others_are_woken_once_they_may_act(loop: EventLoop) -> None:
    found: list[int] = []

    def call() -> None:
        elsewhere(lambda: found.append(thread_of(loop.run_or_post)[0] == threading.get_ident()))

    loop.run_or_post(lambda: loop.call_after(call))
    loop.post(lambda: loop.call_after(call))
    assert found == [True]
    loop.run_once(monotonic() + 10)
    assert found == [True, True]


def test_what_fails_leaves_the_loop_to_others(loop: EventLoop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.run_or_post(lambda: 1 // 0)  # type: ignore[arg-type]
    assert thread_of(loop.run_or_post) == [threading.get_ident()]


def test_what_was_forgotten_while_it_became_ready_is_not_served(loop: EventLoop) -> None:
    is_present, there = socket.socketpair()
    with is_present, there:
        other, beside = socket.socketpair()
        with other, beside:
            on_ready: list[str] = []

            def serve(mine: str, theirs: socket.socket) -> None:
                on_ready.append(mine)
                loop.unwatch(theirs)

            loop.watch(is_present, EVENT_READ, lambda ready: serve("here", other))
            loop.watch(other, EVENT_READ, lambda ready: serve("other", is_present))
            there.send(b"x")
            beside.send(b"x")
            loop.run_once(monotonic() + 10)
            assert len(on_ready) == 1


# -- one at a time ---------------------------------------------------------------------------------------


class Together(EventLoop):
    """A broken one: whoever comes acts."""

    def run_or_post(self, task: Task) -> None:
        task()


def check_one_at_a_time(loop: EventLoop, start: Callable[[Task], None]) -> None:
    """While a wish is granted, another thread wishes something."""
    inside: list[int] = []
    most: list[int] = []

    def second() -> None:
        most.append(1 + len(inside))

    def first() -> None:
        inside.append(1)
        elsewhere(lambda: loop.run_or_post(second))
        inside.pop()

    start(first)
    loop.run_once(monotonic() + 10)
    assert most == [1]


def test_one_acts_at_a_time(loop: EventLoop) -> None:
    check_one_at_a_time(loop, loop.run_or_post)
    check_one_at_a_time(loop, loop.run_exclusively)
    check_one_at_a_time(loop, loop.post)


def test_without_a_lock_two_would() -> None:
    loop = Together()
    loop.wake()
    with pytest.raises(AssertionError):
        check_one_at_a_time(loop, loop.run_or_post)
    loop.close()


def test_a_delayed_task_runs_after_its_time_and_in_order(loop: EventLoop) -> None:
    ran: list[str] = []
    loop.call_later(0.02, lambda: ran.append("later"))
    loop.call_later(0.0, lambda: ran.append("now"))
    while len(ran) < 2:
        loop.run_once(monotonic() + 60)  # the delayed task ends the wait
    assert ran == ["now", "later"]


def test_a_socket_without_events_is_not_served_until_it_has_some(loop: EventLoop) -> None:
    one, other = socket.socketpair()
    ran: list[int] = []
    with one, other:
        loop.watch(one, EVENT_READ, ran.append)
        loop.watch(one, 0, ran.append)
        other.send(b"x")
        loop.run_once(monotonic())
        assert not ran
        loop.watch(one, EVENT_READ, ran.append)
        loop.run_once(monotonic() + 60)
        assert ran == [EVENT_READ]
        loop.watch(one, 0, ran.append)
        loop.unwatch(one)
