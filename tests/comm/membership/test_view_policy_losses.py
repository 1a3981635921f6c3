"""Loss history: a literal table of waits."""

from __future__ import annotations

from gossamer.comm.membership.view_policy import LOSS_FORGOTTEN_SECONDS, LossHistory


def test_waits_double_up_to_a_bound_and_are_forgotten() -> None:
    history, now, waits = LossHistory(), 0.0, []
    for _ in range(8):
        history.lost("here", now)
        waits.append(history.opens_at("here") - now)
        now += 10.0
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert history.opens_at("there") == float("-inf")
    history.lost("here", now + LOSS_FORGOTTEN_SECONDS)
    assert history.count("here") == 1
