"""Time to a loss: the point where a curve crosses it, the runs that are compared, and the model that is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import time_to_loss
from benchmarks.ladder_arms import ARMS, LOCK_STEP, SILENCE
from benchmarks.ladder_plan import TUNING_SEEDS, LadderRun, meaning
from benchmarks.ladder_report import Results
from benchmarks.ladder_tasks import WORKERS, rungs
from benchmarks.network import Result
from benchmarks.time_to_loss import (
    BYTE_RUNGS,
    DDP,
    GRID,
    HOOK,
    TIMED,
    StepTime,
    accuracy,
    grid,
    losses,
    main,
    options,
    steps,
    steps_to,
    table,
)

pytestmark = pytest.mark.nightly

RUNG, OTHER_RUNG = "bytelm-57k-b16", "bytelm-113k-b16"
FEW, FEWEST, UNTRAINED = "4 bits", "1 bit", "DiLoCo 20"
FALLING = [(100, 0.0, 3.0), (200, 0.0, 2.0), (300, 0.0, 2.4), (400, 0.0, 1.5)]


@pytest.mark.parametrize(("loss", "steps"), [(3.5, 100), (3.0, 100), (2.5, 150), (2.0, 200), (1.95, 350), (1.5, 400)])
def test_a_loss_is_reached_where_the_curve_first_crosses_it(loss: float, steps: float) -> None:
    assert steps_to(loss, FALLING) == pytest.approx(steps)


def test_a_loss_that_is_never_reached_has_no_step() -> None:
    assert steps_to(1.4, FALLING) is None
    assert steps_to(1.4, [(100, 0.0, 3.0), (200, 0.0, None), (300, 0.0, 1.0)]) is None, "it has diverged"


# -- runs of the ladder ----------------------------------------------------------------------------------------------


def run(arm: str, rate: float, seed: int, half: float, end: float | None, rung: str = RUNG) -> LadderRun:
    """half and end: held-out losses after half of the steps and after all."""
    made = rungs()[rung].task.steps
    recipe = ARMS[arm].recipe
    return {
        "rung": rung,
        "arm": arm,
        "about": rungs()[rung].about,
        "recipe": recipe,
        "resolved": meaning(recipe, WORKERS) or "",
        "learning_rate": rate,
        "seed": seed,
        "steps": made,
        "workers": WORKERS,
        "seconds": 2.0,
        "cpu_seconds": 1.0,
        "bytes_sent": 0.0 if arm == SILENCE else 1e6,
        "curve": [(made // 2, 0.5e6, half), (made, 1e6, end)],
        "held_out": end,
        "alone": None,
    }


def tuned(arm: str, best: float = 1e-2) -> list[LadderRun]:
    """The runs of a finished search; losses of 0 that no table may use."""
    rates = (3e-3, 1e-2, 3e-2, 1e-1)
    return [run(arm, rate, seed, 0.0, float(rate != best)) for rate in rates for seed in TUNING_SEEDS]


RUNS = [
    *(each for arm in (LOCK_STEP, SILENCE, FEW, FEWEST) for each in tuned(arm, 3e-2 if arm == FEW else 1e-2)),
    *(run(LOCK_STEP, 1e-2, seed, 4.0, 2.0 + seed) for seed in range(2)),
    *(run(SILENCE, 1e-2, seed, 5.0, 4.0 + seed) for seed in range(2)),
    *(run(FEW, 3e-2, seed, 3.0, 1.0 + seed) for seed in range(2)),
    run(FEW, 3e-2, 2, 0.0, 0.0),
    run(FEW, 1e-2, 0, 0.0, 0.0),
    run(FEWEST, 1e-2, 0, 4.0, 2.5),
    run(FEWEST, 1e-2, 1, 4.0, None),
    run(FEW, 3e-2, 0, 0.0, 0.0, OTHER_RUNG),
]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "ladder.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in RUNS))
    return path


@pytest.fixture
def found(runs: Path) -> Results:
    return losses(runs, RUNG, 3)


def test_runs_are_compared_seed_by_seed_at_the_tuned_rate(found: Results) -> None:
    half, whole = rungs()[RUNG].task.steps // 2, rungs()[RUNG].task.steps
    assert found.rates == {LOCK_STEP: 1e-2, SILENCE: 1e-2, FEW: 3e-2, FEWEST: 1e-2}
    assert steps(found, LOCK_STEP) == [whole, whole]
    assert steps(found, FEW) == [pytest.approx(1.5 * half, abs=1), pytest.approx(half, abs=1)]
    assert steps(found, FEWEST) == [None, None]
    assert steps(found, UNTRAINED) == []


def test_rung_without_both_baselines_is_refused_with_the_command(runs: Path) -> None:
    with pytest.raises(SystemExit, match=f"ladder.py --rungs {OTHER_RUNG}"):
        losses(runs, OTHER_RUNG, 3)


def time_of(row: str, seconds: float, network: str = "10mbit,100ms", estimated: bool = False) -> StepTime:
    recipe = ARMS[row].recipe if row in ARMS else ""
    return StepTime(
        network=network,
        row=row,
        recipe=recipe,
        size="small",
        batch=16,
        workers=4,
        steps=8,
        seconds=seconds,
        estimated=estimated,
        commit="",
    )


def test_time_is_steps_times_their_length(found: Results) -> None:
    times = [time_of(FEW, each) for each in (0.2, 0.1, 0.4)] + [time_of(FEWEST, 0.1), time_of(UNTRAINED, 0.1)]
    times += [time_of(DDP, 1.0), time_of(DDP, 0.1, "none"), time_of(HOOK, 0.5), time_of(FEW, 9.0, "1gbit,1ms")]
    free, few, never, untrained, ddp, hook = table(times, "10mbit,100ms", found).splitlines()[2:]
    assert "**10.0 times**" in free
    assert "**8.0 times**" in few, "5/8 of the steps, each a fifth as long"
    assert "200 ms (100 to 400)" in few
    assert "150 %" in few
    assert "reached by 0 of 2 seeds" in never
    assert "diverged" in never
    assert "not trained" in untrained
    assert "**1.0 times**" in ddp
    assert "not trained" in hook


def test_first_arm_on_a_grid_of_networks_is_estimated(found: Results) -> None:
    times = [time_of(LOCK_STEP, 1.0, estimated=True), time_of(FEW, 0.2, estimated=True)]
    times += [time_of(FEWEST, 0.01, estimated=True), time_of(DDP, 2.0), time_of(FEW, 0.1)]
    assert grid(times, found).count(f"{FEW}: 8.0 times") == 1, "the fastest step never reaches the loss"
    assert grid(times, found).count("not estimated") == len(GRID) - 1
    lines = accuracy(times, ["10mbit,100ms"]).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == ["0.50", "2.00"]


def test_longer_trainings_are_interpolated_where_equal_steps_do_not_reach_the_loss(tmp_path: Path) -> None:
    path, whole = tmp_path / "ladder.jsonl", rungs()[RUNG].task.steps
    longer = f"{FEWEST}, 2 times the steps"
    half_way = {**run(FEWEST, 1e-2, 0, 4.0, 1.5), "arm": longer, "steps": 2 * whole}  # 2.0 of lock step lies between
    path.write_text("".join(json.dumps(each) + "\n" for each in [*RUNS, half_way]))
    found = losses(path, RUNG, 3)
    assert steps(found, FEWEST) == [pytest.approx(whole * 2**0.5), None]
    assert longer not in found.compared


# -- the page --------------------------------------------------------------------------------------------------------


def test_arms_and_rungs_can_be_timed() -> None:
    assert {LOCK_STEP, UNTRAINED} <= {*TIMED}
    assert not {SILENCE, "one worker, as many samples", "lock step, 1/20 of the steps"} & {*TIMED}
    assert {RUNG, OTHER_RUNG} <= {*BYTE_RUNGS}
    assert not {"digits-conv", "lstm-b16", f"{RUNG}-muon"} & {*BYTE_RUNGS}


@pytest.mark.parametrize(
    ("size", "says"), [("tiny", "That is the model of the losses."), ("base", "the times mix two models")]
)
def test_page_names_the_model_that_is_timed(
    size: str, says: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[object] = []

    def seconds(recipe: str, network: str, args: object, model: list[str]) -> float:
        timed.append((recipe, network, *model))
        return 0.5

    def today(network: str, name: str, args: object, model: list[str]) -> Result:
        timed.append((name, network, *model))
        return Result(median=1.0)

    monkeypatch.setattr(time_to_loss, "seconds", seconds)
    monkeypatch.setattr(time_to_loss, "today", today)
    monkeypatch.setattr(time_to_loss, "estimate", lambda args: None)
    page, times = tmp_path / "page.md", tmp_path / "times.jsonl"
    asked = ["--rung", RUNG, "--runs", str(runs), "--size", size, "--arms", FEW, "--rounds", "1"]
    asked += ["--times", str(times), "--output", str(page)]
    main(options().parse_args([*asked, "--networks", "10mbit,100ms"]))
    assert ("Float4()", "10mbit,100ms", "--size", size, "--batch", "16") in timed
    assert ("DDP", "none", "--size", size, "--batch", "16") in timed
    written = page.read_text()
    assert says in written
    assert rungs()[RUNG].about in written
    assert "## 10mbit,100ms" in written
    assert "**3.2 times**" in written
    timed.clear()
    main(options().parse_args([*asked, "--report"]))
    assert timed == []
    assert page.read_text() == written
