"""Session numbers: averages over the steps since the last report, and nothing where there was none."""

from __future__ import annotations

import pytest

from gossamer import events
from gossamer.events import StepEnded
from gossamer.integrations.ray_group import SessionNumbers


def steps(*seconds: float, bytes_sent: float = 100.0, skipped: bool = False) -> None:
    for number, each in enumerate(seconds):
        waiting = each / 4
        events.emit(
            StepEnded(step=number, seconds=each, waiting_seconds=waiting, bytes_sent=bytes_sent, skipped=skipped)
        )


def test_each_report_has_the_steps_since_the_last() -> None:
    numbers = SessionNumbers()
    end = numbers.watch()
    try:
        steps(1.0, 3.0)
        steps(8.0, bytes_sent=400.0, skipped=True)
        assert numbers.take() == {
            "gossamer/steps": 3,
            "gossamer/skipped": 1,
            "gossamer/step_seconds": 4.0,
            "gossamer/waiting_seconds": 1.0,
            "gossamer/bytes_per_step": 200.0,
        }
        assert numbers.take() == {}
        steps(2.0)
        assert numbers.take()["gossamer/step_seconds"] == 2.0
    finally:
        end()
    steps(2.0)
    assert numbers.take() == {}


def test_notices_still_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It shows none, so it must not keep them from who does."""
    end = SessionNumbers().watch()
    try:
        events.notice("said once")
    finally:
        end()
    assert "said once" in caplog.text
