"""Step reports: what follows from the positions of all ranks in their data."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.train.reducer.step_report import LAPS, Presence, StepDecision, StepReport, _decode, _encode

NO_FLAGS = np.zeros(0, dtype=bool)


def report(lap: int, presence: Presence = Presence.TRAINING, **options: bool) -> StepReport:
    return StepReport(
        weight=1.0, presence=presence, settings=0, steps=0, used=NO_FLAGS, moved=NO_FLAGS, lap=lap, **options
    )


@pytest.mark.parametrize(
    ("laps", "ahead"),
    [
        ((4, 5, 4), {}),
        ((63, 0, 62), {}),
        ((4, 6, 4), {0: 0.0, 1: 1.0, 2: 0.0}),
        ((6, 4, 5), {0: 0.0, 1: -1.0, 2: -0.5}),
        ((63, 1, 63), {0: 0.0, 1: 1.0, 2: 0.0}),
        ((0, 0, 62), {0: 0.0, 1: 0.0, 2: -1.0}),
    ],
)
def test_ranks_more_than_half_an_epoch_apart_are_found_also_where_the_count_begins_again(
    laps: tuple[int, ...], ahead: dict[int, float]
) -> None:
    assert StepDecision(tuple(map(report, laps))).apart_in_data == ahead


def test_ranks_without_data_are_not_compared() -> None:
    assert StepDecision((report(4), report(20, Presence.OUT_OF_DATA))).apart_in_data == {}


@pytest.mark.parametrize("lap", [0, 1, LAPS - 1, LAPS, 5 * LAPS + 7])
@pytest.mark.parametrize("wishes", [{}, {"stop": True}, {"look": True}, {"stop": True, "look": True}])
def test_a_lap_travels_beside_the_wishes(lap: int, wishes: dict[str, bool]) -> None:
    sent = report(lap, **wishes)
    received = _decode(_encode(sent), 0, 0)
    assert (received.lap, received.stop, received.look) == (lap % LAPS, sent.stop, sent.look)
