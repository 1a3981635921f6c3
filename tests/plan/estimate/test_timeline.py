import pytest

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import PeriodicSchedule
from gossamer.plan.estimate.timeline import MOST_COLUMNS, MOST_ROWS, draw


def lasting(text):
    return resolve(text).strategy.steady_stage


def drawn(text):
    drawing = draw(lasting(text))
    return drawing.axis, [*drawing.rows], drawing.legend


@pytest.mark.parametrize(
    ("text", "schedule", "cycle"),
    [
        ("EveryStep()", PeriodicSchedule(1), [(0, 1, 1)]),
        ("EveryStep(accumulate=3)", PeriodicSchedule(3), [(0, 3, 3)]),
        ("EveryStep(delay=2)", PeriodicSchedule(1, delay=2), [(0, 1, 3)]),
        ("LocalSGD(5)", PeriodicSchedule(5), [(0, 5, 5)]),
        ("PostLocalSGD(5, start=100)", PeriodicSchedule(5), [(0, 105, 105)]),
        ("DiLoCo(6, fragments=3, delay=1)", PeriodicSchedule(6, 3, 1), [(0, 2, 3), (1, 4, 5), (2, 6, 7)]),
        ("DelayedAveraging(delay=3, period=2)", PeriodicSchedule(2, delay=3), [(0, 2, 5)]),
    ],
)
def test_every_stage_has_a_schedule(text, schedule, cycle):
    assert lasting(text).schedule == schedule
    assert lasting(text).period_rounds == cycle


def test_fragments_take_turns():
    assert drawn("DiLoCo(12, fragments=3, delay=2)") == (
        "1       10        20",
        [
            ("fragment 0", "···▲═▼·········▲═▼········"),
            ("fragment 1", "·······▲═▼·········▲═▼····"),
            ("fragment 2", "···········▲═▼·········▲═▼"),
        ],
        "· trains apart   ▲ leaves   ═ travels   ▼ lands",
    )


def test_what_overlaps_lies_on_rows_of_its_own():
    assert drawn("DelayedAveraging(delay=2)") == (
        "1       10        20",
        [
            ("parameters", "▲═▼▲═▼▲═▼▲═▼▲═▼▲═▼▲═▼▲═▼▲═"),
            ("", " ▲═▼▲═▼▲═▼▲═▼▲═▼▲═▼▲═▼▲═▼▲"),
            ("", "  ▲═▼▲═▼▲═▼▲═▼▲═▼▲═▼▲═▼▲═▼"),
        ],
        "▲ leaves   ═ travels   ▼ lands",
    )


def test_passes_that_add_up_are_told_from_passes_that_send():
    _, rows, legend = drawn("EveryStep(accumulate=4)")
    assert rows == [("gradients", "···◆" * 6)]
    assert legend == "· adds up   ◆ leaves and lands"


def test_sites_communicate_in_every_pass():
    _, rows, legend = drawn("LocalSGD(12, per_site=2)")
    assert rows == [("gradients, by site", "◆" * 24), ("parameters", ("·" * 11 + "◆") * 2)]
    assert legend == "· trains   ◆ leaves and lands"


def test_a_later_stage_counts_from_the_beginning():
    drawing = draw(lasting("PostLocalSGD(8, start=1000)"))
    assert drawing.axis.index("1,010") + len("1,010") == 10
    assert drawing.rows == (("parameters", "·······◆" * 3),)


def test_long_periods_have_several_passes_in_a_column():
    drawing = draw(lasting("DiLoCo(500, fragments=2, delay=60)"))
    assert drawing.passes_per_column == 20
    assert drawing.axis.index("1,000") + len("1,000") == 1000 // 20
    first, second = (marks for _, marks in drawing.rows)
    assert [place for place, mark in enumerate(first) if mark == "▲"] == [249 // 20, 749 // 20]
    assert [place for place, mark in enumerate(second) if mark == "▼"] == [559 // 20, 1059 // 20]
    assert first.count("═") == 2 * 2


@pytest.mark.parametrize(
    "text",
    [
        *(f"LocalSGD({period})" for period in (1, 2, 3, 7, 24, 36, 37, 99, 1000, 123_457, 10**9)),
        "DiLoCo(500, fragments=4, delay=499)",
        "DiLoCo(100, fragments=100)",
        "DelayedAveraging(delay=300)",
        "EveryStep(delay=40)",
        "DelayedAveraging(delay=10000000)",
        "DiLoCo(10000, fragments=5000, delay=9999)",
    ],
)
def test_drawings_fit_a_terminal_and_show_two_periods(text):
    drawing = draw(lasting(text))
    assert all(len(marks) == len(drawing.rows[0][1]) <= MOST_COLUMNS for _, marks in drawing.rows)
    assert len(drawing.axis) <= MOST_COLUMNS
    assert len(drawing.rows) <= MOST_ROWS
    landings = sum(marks.count("◆") + marks.count("▼") for _, marks in drawing.rows)
    assert landings >= 2 or drawing.hidden_rows


def test_rows_that_find_no_room_are_counted():
    drawing = draw(lasting("DiLoCo(100, fragments=100)"))
    assert (len(drawing.rows), drawing.hidden_rows) == (MOST_ROWS, 100 - MOST_ROWS)


@pytest.mark.parametrize("text", ["DiLoCo(30, fragments=4, delay=3)", "DelayedAveraging(delay=5, period=2)"])
def test_a_drawing_is_the_table_that_runs(text):
    """Every mark comes from a sync round of the plan, and every sync round has its marks."""
    stage = lasting(text)
    drawing = draw(stage)
    columns = len(drawing.rows[0][1])
    turns = list(stage.schedule.rounds_until(columns))
    marks = "".join(marks for _, marks in drawing.rows)
    assert drawing.passes_per_column == 1
    assert marks.count("▲") == len(turns)
    assert marks.count("▼") == sum(turn.landing <= columns for turn in turns)
    places = sorted(place + 1 for _, row in drawing.rows for place, mark in enumerate(row) if mark == "▲")
    assert places == [turn.launch for turn in turns]
