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
