"""Stacks side by side, of text that faulthandler wrote."""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path

from gossamer.observe import stacks
from gossamer.observe.stacks import Frame, newest_dump, side_by_side, where

PACKAGE = stacks.PACKAGE
START = f"""  File "{PACKAGE}launcher/worker.py", line 99 in _run_program
  File "<frozen runpy>", line 88 in _run_code
"""
LANE = f"""Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "{PACKAGE}comm/runtime/comm_thread.py", line 70 in _run

"""


def waiting(head: str = "Current thread") -> str:
    return f"""{LANE}{head} 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "{PACKAGE}comm/runtime/comm_thread.py", line 88 in result
  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 600 in backward
  File "/home/me/train.py", line 31 in step
  File "/home/me/train.py", line 40 in <module>
{START}"""


def sleeping(line: int = 27) -> str:
    return f"""{LANE}Current thread 0x00007f0000000001 (most recent call first):
  File "/home/me/train.py", line {line} in load
  File "/home/me/train.py", line 39 in <module>
{START}"""


def test_a_rank_that_differs_is_named_with_the_users_line_and_equal_ones_are_merged() -> None:
    texts = {0: waiting(), 1: sleeping(), 2: waiting("Thread"), 3: waiting()}
    lines = side_by_side({rank: newest_dump(text) for rank, text in texts.items()}, {0: 119, 1: 119, 2: 119, 3: 120})
    assert lines == [
        "rank 1: at train.py:27 in load, step 119 or later",
        "    /home/me/train.py:39 in <module>",
        "    /home/me/train.py:27 in load",
        "ranks 0, 2, 3: in gossamer's result (comm_thread.py:88) from train.py:31, step 119 or later",
        "    /home/me/train.py:40 in <module>",
        "    /home/me/train.py:31 in step",
        "    /venv/lib/python3.11/site-packages/torch/_tensor.py:600 in backward",
        f"    {PACKAGE}comm/runtime/comm_thread.py:88 in result",
        "    /usr/lib/python3.11/threading.py:327 in wait",
    ]


def test_the_last_dump_counts() -> None:
    main, lane = newest_dump(sleeping(1) + waiting() + sleeping(27))
    assert main[0] == Frame("/home/me/train.py", 27, "load")
    assert lane[1].function == "_run"


def test_all_threads_are_shown_when_asked() -> None:
    lines = side_by_side({0: newest_dump(sleeping())}, {}, threads=True)
    assert lines[0] == "rank 0: at train.py:27 in load"
    assert "  another thread, in gossamer's _run (comm_thread.py:70)" in lines


def test_a_thread_without_lines_and_a_torn_dump_are_no_error() -> None:
    assert newest_dump("") == ()
    assert where(()) == "nowhere in Python"
    assert newest_dump("Current thread 0x01 (most recent call first):\n  File") == ((),)
    assert side_by_side({0: ((),)}, {}) == ["rank 0: nowhere in Python"]


def test_it_reads_what_this_interpreter_writes(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stands_here() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=stands_here)
    thread.start()
    entered.wait()
    with (tmp_path / "dump").open("w+") as file:
        for _ in range(2):
            faulthandler.dump_traceback(file, all_threads=True)
    leave.set()
    thread.join()
    main, *others = newest_dump((tmp_path / "dump").read_text())
    assert main[0].function == "test_it_reads_what_this_interpreter_writes"
    assert sum(any(frame.function == "stands_here" for frame in other) for other in others) == 1
