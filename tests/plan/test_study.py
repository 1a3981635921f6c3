"""Studies: stored runs, schedules, and estimates over seeds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli.study import table_text
from gossamer.observe.record import Record
from gossamer.observe.target import read_target
from gossamer.plan import study
from gossamer.plan.study import RunFailure, RunStore, StudyRun, jobs_that_fit, summarize, train_missing


def run_of(recipe: str, seed: int, label: str | None = None, argument: str = "") -> StudyRun:
    command = ("run", "--recipe", recipe, "train.py", str(seed), argument)
    return StudyRun(label=label or recipe, recipe=recipe, seed=seed, command=command)


def record_of(losses: list[float | None], *, seconds: float = 1.0, sent: float = 100.0, **metrics: Any) -> Record:
    steps = len(losses)

    def points(values: list[float | None]) -> list[list[float | None]]:
        return [[step + 1, seconds * (step + 1) / steps, value] for step, value in enumerate(values)]

    return {
        "recipe": "Dense()",
        "steps": steps,
        "seconds": seconds,
        "bytes_sent_per_step": {"accounted": sent},
        "metrics": {name: points(values) for name, values in ({"validation_loss": losses} | metrics).items()},
        "memory_bytes": {"peak_resident": 1000},
    }


class CountingTrainer:
    """Finishes every run at once, except for those in `failing`; raises `interrupt` at the run with that number."""

    def __init__(self, interrupt_at: int | None = None, failing: tuple[StudyRun, ...] = ()) -> None:
        self.processes, self.trained, self.stopped = 1, list[StudyRun](), False
        self._interrupt_at, self._failing = interrupt_at, failing

    def train(self, run: StudyRun, tell: Callable[[str], None]) -> Record:
        tell("step 1")
        if len(self.trained) == self._interrupt_at:
            raise KeyboardInterrupt
        if run in self._failing:
            raise RunFailure("it broke")
        self.trained.append(run)
        return record_of([2.0, 1.0])

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    return RunStore(tmp_path / "runs", script)


RUNS = [run_of(recipe, seed) for seed in range(2) for recipe in ("Dense()", "Int8()")]


def trained(store: RunStore, trainer: Any, runs: list[StudyRun] = RUNS, jobs: int | None = 1) -> Any:
    return train_missing(runs, store, trainer, jobs=jobs, show=lambda text: None)


# -- the store ---------------------------------------------------------------------------------------------------------


def test_the_same_study_trains_nothing_again_and_a_larger_one_only_its_new_runs(store: RunStore) -> None:
    first, again, more = CountingTrainer(), CountingTrainer(), CountingTrainer()
    records, _ = trained(store, first)
    assert first.trained == RUNS
    assert trained(store, again)[0].keys() == records.keys()
    assert again.trained == []
    added = run_of("Float4()", 0)
    trained(store, more, [*RUNS, added])
    assert more.trained == [added]


def test_an_interrupted_run_is_not_stored_and_is_trained_by_the_next_study(store: RunStore) -> None:
    first, rest = CountingTrainer(interrupt_at=2), CountingTrainer()
    with pytest.raises(KeyboardInterrupt):
        trained(store, first)
    assert first.stopped
    trained(store, rest)
    assert [*first.trained, *rest.trained] == RUNS


def test_a_damaged_file_of_the_store_is_trained_again(store: RunStore) -> None:
    trained(store, CountingTrainer())
    damaged = next(store.folder.glob("Int8*seed-1*"))
    damaged.write_text(damaged.read_text()[:-10])
    again = CountingTrainer()
    trained(store, again)
    assert again.trained == [RUNS[3]]


def test_a_changed_script_or_argument_is_another_run_and_a_changed_label_is_not(
    store: RunStore, tmp_path: Path
) -> None:
    trained(store, CountingTrainer())
    assert store.load(run_of("Int8()", 0, label="small")) is not None
    assert store.load(run_of("Int8()", 0, argument="--fast")) is None
    (tmp_path / "train.py").write_text("print(2)")
    assert RunStore(store.folder, tmp_path / "train.py").load(RUNS[0]) is None


def test_a_failed_run_is_reported_and_the_others_are_trained(store: RunStore) -> None:
    records, failures = trained(store, CountingTrainer(failing=(RUNS[1],)))
    assert list(records) == [RUNS[0], RUNS[2], RUNS[3]]
    assert failures == {RUNS[1]: "it broke"}
    assert store.load(RUNS[1]) is None


# -- the schedule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("jobs", "wanted"), [(1, 1), (3, 3), (None, 2)])
def test_as_many_runs_at_once_as_requested_or_as_fit(
    jobs: int | None, wanted: int, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --jobs the first run is alone, since its memory is not known."""
    monkeypatch.setattr(study, "jobs_that_fit", lambda record, processes, most: 2)
    alone = 1 if jobs is None else 0
    full = threading.Barrier(wanted, timeout=20)
    lock, working, most = threading.Lock(), 0, 0

    class MeetingTrainer(CountingTrainer):
        def train(self, run: StudyRun, tell: Callable[[str], None]) -> Record:
            nonlocal working, most
            with lock:
                working += 1
                most = max(most, working)
                meets = len(self.trained) >= alone
            if meets:
                full.wait()
            record = super().train(run, tell)
            with lock:
                working -= 1
            return record

    runs = [run_of("Dense()", seed) for seed in range(6 + alone)]
    trained(store, MeetingTrainer(), runs, jobs)
    assert most == wanted


@pytest.mark.parametrize(
    ("free", "cores", "processes", "wanted"),
    [(10_000, 16, 1, 9), (10_000, 4, 1, 4), (900, 4, 1, 1), (10_000, 16, 4, 2)],
)
def test_runs_at_once_are_limited_by_memory_and_cores(
    free: float, cores: int, processes: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "free_bytes", lambda: free)
    monkeypatch.setattr(study.system, "cores", lambda: cores)
    assert jobs_that_fit(record_of([1.0]), processes, most=20) == wanted


def test_the_progress_line_has_the_expected_time_once_a_run_is_finished() -> None:
    progress = study._Progress(total=10)
    assert "ready in" not in progress.line(10, 1)
    progress.walls, progress.finished = [4.0, 6.0], 2
    assert progress.line(8, 2) == "2 of 10 runs finished, 2 at once, ready in about 20 s"


def test_the_progress_line_omits_the_output_of_the_script_and_tables() -> None:
    progress, run = study._Progress(total=4), run_of("Dense()", 0)
    progress.began[run] = 0.0
    for printed in ("gossamer: Dense(): step 63, loss 0.727", "epoch 1", "Dense()    314        2.30"):
        progress.take(run, printed)
        assert progress.line(3, 1) == f"0 of 4 runs finished; {run.label} seed 0: step 63, loss 0.727"


# -- estimates ---------------------------------------------------------------------------------------------------------


def studied(losses: dict[str, list[float]], **fields: Any) -> study.StudySummary:
    """A study in which each run logs two losses, the last one as given by recipe and seed."""
    runs = {run_of(name, seed): record_of([3.0, end]) for name, ends in losses.items() for seed, end in enumerate(ends)}
    return summarize(runs, workers=2, **fields)


def test_a_mean_has_the_interval_of_student_over_seeds() -> None:
    mean = studied({"Dense()": [1.0, 2.0, 3.0]}).rows[0].quantities["validation_loss"].mean
    half = 4.303 / 3**0.5
    assert (mean.value, mean.low, mean.high) == pytest.approx((2.0, 2 - half, 2 + half), abs=1e-3)


def test_a_difference_is_paired_by_seed() -> None:
    """An effect of the seed that both recipes share does not widen the interval."""
    _, row = studied({"Dense()": [1.0, 5.0, 9.0], "Int8()": [1.1, 5.2, 9.3]}).rows
    difference = row.quantities["validation_loss"].difference
    assert difference is not None
    assert difference.value == pytest.approx(0.2)
    assert difference.high - difference.low < 0.6
    assert difference.excludes_zero is False or difference.low > 0
    mean = row.quantities["validation_loss"].mean
    assert mean.high - mean.low > 10


def test_a_difference_uses_the_seeds_that_both_recipes_have() -> None:
    _, row = studied({"Dense()": [1.0, 5.0], "Int8()": [1.5, 5.5, 100.0]}).rows
    difference = row.quantities["validation_loss"].difference
    assert difference is not None
    assert difference.value == pytest.approx(0.5)


def test_retained_benefit_needs_both_ends_among_the_recipes() -> None:
    ends = {"Dense()": [1.0, 1.1], "Int8()": [1.25, 1.35]}
    assert [row.retained for row in studied(ends).rows] == [None, None]
    found = [row.retained for row in studied({**ends, "Silent()": [2.0, 2.1]}).rows]
    assert [share.value for share in found if share] == pytest.approx([1.0, 0.75, 0.0])


def test_a_diverged_seed_makes_the_recipe_diverge_and_does_not_shorten_the_others() -> None:
    """Metrics of the others are compared at their own last step."""
    runs = {run_of("Dense()", seed): record_of([3.0, 2.0, 1.0]) for seed in range(2)}
    runs |= {run_of("Int8()", 0): record_of([3.0, 2.0, 1.0]), run_of("Int8()", 1): record_of([3.0, None])}
    found = summarize(runs, workers=2)
    dense, broken = (row.quantities["validation_loss"] for row in found.rows)
    assert (found.equal_steps, dense.mean.value) == (3, 1.0)
    assert broken.mean.value == inf
    simulated = {
        run_of("Dense()", 0): record_of([3.0, 2.0]),
        run_of("Int8()", 0): {**record_of([3.0]), "diverged": True},
    }
    assert summarize(simulated, workers=2).rows[1].quantities["validation_loss"].mean.value == inf


def test_all_metrics_that_every_run_logged_are_estimated_the_loss_first() -> None:
    runs = {run_of("Dense()", seed): record_of([2.0, 1.0], accuracy=[0.5, 0.9]) for seed in range(2)}
    runs |= {run_of("Int8()", 0): record_of([2.0, 1.0], accuracy=[0.5, 0.8], only_here=[1.0])}
    found = summarize(runs, workers=2)
    assert found.metrics == ("validation_loss", "accuracy")
    assert found.rows[1].quantities["accuracy"].mean.value == pytest.approx(0.8)
    assert {"seconds", "bytes_sent", "steps"} < found.rows[0].quantities.keys()
    assert found.rows[0].quantities["bytes_sent"].mean.value == 200.0


def test_metrics_named_like_a_quantity_keep_their_values() -> None:
    def record(last: float) -> Record:
        return record_of([2.0, 1.0], seconds=7.0, sent=100.0, steps=[3.0, last], bytes_sent=[5.0, 6.0], seconds_=[1.0])

    runs = {run_of("Dense()", seed): record(9.0 + seed) for seed in range(2)}
    for each in runs.values():
        each["metrics"]["seconds"] = each["metrics"].pop("seconds_")
    found = summarize(runs, workers=2)
    means = {name: each.mean.value for name, each in found.rows[0].quantities.items()}
    assert means == {
        "validation_loss": 1.0,
        "logged steps": 9.5,
        "logged bytes_sent": 6.0,
        "logged seconds": 1.0,
        "steps": 2.0,
        "bytes_sent": 200.0,
        "seconds": 7.0,
    }
    header, (cells,) = table_text(found)
    shown = dict(zip(header, cells, strict=True))
    assert shown["logged steps at step 2"].startswith("9.5")
    assert (shown["steps"], shown["time"]) == ("2", "7 s")
    assert not found.ignores_seed


def test_seconds_to_a_target_are_infinite_where_it_is_not_reached() -> None:
    found = studied({"Dense()": [1.0, 1.0], "Int8()": [1.0, 2.5]}, target=read_target("validation_loss<2"))
    assert [row.quantities["validation_loss<2"].mean.value for row in found.rows] == [1.0, inf]


def test_a_script_that_ignores_its_seed_is_noticed() -> None:
    assert studied({"Dense()": [1.0, 1.0], "Int8()": [2.0, 2.0]}).ignores_seed
    assert not studied({"Dense()": [1.0, 1.1], "Int8()": [2.0, 2.0]}).ignores_seed
    assert not studied({"Dense()": [1.0]}).ignores_seed


def test_a_script_without_metrics_has_bytes_and_seconds() -> None:
    record = {**record_of([1.0]), "metrics": {}}
    found = summarize({run_of("Dense()", 0): record, run_of("Silent()", 0): record}, workers=2)
    assert (found.loss, found.metrics, found.rows[0].retained) == (None, (), None)
    assert found.rows[0].quantities["seconds"].mean.value == 1.0
