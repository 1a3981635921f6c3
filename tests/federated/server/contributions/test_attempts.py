"""Attempts: tasks without a contribution are counted in a row, and the reasons are not repeated in every round."""

from __future__ import annotations

import pytest

from gossamer.federated.server.admission import TRIES, Attempts


def tried(attempts: Attempts, client: int, times: int = TRIES) -> None:
    for _ in range(times):
        attempts.empty(client)


def test_too_few_are_left_once_a_device_failed_so_often_in_a_row() -> None:
    attempts = Attempts(clients=3)
    attempts.fewest = 2
    tried(attempts, 0)
    assert not attempts.leave_too_few()
    assert attempts.leave_too_few(lost=[1])
    assert not attempts.leave_too_few(lost=[0])
    tried(attempts, 1, TRIES - 1)
    assert not attempts.leave_too_few()
    attempts.refused(1, "client 1 was refused")
    assert attempts.leave_too_few()


def test_a_counted_device_is_expected_again() -> None:
    attempts = Attempts(clients=1)
    tried(attempts, 0)
    assert attempts.leave_too_few()
    attempts.counted([0])
    assert not attempts.leave_too_few()
    assert attempts.summary() == ""
    tried(attempts, 0, TRIES - 1)
    assert not attempts.leave_too_few()


def test_the_summary_names_both_reasons() -> None:
    attempts = Attempts(clients=4)
    tried(attempts, 0, 2)
    attempts.refused(3, "client 3 was refused in round 2: it diverged")
    assert attempts.summary() == (
        "1 of 4 devices had nothing to train on: the client function returned Update(samples=0), or its loader has no "
        "batch. Give these devices data. 1 of 4 devices were refused. The last: client 3 was refused in round 2: it "
        "diverged."
    )


def test_notices_of_what_repeats_become_rare(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts(clients=2)
    for index in range(100):
        attempts.given_up(index, "too few devices reported in time", reports=0)
        attempts.refused(0, f"client 0 was refused in round {index}")
    assert caplog.text.count("is given up") == 7
    assert "round 63 is given up, 64 in a row, and another is begun: too few devices" in caplog.text
    assert sum(record.getMessage().startswith("client 0 was refused") for record in caplog.records) == 7
    attempts.counted([])
    caplog.clear()
    attempts.given_up(100, "too few devices reported in time", reports=1)
    assert "round 100 is given up, and another is begun: too few devices reported in time (1 reports)" in caplog.text
