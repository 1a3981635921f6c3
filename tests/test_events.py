"""Notices: shown to the user, whoever wrote their words."""

from __future__ import annotations

import logging

import pytest

from gossamer import events


def test_a_notice_has_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[events.Event] = []
    with caplog.at_level(logging.WARNING, "gossamer"):
        events.notice("rank 1 on host\x1b[2J\x07\x9b1A:\tlost\n")
    end = events.subscribe(heard.append)
    events.notice("rank 1 on host\x1b]0;title\x07")
    end()
    assert caplog.messages == ["rank 1 on host[2J1A:\tlost\n"]
    assert [event.message for event in heard if isinstance(event, events.Noticed)] == ["rank 1 on host]0;title"]


def test_a_listener_without_steps_is_called_with_all_other_events() -> None:
    all_events: list[events.Event] = []
    others: list[events.Event] = []
    ends = [events.subscribe(all_events.append), events.subscribe(others.append, takes_steps=False)]
    step = events.StepEnded(step=1, seconds=0.1, skipped=False, data_seconds=0.0)
    logged = events.Logged(step=1, values={"loss": 0.5})
    for event in (step, logged):
        events.emit(event)
    for end in ends:
        end()
    assert all_events == [step, logged]
    assert others == [logged]


def test_ending_a_subscription_again_does_nothing() -> None:
    heard: list[events.Event] = []
    listener = heard.append
    first, second = events.subscribe(listener, takes_steps=False), events.subscribe(listener)
    first()
    first()
    step = events.StepEnded(step=1, seconds=0.1)
    events.emit(step)
    second()
    second()
    events.emit(step)
    assert heard == [step]


def test_an_unknown_event_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Partet"):
        _ = events.Partet  # type: ignore[attr-defined]
