from __future__ import annotations

from itertools import pairwise

from support.exporting import attached, logged, step

from gossamer.observe.exporters import totals
from gossamer.observe.exporters.totals import BOUNDS, COUNTERS, STEP, WORKERS, Totals


def test_steps_add_up() -> None:
    found = Totals()
    found.take([attached(4), *(step(number) for number in range(1, 4)), step(4, seconds=9999.0), logged(4, loss=2.0)])
    counted = {instrument.name: value for instrument, value in found.counters.items()}
    assert counted["gossamer.steps"] == 4
    assert counted["gossamer.payload.sent"] == 16e6
    assert found.seconds == 3 * 0.5 + 9999
    assert found.durations[BOUNDS.index(0.5)] == 3  # at most 0.5 s
    assert found.durations[-1] == 1
    assert sum(found.durations) == 4
    assert (found.gauges[STEP], found.gauges[WORKERS]) == (4, 4)
    assert found.logged == {"loss": 2.0}


def test_bounds_rise_and_names_are_distinguished() -> None:
    assert all(low < high for low, high in pairwise(BOUNDS))
    assert len({instrument.name for instrument in COUNTERS}) == len(COUNTERS)


def test_a_loop_that_makes_up_names_does_not_fill_the_memory(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(totals, "MOST_METRICS", 10)
    found = Totals()
    for number in range(100):
        found.take([logged(number, **{f"loss of step {number}": 1.0})])
    assert list(found.logged) == [f"loss of step {number}" for number in range(90, 100)]
