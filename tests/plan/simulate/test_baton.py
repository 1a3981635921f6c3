"""One at a time, in the order in which they came."""

from __future__ import annotations

import threading
from pathlib import Path

from gossamer.plan.simulate.baton import Baton
from gossamer.plan.simulate.process_state import ProcessState


def test_one_at_a_time_and_nobody_is_left_out(tmp_path: Path) -> None:
    baton, inside, most, runs = Baton(ProcessState(tmp_path)), 0, 0, [0] * 5
    state = ProcessState(tmp_path)

    def work(number: int) -> None:
        nonlocal inside, most
        for _ in range(50):
            baton.take(state)
            inside += 1
            most = max(most, inside)
            runs[number] += 1
            inside -= 1
            baton.give()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (runs, most, inside) == ([50] * 5, 1, 0)


def test_who_came_first_has_it_first(tmp_path: Path) -> None:
    baton, order = Baton(ProcessState(tmp_path)), list[int]()
    state = ProcessState(tmp_path)
    baton.take(state)

    def work(number: int) -> None:
        baton.take(state)
        order.append(number)
        baton.give()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for waiting, thread in enumerate(threads, 1):
        thread.start()
        while len(baton._line) < waiting:
            pass
    baton.give()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]
