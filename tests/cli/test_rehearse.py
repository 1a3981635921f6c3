import json
import re
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command_line import refusal
from support.processes import engine_files_left_open
from support.rehearsals import record

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.cli.main import gossamer
from gossamer.cli.rehearse import _steps
from gossamer.observe.rank_record import warm_up
from gossamer.plan.estimate.workload_profile import BucketProfile, WorkloadProfile

SHAPES = [["embedding", [1000, 64], 1.0], ["norm", [64], 0.6], ["head", [64, 500], 0.25]]
NUMEL = 64 * 1000 + 64 + 64 * 500


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(SHAPES))
    return path


def rehearsed(shapes, folder, recipes):
    """A rehearsal of ten steps, whose report is out.json in the folder."""
    sizes = ["--step-seconds", "0.05", "--workers", "2", "--steps", "10"]
    with chdir(folder), engine_files_left_open():
        done = CliRunner().invoke(
            gossamer, ["rehearse", "--shapes", str(shapes), *sizes, "--json", "out.json", *recipes]
        )
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.processes
def test_recipes_are_rehearsed_with_real_bytes(shapes, tmp_path):
    done = rehearsed(shapes, tmp_path, ["--recipe", "Dense()", "--recipe", "TopK(density=0.01)"])
    report = json.loads((tmp_path / "out.json").read_text())
    dense, topk = report["rows"]
    assert (report["parameters"], report["tensors"], report["workers"]) == (NUMEL, 3, 2)
    assert [row["recipe"] for row in report["rows"]] == ["Dense()", "TopK(density=0.01)"]
    assert topk["record"]["recipe"] == repr(resolve("TopK(density=0.01)"))
    assert all(row["record"]["steps"] == 10 and row["record"]["workers_agree"] for row in report["rows"])
    assert dense["seconds_per_step"] >= 0.0499
    assert dense["ratio"] == pytest.approx(dense["seconds_per_step"] / 0.05)
    sent = [row["record"]["bytes_sent_per_step"]["accounted"] for row in report["rows"]]
    assert 4 * NUMEL <= sent[0] <= 4 * NUMEL + 1000  # two workers send half each way, and the step's last op
    assert sent[1] < 0.05 * sent[0]
    rows = re.findall(r"^(\S+\(.*?\)) +\S+ m?s +- +(\d+\.\d\d) ", done.stdout, flags=re.MULTILINE)
    assert rows == [(row["recipe"], f"{row['ratio']:.2f}") for row in report["rows"]]
    assert f"{NUMEL:,} parameters in 3 tensors" in done.stdout
    assert "workers agree" not in done.stdout  # the single runs' own tables


class FakeRun:
    """The command of that name, which says how it was called."""

    said: tuple[str, ...] = ()

    def main(self, arguments: list[str], standalone_mode: bool) -> None:
        assert not standalone_mode
        self.said = tuple(arguments)
        path = arguments[arguments.index("--json") + 1]
        Path(path).write_text(json.dumps(record()))
        print("its own table")
        sys.exit(0)


def test_a_network_is_estimated_and_handed_on(shapes, tmp_path, monkeypatch):
    """A worker whose only bucket of 4 kB is ready at once: two of them exchange it within the round trip's time."""
    bucket = BucketProfile(
        dtype="float32", shapes={"a": (1000,)}, ready_seconds=0.1, computing_seconds=(0, 0), engine_seconds=(0,)
    )
    measured = WorkloadProfile(recipe="Dense()", backward_seconds=0.1, rest_seconds=0.0, buckets=[bucket], crowded=True)
    run, asked = FakeRun(), []
    command = sys.modules[_steps.__module__]
    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "profile_script", lambda *given, copies: asked.append((*given, copies)) or measured)
    options = ["--shapes", str(shapes), "--step-seconds", "0.1", "--workers", "2", "--network", "1gbit,100ms"]
    result = CliRunner().invoke(gossamer, ["rehearse", *options, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert "its own table" not in result.output
    assert run.said[run.said.index("--network") + 1] == "1gbit,100ms"
    ((script, worker, recipe, workers, copies),) = asked
    assert (script.name, recipe, workers, copies) == ("worker.py", resolve("Dense()"), 2, 2)
    assert run.said[-5] == str(script)
    assert list(run.said[-4:-1]) == worker[:-1]  # alike but for the number of steps
    (found,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert 0.15 <= found["estimate"]["step_seconds"] <= 0.35


@pytest.mark.parametrize(
    ("text", "fewest", "steps"),
    [
        ("Dense()", 30, 30),
        ("EveryStep(accumulate=4)", 30, 32),
        ("EveryStep(delay=2)", 30, 30),
        ("LocalSGD(5)", 30, 31),  # 6 to warm up, 25 that count
        ("DiLoCo(50)", 30, 60),  # 10 to warm up
        ("DiLoCo(40, delay=30)", 30, 90),
        ("DelayedAveraging(delay=3, period=2)", 30, 30),
    ],
)
def test_whole_periods_are_rehearsed(text: str, fewest: int, steps: int) -> None:
    stage = resolve(text).strategy.steady_stage
    assert _steps(fewest, stage) == steps
    exchanges = steps // stage.passes_per_step
    assert (exchanges - warm_up(exchanges)) % (stage.schedule.period // stage.passes_per_step) == 0


@pytest.mark.nightly
@pytest.mark.processes
def test_recipes_that_communicate_less_are_rehearsed(shapes, tmp_path):
    recipes = ["DiLoCo(4, fragments=2, delay=1) + Int8()", "EveryStep(accumulate=2)"]
    options = [op for recipe in recipes for op in ("--recipe", recipe)]
    rehearsed(shapes, tmp_path, options)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert all(row["record"]["workers_agree"] and row["seconds_per_step"] >= 0.0499 for row in rows)
    assert rows[0]["bytes_sent_per_step"] == pytest.approx(NUMEL / 4, rel=0.05)  # a byte each, once in four passes
    assert rows[1]["bytes_sent_per_step"] == pytest.approx(4 * NUMEL / 2, rel=0.01)


def refused(*arguments: str) -> str:
    return refusal("rehearse", *arguments)


def test_what_cannot_work_is_refused_before_anything_starts(shapes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, step = ("--shapes", str(shapes)), ("--step-seconds", "0.1")
    assert "--shapes" in refused(*step)
    assert "--step-seconds" in refused(*model)
    for seconds in ("0", "-1", "nan", "inf"):
        assert "--step-seconds" in refused(*model, "--step-seconds", seconds)
    assert "--forward-share" in refused(*model, *step, "--forward-share", "1")
    assert "resnet18" in refused("--shapes", "resnet19", *step)
    assert "TopK" in refused(*model, *step, "--recipe", "TopZ()")
    assert "same recipe" in refused(*model, *step, "--recipe", "Dense", "--recipe", "Dense()")
    assert "LocalSGD(period=8)" in refused(*model, *step, "--recipe", "PostLocalSGD(8, start=100)")
    assert "EveryStep(accumulate=4)" in refused(*model, *step, "--recipe", "EveryStep(global_batch=64, batch=8)")
    assert "20mbit" in refused(*model, *step, "--network", "100quick")
    assert "no directory" in refused(*model, *step, "--json", "nowhere/out.json")
    assert list(tmp_path.iterdir()) == [shapes]
