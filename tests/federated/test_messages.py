"""Federated messages: come back as they were, short, and what is none is refused."""

from __future__ import annotations

import pytest

from gossamer.base.peer_ops import Peer
from gossamer.errors import MalformedError
from gossamer.federated.messages import CLIENT, Fate, Report, Task, decode, encode

SENDER = Peer(CLIENT, 3)
REPORT = Report(samples=15, steps=5, learning_rate=0.5, metrics={"loss": 0.25}, counts=(7,), layout="5d2c1db34e9ab773")


@pytest.mark.parametrize("told", [REPORT, Task(round=3, version=2, config={"rate": 0.1}), Fate(missing=(0, 2)), Fate()])
def test_what_was_told_comes_back(told: Report | Task | Fate) -> None:
    assert decode(encode(told), type(told), SENDER) == told


def test_what_goes_without_saying_is_not_said() -> None:
    """A report travels beside contributions of a few hundred bytes."""
    assert encode(Fate()) == "{}"
    assert len(encode(REPORT)) < 120
    assert "parts" not in encode(REPORT)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"samples": -1, "steps": 1}',
        '{"samples": 1e3, "steps": 1}',
        '{"samples": 1, "steps": 1, "more": 1}',
        '{"samples": 1, "steps": 1, "metrics": {"loss": NaN}}',
        '{"samples": 1, "steps": 1, "metrics": {"loss": "low"}}',
        '{"samples": 99999999999999999999, "steps": 1}',
        "[" * 10_000,
    ],
)
def test_what_is_no_report_is_refused_by_its_sender(text: str) -> None:
    with pytest.raises(MalformedError, match="client 3"):
        decode(text, Report, SENDER)
