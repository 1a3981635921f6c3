"""The status line: in place on a terminal, now and then elsewhere, and never the end of training."""

from __future__ import annotations

import io

import pytest

from gossamer.observe.status_line import ERASE, StatusLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, seconds: int) -> str:
    line = StatusLine(100.0, lambda: stream)
    for tenths in range(10 * seconds):
        moment = 100.0 + tenths / 10
        if line.is_due(moment):
            line.show(f"at {tenths // 10}", moment)
    return stream.getvalue()


def test_elsewhere_a_line_comes_after_two_seconds_and_then_every_ten() -> None:
    assert shown(io.StringIO(), 35) == "".join(f"gossamer: at {second}\n" for second in (2, 12, 22, 32))


def test_a_terminal_s_line_is_overwritten() -> None:
    assert shown(Terminal(), 4) == "".join(f"{ERASE}gossamer: at {second}" for second in (2, 2, 3, 3))


def test_a_sentence_does_not_steer_the_terminal() -> None:
    stream = Terminal()
    StatusLine(0.0, lambda: stream).say("step 3 was skipped: layer\x1b[2J")
    assert stream.getvalue() == "gossamer: step 3 was skipped: layer\n"


def test_a_line_that_stays_takes_the_place_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    line = StatusLine(0.0, lambda: stream)
    line.show("0123456789abcdef", 2.0)
    line.say("a sentence")
    line.show("x", 3.0)
    line.leave()
    line.leave()
    expected = f"{ERASE}gossamer: 012345678{ERASE}gossamer: a sentence\n{ERASE}gossamer: x\n"
    assert stream.getvalue() == expected


def test_a_closed_stream_ends_no_training() -> None:
    stream = io.StringIO()
    line = StatusLine(0.0, lambda: stream)
    stream.close()
    line.say("x")
    line.show("x", 2.0)
    StatusLine(0.0, lambda: None).show("x", 2.0)  # type: ignore[arg-type, return-value]  # as under pythonw
