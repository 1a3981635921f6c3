"""Signal handlers that leave ignored signals alone."""

from __future__ import annotations

import os
import signal

import pytest

from gossamer.comm.runtime.signal_handlers import STOP_SIGNALS, handling


@pytest.mark.parametrize("ignored", STOP_SIGNALS)
def test_a_signal_that_is_ignored_stays_ignored(ignored: signal.Signals) -> None:
    received: list[int] = []
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        with handling(lambda number, frame: received.append(number), *STOP_SIGNALS):
            for number in STOP_SIGNALS:
                os.kill(os.getpid(), number)
        assert signal.getsignal(ignored) == signal.SIG_IGN
    finally:
        signal.signal(ignored, before)
    assert received == [number for number in STOP_SIGNALS if number != ignored]


def test_previous_handlers_return_after_the_block() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with handling(print, *STOP_SIGNALS):
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == [print] * 3
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
